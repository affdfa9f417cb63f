"""Exact average precision, precision at recall and thresholds, from scores or class block by class block."""

from pols_jax.metrics.exact import (
    average_precision,
    precision_at_recall,
    relative_improvement,
    slc_metrics,
    threshold_at_recall,
)

__all__ = [
    "average_precision",
    "precision_at_recall",
    "relative_improvement",
    "slc_metrics",
    "threshold_at_recall",
]
