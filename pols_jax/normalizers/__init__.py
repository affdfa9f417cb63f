"""Makes one logit as good as all of them, at a cost that does not depend on the number of classes.

The log-probability of class c is ``z_c - log Z``, where ``log Z = log sum_j exp z_j`` needs all logits. A `Normalizer`
estimates log Z from the features alone, with a few rows. Subtracted from one logit, it turns the logit into
an estimate of the log-probability. Fitting it needs features and the output layer, but neither labels nor a new
training: see docs/normalizer.md.
"""

from pols_jax.normalizers.fitting import fit_normalizer, rows_of_clusters
from pols_jax.normalizers.normalizer import Clusters, Fit, Normalizer, estimates, fold, log_normalizer

__all__ = [
    "Clusters",
    "Fit",
    "Normalizer",
    "estimates",
    "fit_normalizer",
    "fold",
    "log_normalizer",
    "rows_of_clusters",
]
