"""The seven losses of single-logit classification."""

from pols_jax.losses.equations import (
    ALIGNED,
    LOSSES,
    MeanLoss,
    batch_cross_entropy,
    batch_max_margin,
    binary_cross_entropy,
    cross_entropy,
    is_correct,
    make_loss,
    max_margin,
    noise_contrastive_estimation,
    self_normalization,
)
from pols_jax.losses.linear_logits import LinearLogits

__all__ = [
    "ALIGNED",
    "LOSSES",
    "LinearLogits",
    "MeanLoss",
    "batch_cross_entropy",
    "batch_max_margin",
    "binary_cross_entropy",
    "cross_entropy",
    "is_correct",
    "make_loss",
    "max_margin",
    "noise_contrastive_estimation",
    "self_normalization",
]
