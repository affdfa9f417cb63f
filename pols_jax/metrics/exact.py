"""Exact retrieval metrics of a classifier, one class at a time: how well does one score find the class?

Every example of the set is scored for class c, by its logit of c or by its softmax probability, and the scores are
compared with a threshold. Nothing is binned or approximated, and ties count as in scikit-learn.

All these metrics need two numbers about each example i, and only about the column of its own class: how many examples
score at least as high as i there, and how many of those belong to the class. That is n comparisons per example, whatever
the number of classes, and no sorting. Where there are few classes to many examples it is faster to sort each column,
and NumPy does it for arrays that are in the memory of a CPU, where all cores share the work; inside of ``jit`` the
comparisons stay.

An example whose label is outside [0, k) belongs to none of the classes: it counts as a negative for each of them.
"""

import functools
import itertools
import os
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from pols_jax.losses.checks import check_logits_and_labels
from pols_jax.metrics.ranking import Side, positives_passing, rank_own_scores

# Partial sums per class. A float32 sum over 10^5 examples one by one would lose the sixth digit.
_PARTIAL_SUMS = 64
# With more examples per class, NumPy sorts the columns faster than XLA compares every pair of examples. (Measured with
# 1,000 to 100,000 examples.)
_EXAMPLES_PER_CLASS = 20


def average_precision(
    scores: Float[Array, "examples classes"],
    labels: Int[Array, " examples"],
    *,
    interpolation: Literal["step", "trapezoid"] = "step",
) -> Float[Array, " classes"]:
    """Computes the area under the precision-recall curve of each class.

    Args:
      scores: Scores, higher for more likely members, shape ``[n, k]``. Raw logits are fine. No threshold finds a NaN.
      labels: True classes in ``[0, k)``, integers, shape ``[n]``.
      interpolation: ``"step"`` is average precision, the sum of precision times gain in recall, as
        ``sklearn.metrics.average_precision_score``. ``"trapezoid"`` joins the points of the curve by straight lines, as
        ``sklearn.metrics.auc``, which is too kind to a poor classifier.

    Returns:
      One area per class, shape ``[k]``; NaN for a class without examples.

    Examples:
      >>> import jax.numpy as jnp
      >>> scores = jnp.array([[0.9, 0.1], [0.8, 0.7], [0.3, 0.2]])
      >>> average_precision(scores, jnp.array([0, 1, 0])).tolist()
      [0.8333, 1.0]
    """
    if interpolation not in ("step", "trapezoid"):
        raise ValueError(f"interpolation must be 'step' or 'trapezoid', got {interpolation!r}.")
    counts = _counts(scores, labels)
    if interpolation == "step":
        return counts.average_precision()
    # The line comes from the point of the curve just above this threshold.
    precision_above = _counts(scores, labels, side="right").precision()
    return _class_means((counts.precision() + precision_above) / 2, counts)


def precision_at_recall(
    scores: Float[Array, "examples classes"], labels: Int[Array, " examples"], recall: float
) -> Float[Array, " classes"]:
    """Computes the precision of each class at the highest threshold whose recall is at least ``recall``.

    Args:
      scores: Scores, higher for more likely members, shape ``[n, k]``. Raw logits are fine.
      labels: True classes in ``[0, k)``, integers, shape ``[n]``.
      recall: The wanted recall, in (0, 1].

    Returns:
      One precision per class, shape ``[k]``; NaN for a class without examples.

    Examples:
      >>> import jax.numpy as jnp
      >>> scores = jnp.array([[0.9, 0.1], [0.8, 0.7], [0.3, 0.2]])
      >>> precision_at_recall(scores, jnp.array([0, 1, 0]), 0.9).tolist()
      [0.6667, 1.0]
    """
    _check_recall(recall)
    return _counts(scores, labels).precision_at_recall(recall)


