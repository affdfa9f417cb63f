"""The numbers of the paper, to be printed beside ours.

Source: G. Keren, S. Sabato, B. Schuller, "Fast Single-Class Classification and the Principle of Logit Separation",
ICDM 2018, Tables 1 and 2. Each triple is one minus AUPRC, one minus Precision@0.9 and one minus Precision@0.99, averaged
over classes. What the paper does not report is missing here.
"""

from collections.abc import Mapping

from pols_jax.losses import LOSSES

Errors = tuple[float, float, float]


def _table(*rows: Errors) -> dict[str, Errors]:
    return dict(zip(LOSSES, rows, strict=True))


ONE_LOGIT: Mapping[str, Mapping[str, Errors]] = {
    "mnist": _table(
        (0.008, 0.005, 0.203),
        (0.012, 0.018, 0.262),
        (0.002, 0.001, 0.021),
        (0.002, 0.002, 0.021),
        (0.002, 0.000, 0.037),
        (0.001, 0.001, 0.022),
        (0.002, 0.001, 0.034),
    ),
    "svhn_cropped": _table(
        (0.023, 0.028, 0.545),
        (0.021, 0.025, 0.532),
        (0.015, 0.014, 0.298),
        (0.021, 0.017, 0.320),
        (0.015, 0.016, 0.312),
        (0.015, 0.013, 0.280),
        (0.018, 0.020, 0.384),
    ),
    "cifar10": _table(
        (0.109, 0.326, 0.703),
        (0.094, 0.285, 0.705),
        (0.073, 0.204, 0.599),
        (0.081, 0.214, 0.594),
        (0.070, 0.210, 0.607),
        (0.072, 0.202, 0.602),
        (0.075, 0.226, 0.636),
    ),
    "cifar100": _table(
        (0.484, 0.866, 0.974),
        (0.490, 0.893, 0.977),
        (0.378, 0.807, 0.970),
        (0.383, 0.795, 0.964),
        (0.426, 0.870, 0.978),
        (0.371, 0.795, 0.961),
        (0.468, 0.903, 0.983),
    ),
    "imagenet2012": {
        "cross_entropy": (0.366, 0.739, 0.932),
        "batch_cross_entropy": (0.245, 0.563, 0.865),
    },
}
"""Table 1: data set -> loss -> errors with one logit."""

ALL_LOGITS: Mapping[str, Mapping[str, Errors]] = {
    "mnist": {"cross_entropy": (0.001, 0.000, 0.020)},
    "svhn_cropped": {"cross_entropy": (0.015, 0.016, 0.313)},
    "cifar10": {"cross_entropy": (0.074, 0.214, 0.648)},
    "cifar100": {"cross_entropy": (0.380, 0.801, 0.973)},
    "imagenet2012": {"cross_entropy": (0.223, 0.566, 0.872)},
}
"""Table 2: data set -> loss -> errors with all logits; the paper has them for cross-entropy alone."""

IMPROVEMENT: Mapping[str, Errors] = {
    "mnist": (0.820, 0.913, 0.884),
    "svhn_cropped": (0.234, 0.396, 0.408),
    "cifar10": (0.269, 0.309, 0.136),
    "cifar100": (0.168, 0.052, 0.005),
    "imagenet2012": (0.331, 0.238, 0.072),
}
"""Data set -> mean relative improvement of the aligned losses, as the paper prints it from numbers with more digits."""