def threshold_at_recall(
    scores: Float[Array, "examples classes"], labels: Int[Array, " examples"], recall: float
) -> Float[Array, " classes"]:
    """Finds, for each class, the highest threshold whose recall is at least ``recall``.

    The rule that goes with it is ``score >= threshold``.

    Args:
      scores: Scores, higher for more likely members, shape ``[n, k]``. Raw logits are fine.
      labels: True classes in ``[0, k)``, integers, shape ``[n]``.
      recall: The wanted recall, in (0, 1].

    Returns:
      One threshold per class, shape ``[k]``: the score of one of its examples; NaN for a class without examples,
      and where too many scores are NaN.

    Examples:
      >>> import jax.numpy as jnp
      >>> scores = jnp.array([[0.75, 0.1], [0.5, 0.875], [0.25, 0.2]])
      >>> threshold_at_recall(scores, jnp.array([0, 1, 0]), 0.9).tolist()
      [0.25, 0.875]
    """
    _check_recall(recall)
    return _counts(scores, labels).threshold_at_recall(recall)


def slc_metrics(
    scores: Float[Array, "examples classes"], labels: Int[Array, " examples"]
) -> dict[str, Array]:
    """Computes the three measures of the paper's tables, averaged over the classes that have examples.

    Args:
      scores: Scores, higher for more likely members, shape ``[n, k]``. Raw logits are fine.
      labels: True classes in ``[0, k)``, integers, shape ``[n]``.

    Returns:
      ``auprc``, ``precision_at_0.9`` and ``precision_at_0.99``, the means, and ``num_classes``, over how many classes
      they were taken. (The paper's tables print one minus each measure.)

    Examples:
      >>> import jax.numpy as jnp
      >>> scores = jnp.array([[0.9, 0.1, 0.0], [0.8, 0.7, 0.0], [0.3, 0.2, 0.0]])
      >>> metrics = slc_metrics(scores, jnp.array([0, 1, 0]))
      >>> float(metrics["auprc"]), int(metrics["num_classes"])
      (0.916667, 2)
    """
    return _counts(scores, labels).slc_metrics()


def relative_improvement(
    aligned: Float[Array, " aligned"], not_aligned: Float[Array, " other"]
) -> Float[Array, ""]:
    """Computes the last row of the paper's Table 1: how much smaller is the mean error of the aligned losses?

    Args:
      aligned: One error (one minus a measure) per aligned loss.
      not_aligned: One error per loss that is not aligned.

    Returns:
      ``1 - mean(aligned) / mean(not_aligned)``, shape ``[]``: 0.8 means that four fifths of the error are gone.

    Examples:
      The paper's AUPRC errors for CIFAR-10:

      >>> import jax.numpy as jnp
      >>> relative_improvement(jnp.array([0.073, 0.081, 0.070, 0.072, 0.075]), jnp.array([0.109, 0.094]))
      Array(0.269, dtype=float32)
    """
    return 1.0 - jnp.mean(jnp.asarray(aligned)) / jnp.mean(jnp.asarray(not_aligned))


class Counts(NamedTuple):
    """All that the metrics need to know about a set of scores: two numbers per example.

    Example i's score of its own class, taken as the threshold, is passed by ``examples[i]`` examples, itself included;
    ``positives[i]`` of them belong to the class. `pols_jax.metrics.class_blocks` counts them without an ``[n, k]`` array.

    Attributes:
      labels: True classes, shape ``[n]``; -1 for an example that belongs to none of the classes.
      own_scores: The score of each example for its own class, shape ``[n]``.
      examples: How many examples score at least as high for that class, shape ``[n]``.
      positives: How many of those belong to the class, shape ``[n]``.
      class_sizes: How many examples each class has, shape ``[k]``.

    Examples:
      Three examples of one class, a negative scored between the first and the second:

      >>> counts = Counts(
      ...     labels=jnp.array([0, 0, 0]),
      ...     own_scores=jnp.array([0.9, 0.7, 0.6]),
      ...     examples=jnp.array([1, 3, 4]),
      ...     positives=jnp.array([1, 2, 3]),
      ...     class_sizes=jnp.array([3]),
      ... )
      >>> counts.precision_at_recall(0.9).tolist()
      [0.75]
    """

    labels: Int[Array, " examples"]
    own_scores: Float[Array, " examples"]
    examples: Int[Array, " examples"]
    positives: Int[Array, " examples"]
    class_sizes: Int[Array, " classes"]

    @jax.jit
    def precision(self) -> Float[Array, " examples"]:
        """The precision at each threshold; 1 where nothing passes, the start of the curve.

        It is 0 for an example whose score is NaN: no threshold finds that, and a diverged network must not look perfect.
        """
        precision = jnp.where(self.examples > 0, _ratio(self.positives, jnp.maximum(self.examples, 1)), 1.0)
        return jnp.where(jnp.isnan(self.own_scores), 0.0, precision)

    @jax.jit
    def average_precision(self) -> Float[Array, " classes"]:
        """See `average_precision` in this module."""
        return _class_means(self.precision(), self)

    @jax.jit
    def precision_at_recall(self, recall: float) -> Float[Array, " classes"]:
        """See `precision_at_recall` in this module."""
        # Of the examples that reach the recall, the one with the highest score has the fewest positives, and the
        # fewest examples, at its threshold. Scores that tie have equal counts.
        reaches = _reaches(self, recall)
        none = jnp.iinfo(jnp.int32).max
        positives, examples = (
            jax.ops.segment_min(jnp.where(reaches, count, none), self.labels, len(self.class_sizes))
            for count in (self.positives, self.examples)
        )
        precision = jnp.where(examples < none, _ratio(positives, examples), 0.0)  # 0: too many scores are NaN
        return jnp.where(self.class_sizes > 0, precision, jnp.nan)

    @jax.jit
    def threshold_at_recall(self, recall: float) -> Float[Array, " classes"]:
        """See `threshold_at_recall` in this module."""
        reaches, num_classes = _reaches(self, recall), len(self.class_sizes)
        candidates = jnp.where(reaches, self.own_scores, -jnp.inf)
        thresholds = jax.ops.segment_max(candidates, self.labels, num_classes)
        is_reached = jax.ops.segment_max(reaches.astype(jnp.int32), self.labels, num_classes) > 0
        return jnp.where(is_reached, thresholds, jnp.nan)

    @jax.jit
    def measures(self) -> dict[str, Float[Array, " classes"]]:
        """The three measures of the paper's tables, of each class."""
        return {
            "auprc": self.average_precision(),
            "precision_at_0.9": self.precision_at_recall(0.9),
            "precision_at_0.99": self.precision_at_recall(0.99),
        }

    @jax.jit
    def slc_metrics(self) -> dict[str, Array]:
        """See `slc_metrics` in this module."""
        return jax.tree.map(jnp.nanmean, self.measures()) | {"num_classes": jnp.sum(self.class_sizes > 0)}


def _counts(scores, labels, side: Side = "left") -> Counts:
    scores, labels = check_logits_and_labels(scores, labels, rank=2, name="scores")
    if not scores.shape[0]:
        raise ValueError("scores must have at least one example: a metric is about the scores of a set.")
    is_traced = isinstance(scores, Tracer) or isinstance(labels, Tracer)
    if not is_traced and [device.platform for device in scores.devices()] == ["cpu"]:
        return _count_on_cpu(scores, np.asarray(labels), side)
    return _count_all(scores, labels, side=side)


def _count_on_cpu(scores: Array, labels: np.ndarray, side: Side) -> Counts:
    """Counts as `_count_all`, the examples sorted by label."""
    num_examples, num_classes = scores.shape
    labels = np.where((labels >= 0) & (labels < num_classes), labels, -1)
    order = np.argsort(labels)
    labels = labels[order]
    thresholds = np.asarray(scores)[order, labels]
    class_sizes = np.bincount(labels + 1, minlength=num_classes + 1)[1:].astype(np.int32)
    # NumPy sorts 16 bits slowly, or not at all; float32 keeps their order and ties.
    own_scores = thresholds.astype(np.float32) if thresholds.dtype.itemsize < 4 else thresholds
    if num_examples > _EXAMPLES_PER_CLASS * num_classes or side == "right":
        ranks = rank_own_scores(np.asarray(scores), labels, own_scores, side=side)
    else:
        # The parts are dispatched together, and computed at the same time.
        edges = np.linspace(0, num_examples, (os.cpu_count() or 1) + 1).astype(np.int32)
        parts = [_count_part(scores, labels, thresholds, *ends) for ends in itertools.pairwise(edges)]
        ranks = own_scores, sum(map(np.asarray, parts)), positives_passing(labels, own_scores)
    return Counts(*map(jnp.asarray, (labels, *ranks, class_sizes)))


@jax.jit
def _count_part(scores, sorted_labels, thresholds, first, end):
    """How many of the examples ``first`` to ``end`` score at least as high as each threshold, for its class."""
    columns = jnp.maximum(sorted_labels, 0)

    def count(j, examples):
        passes = scores[j].at[columns].get(mode="promise_in_bounds") >= thresholds
        return examples + passes.astype(jnp.int32)

    return lax.fori_loop(first, end, count, jnp.zeros(len(thresholds), jnp.int32))


@functools.partial(jax.jit, static_argnames="side")
def _count_all(scores, labels, *, side: Side) -> Counts:
    num_examples, num_classes = scores.shape
    compare = jnp.greater_equal if side == "left" else jnp.greater
    labels = jnp.where((labels >= 0) & (labels < num_classes), labels, -1)
    own_scores = jnp.take_along_axis(scores, jnp.maximum(labels, 0)[:, None], axis=1)[:, 0]
    order = jnp.argsort(labels)
    sorted_labels, thresholds = labels[order], own_scores[order]
    columns = jnp.maximum(sorted_labels, 0)

    # Example j passes or fails the threshold of every example. Its scores are one row of memory, read once, and in
    # the order of the labels nearly from left to right. Going through the columns instead would need the transpose,
    # which costs more than all the counting when k is large.
    def count(j, counts):
        examples, positives = counts
        passes = compare(scores[j].at[columns].get(mode="promise_in_bounds"), thresholds)
        is_positive = sorted_labels == labels[j]
        return examples + passes.astype(jnp.int32), positives + (passes & is_positive).astype(jnp.int32)

    zeros = jnp.zeros(num_examples, jnp.int32)
    sorted_counts = lax.fori_loop(0, num_examples, count, (zeros, zeros))
    examples, positives = (zeros.at[order].set(values) for values in sorted_counts)
    class_sizes = jax.ops.segment_sum(jnp.ones_like(labels), labels, num_classes)
    return Counts(labels, own_scores, examples, positives, class_sizes)


def _reaches(counts: Counts, recall):
    """Which examples' scores, as the threshold, recall enough of their class."""
    # Compiled, a division may be off by a rounding; 9 of 10 is a recall of 0.9 all the same.
    return _ratio(counts.positives, counts.class_sizes[counts.labels]) >= recall * (1 - 2.0**-21)


@jax.jit
def _class_means(values, counts: Counts):
    num_classes = len(counts.class_sizes)
    partial = jnp.arange(values.shape[0], dtype=jnp.int32) % _PARTIAL_SUMS
    places = jnp.where(counts.labels < 0, -1, counts.labels + num_classes * partial)
    sums = jax.ops.segment_sum(values, places, _PARTIAL_SUMS * num_classes)
    totals = jnp.sum(sums.reshape((_PARTIAL_SUMS, num_classes)), axis=0)
    return totals / counts.class_sizes.astype(totals.dtype)


def _ratio(counts, of_counts):
    return counts.astype(jnp.float32) / of_counts.astype(jnp.float32)


def _check_recall(recall):
    if isinstance(recall, int | float) and not 0 < recall <= 1:
        raise ValueError(f"recall must be in (0, 1], got {recall}.")
