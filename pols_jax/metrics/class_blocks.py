"""Exact metrics of an output layer, class block by class block: the ``[n, k]`` array of logits never exists.

The examples are sorted by label. A block of classes then needs only its own rows of the kernel and its own examples'
thresholds, and each device takes another block. Two passes over the classes are made. The first finds, for every
example, what its softmax needs, its largest logit and its true one. The second counts. Several processes may share out the
classes: what each of them finds is put together at the end of a pass.
"""

import copy
import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from pols_jax.class_shares import ClassShare
from pols_jax.heads import all_logits
from pols_jax.metrics.exact import Counts
from pols_jax.metrics.ranking import at_or_above, positives_passing

# Logits of a round of blocks, over all devices together: 256 MB of float32.
_MAX_SCORES = 2**26


class ExampleStats(NamedTuple):
    """What a pass over the classes finds out about each example; half-way, over those that were looked at.

    The log-probability of class c is ``(logit_c - peak) - log_sum``. It keeps its digits where the softmax is
    close to one, so that the order of confident examples is not lost to rounding.

    Attributes:
      true_logit: The logit of the true class, shape ``[n]``.
      max_false_logit: The largest logit of another class than the true one, shape ``[n]``.
      smallest: The smallest logit, shape ``[n]``.
      prediction: The class of the largest logit, shape ``[n]``.
      rest: The sum of ``exp(logit - peak)``, without the largest logit itself, shape ``[n]``.
    """

    true_logit: Float[np.ndarray, " examples"]
    max_false_logit: Float[np.ndarray, " examples"]
    smallest: Float[np.ndarray, " examples"]
    prediction: Int[np.ndarray, " examples"]
    rest: Float[np.ndarray, " examples"]

    @property
    def peak(self) -> Float[np.ndarray, " examples"]:
        """The largest logit, shape ``[n]``."""
        return np.maximum(self.true_logit, self.max_false_logit)

    @property
    def log_sum(self) -> Float[np.ndarray, " examples"]:
        """The log of the sum of ``exp(logit - peak)``, shape ``[n]``."""
        return np.log1p(self.rest).astype(np.float32)


class SplitCounts(NamedTuple):
    """What the pass that counts finds out.

    Attributes:
      one_logit: The counts of examples scored by one logit.
      all_logits: The counts of examples scored by their softmax probability.
      false_passing: How many false logits, of all examples and classes, are at least each true logit; int64 ``[n]``.
      max_false_logit: The largest false logit.
      passing: How many examples pass each threshold that was given, int64 ``[k, rules]``.
      positives: How many of those belong to the class, int64 ``[k, rules]``.
      histogram: How many false logits are in each of the bins that were given, int64 ``[bins]``.

    Examples:
      >>> scored = ScoredSplit(np.eye(3, dtype=np.float32), np.arange(3), np.eye(3, dtype=np.float32), np.zeros(3, np.float32))
      >>> counts = scored.count(scored.example_stats())
      >>> counts.violation_rate(), counts.separation_margin()
      (0.0, 1.0)
    """

    one_logit: Counts
    all_logits: Counts
    false_passing: Int[np.ndarray, " examples"]
    max_false_logit: float
    passing: Int[np.ndarray, "classes rules"]
    positives: Int[np.ndarray, "classes rules"]
    histogram: Int[np.ndarray, " bins"]

    def violation_rate(self) -> float:
        """The share of (true logit, false logit) pairs in the wrong order; NaN if a true logit is NaN."""
        if np.isnan(self.one_logit.own_scores).any():
            return float("nan")
        num_examples, num_classes = len(self.false_passing), len(self.one_logit.class_sizes)
        return int(self.false_passing.sum()) / max(1, num_examples**2 * (num_classes - 1))

    def separation_margin(self) -> float:
        """The smallest true logit minus the largest false one, as `principle.separation_margin`."""
        return float(self.one_logit.own_scores.min()) - self.max_false_logit


class ScoredSplit:
    """A split as an output layer sees it: features with labels, and the rows of the kernel.

    Args:
      features: Features, shape ``[n, d]``.
      labels: True classes in ``[0, k)``, shape ``[n]``.
      kernel: One row per class, shape ``[k, d]``; features are multiplied in its dtype.
      bias: One number per class, shape ``[k]``.
      block_size: Classes per block; by default as many as keep a round of blocks at 256 MB.
      share: The classes that this process has the rows of, if it has not all of them: ``kernel`` and ``bias`` are theirs.
        All processes make the same calls, and get the same results.

    Attributes:
      order: Where the examples, sorted by label, were before. All results are in the sorted order.
      labels: The labels in that order.
      num_rounds: How many blocks each device gets in one pass over the classes.
      share: The classes that this process has the rows of.

    Examples:
      >>> features = np.array([[1.0, 0.0], [0.0, 1.0], [0.9, 0.2]], np.float32)
      >>> scored = ScoredSplit(features, np.array([0, 1, 0]), np.eye(2, dtype=np.float32), np.zeros(2, np.float32))
      >>> stats = scored.example_stats()
      >>> stats.prediction.tolist()
      [0, 0, 1]
      >>> scored.count(stats).one_logit.average_precision().tolist()
      [1.0, 1.0]
    """

    def __init__(
        self,
        features: Float[np.ndarray, "examples features"],
        labels: Int[np.ndarray, " examples"],
        kernel: Float[np.ndarray, "classes features"],
        bias: Float[np.ndarray, " classes"],
        *,
        block_size: int | None = None,
        share: ClassShare | None = None,
    ):
        labels = np.asarray(labels)
        self.share = share = share or ClassShare.whole(len(kernel))
        if not labels.size or labels.min() < 0 or labels.max() >= share.num_classes:
            raise ValueError(f"labels must be at least one, and in [0, {share.num_classes}).")
        self.order = np.argsort(labels, kind="stable")
        self.labels = labels[self.order].astype(np.int32)
        self._kernel, self._bias = kernel, bias
        self._devices = tuple(jax.local_devices())
        num_devices, num_classes = len(self._devices), len(kernel)
        fitting = max(1, _MAX_SCORES // (len(labels) * num_devices))
        self._block_size = max(1, min(block_size or fitting, -(-num_classes // num_devices)))
        self.num_rounds = -(-num_classes // (self._block_size * num_devices))
        self._features, self._labels = self._replicate(
            (np.asarray(features)[self.order].astype(kernel.dtype), self.labels)
        )
        self._offset = self._replicate(np.zeros(len(labels), np.float32))

    def minus(
        self, stats: ExampleStats, estimates: Float[np.ndarray, " examples"]
    ) -> tuple["ScoredSplit", ExampleStats]:
        """The same split, and its statistics, with another score: each logit minus an estimate that its example has.

        The estimates are in the order in which the features were given. The softmax of an example stays as it is.
        """
        estimates, shifted = np.asarray(estimates, np.float32)[self.order], copy.copy(self)
        shifted._offset = self._replicate(estimates)
        logits = ("true_logit", "max_false_logit", "smallest")
        return shifted, stats._replace(**{name: getattr(stats, name) - estimates for name in logits})

    def example_stats(self, *, advance: Callable[[], None] = lambda: None) -> ExampleStats:
        """Makes the first pass; ``advance`` is called after every round of blocks, for a progress bar."""
        num_examples = len(self.labels)
        lowest, zeros = np.full(num_examples, -np.inf, np.float32), np.zeros(num_examples)
        found = ExampleStats(lowest, lowest, -lowest, zeros.astype(np.int32), zeros)
        stats_of_blocks = _on_devices(_block_stats, self._devices)
        for _, starts, head in self._rounds():
            outputs = stats_of_blocks(self._features, self._labels, starts, *head)
            for block in zip(*map(np.asarray, outputs), strict=True):
                found = _merged(found, ExampleStats(*block))
            advance()
        shares = zip(*map(self.share.gather, found), strict=True)
        return functools.reduce(_merged, (ExampleStats(*arrays) for arrays in shares))

    def count(
        self,
        stats: ExampleStats,
        *,
        thresholds: Float[np.ndarray, "classes rules"] | None = None,
        bins: Float[np.ndarray, " edges"] | None = None,
        rank: bool = True,
        advance: Callable[[], None] = lambda: None,
    ) -> SplitCounts:
        """Makes the second pass.

        Args:
          stats: What `example_stats` returned.
          thresholds: Thresholds to be measured, any number per class; NaN is passed by nothing.
          rank: Whether to rank the true logits among all false ones, which takes most of the time; without it
            ``false_passing`` and ``histogram`` are zero.
          bins: Edges of bins of equal width that false logits are counted in; none by default.
          advance: Is called after every round of blocks, for a progress bar.
        """
        num_classes, share = self.share.num_classes, self.share.classes
        if thresholds is None:
            thresholds = np.zeros((num_classes, 0), np.float32)
        count_of_blocks = _on_devices(_count_block, self._devices)
        per_example = (self._offset, *self._replicate((stats.peak, stats.log_sum)))
        sorted_true = np.sort(stats.true_logit)
        bins = np.zeros(1) if bins is None else bins
        ranked = np.zeros(len(self.labels), np.int64)  # how many logits are at or above each true one
        histogram = np.zeros(len(bins) - 1, np.int64)
        own_passing = np.zeros((2, len(self.labels)), np.int32)
        passing = np.zeros(thresholds.shape, np.int64)
        own_classes, own_thresholds = (array[share.start : share.stop] for array in (passing, thresholds))
        for rows, starts, head in self._rounds():
            ends = np.minimum(starts + self._block_size, share.stop)  # the next ones are another process's
            members = (np.searchsorted(self.labels, edge) for edge in (np.minimum(starts, ends), ends))
            block_own, block_passing, block_logits = count_of_blocks(
                self._features,
                self._labels,
                per_example,
                starts,
                *head,
                *(edge.astype(np.int32) for edge in members),
                self._split(own_thresholds[rows], fill=np.nan),
            )
            # Each example is counted in the block of its own class, and is zero in the others.
            own_passing += np.asarray(block_own).sum(axis=0)
            own_classes[rows] = np.concatenate(np.asarray(block_passing))[: len(own_classes[rows])]
            # The logits of padding are -inf, and below everything.
            if rank:
                for part in _sorted_parts(np.asarray(block_logits).reshape(-1)):
                    ranked += at_or_above(part, sorted_true)
                    histogram += _histogram(part, bins)
            advance()
        counted = own_passing, passing, ranked, histogram
        own_passing, passing, ranked, histogram = map(self.share.sum, counted)
        class_sizes = np.bincount(self.labels, minlength=num_classes).astype(np.int32)
        own_log_probs = (stats.true_logit - stats.peak) - stats.log_sum

        def counts(scores, examples) -> Counts:
            positives = positives_passing(self.labels, scores)
            return Counts(*map(jnp.asarray, (self.labels, scores, examples, positives, class_sizes)))

        one_logit, all_logits = map(counts, (stats.true_logit, own_log_probs), own_passing)
        # The logits that were ranked and counted are all of them: take away the true ones.
        is_passed = stats.true_logit[:, None] >= thresholds[self.labels]
        positives = np.zeros_like(passing)
        np.add.at(positives, self.labels, is_passed)
        false_passing = np.empty(len(self.labels), np.int64)
        # Where the two passes round differently, a true logit may have been counted below itself.
        false_passing[np.argsort(stats.true_logit)] = np.maximum(
            ranked - at_or_above(sorted_true, sorted_true), 0
        )
        if rank:
            histogram = histogram - _histogram(sorted_true, bins)
        max_false_logit = float(stats.max_false_logit.max())
        return SplitCounts(
            one_logit, all_logits, false_passing, max_false_logit, passing, positives, histogram
        )

    def column(self, class_id: int) -> Float[np.ndarray, " examples"]:
        """Computes the logit of one class for all examples, in the sorted order."""
        logits = np.zeros(len(self.labels), np.float32)
        if class_id in self.share.classes:
            row = class_id - self.share.classes.start
            rows = (jnp.asarray(rows[row : row + 1]) for rows in (self._kernel, self._bias))
            logits = np.asarray(all_logits(self._features[0], *rows)[:, 0] - self._offset[0])
        return self.share.sum(logits)

    def _rounds(self) -> Iterator[tuple[slice, np.ndarray, tuple[np.ndarray, np.ndarray]]]:
        """The rows that the devices work on together; and of each device the first class, and kernel and bias.

        Past the last class there are classes with the logit -inf.
        """
        places = self._block_size * np.arange(len(self._devices), dtype=np.int32)
        size = self._block_size * len(self._devices)
        for start in range(0, len(self._kernel), size):
            rows = slice(start, start + size)
            head = self._split(self._kernel[rows], fill=0), self._split(self._bias[rows], fill=-np.inf)
            yield rows, np.int32(self.share.classes.start + start) + places, head

    def _split(self, rows: np.ndarray, *, fill: float) -> np.ndarray:
        """From ``[rows, ...]`` to ``[devices, block_size, ...]``."""
        shape = (len(self._devices), self._block_size, *rows.shape[1:])
        split = np.full((shape[0] * shape[1], *shape[2:]), fill, rows.dtype)
        split[: len(rows)] = rows
        return split.reshape(shape)

    def _replicate(self, tree: Any) -> Any:
        copies = jax.pmap(lambda leaves, _: leaves, in_axes=(None, 0), devices=self._devices)
        return copies(tree, np.arange(len(self._devices)))


def _block_logits(features, kernel, bias) -> Float[Array, "block examples"]:
    """The logits of a block of classes, one contiguous row per class: what the counting reads."""
    without_bias = all_logits(kernel, features, jnp.zeros(len(features), bias.dtype))
    # A padding class stays at -inf even where a feature is not finite.
    return jnp.where(jnp.isneginf(bias)[:, None], -jnp.inf, without_bias + bias[:, None])


def _block_stats(features, labels, start, kernel, bias) -> tuple[Array, ...]:
    """On one device: the true and the largest false logit, the smallest, the predicted class, the rest of the sum.

    Class by class: XLA's own reductions along the first axis jump through memory, and take three times as long.
    """
    logits = _block_logits(features, kernel, bias)
    lowest = jnp.full(len(labels), -jnp.inf, logits.dtype)

    def compare(i, found):
        true_logit, max_false_logit, smallest, peak, prediction = found
        row, class_id = logits[i], start + i
        is_true = labels == class_id
        return (
            jnp.where(is_true, row, true_logit),
            jnp.where(is_true, max_false_logit, jnp.maximum(max_false_logit, row)),
            jnp.where(row > -jnp.inf, jnp.minimum(smallest, row), smallest),
            jnp.maximum(peak, row),
            jnp.where(row > peak, class_id, prediction),
        )

    first = (lowest, lowest, -lowest, lowest, jnp.full(len(labels), start))
    true_logit, max_false_logit, smallest, peak, prediction = lax.fori_loop(0, len(kernel), compare, first)
    reference = jnp.where(peak > -jnp.inf, peak, 0.0)  # a block of padding alone

    def add(i, rest):
        return rest + jnp.where(start + i == prediction, 0.0, jnp.exp(logits[i] - reference))

    rest = lax.fori_loop(0, len(kernel), add, jnp.zeros_like(lowest))
    return true_logit, max_false_logit, smallest, prediction, rest


def _count_block(features, labels, per_example, start, kernel, bias, first, end, thresholds):
    """On one device: counts for the examples ``first`` to ``end``, whose classes the block has; and all its scores."""
    offset, peak, log_sum = per_example
    logits = _block_logits(features, kernel, bias) - offset[None, :]

    def count_example(i, counts):
        row = logits[labels[i] - start]
        log_probs = (row - peak) - log_sum
        own = [jnp.sum(scores >= scores[i], dtype=jnp.int32) for scores in (row, log_probs)]
        return tuple(total.at[i].set(count) for total, count in zip(counts, own, strict=True))

    zeros = jnp.zeros(len(labels), jnp.int32)
    own_counts = jnp.stack(lax.fori_loop(first, end, count_example, (zeros, zeros)))

    def count_threshold(threshold):
        return jnp.sum(logits >= threshold[:, None], axis=1, dtype=jnp.int32)

    return own_counts, lax.map(count_threshold, thresholds.T).T, logits


def _merged(found: ExampleStats, later: ExampleStats) -> ExampleStats:
    """What is known of each example after some classes and others, which come later."""
    is_larger = later.peak > found.peak
    high, low = np.maximum(found.peak, later.peak), np.minimum(found.peak, later.peak)
    high_rest, low_rest = np.where(is_larger, (later.rest, found.rest), (found.rest, later.rest))
    # One side may have seen no class at all.
    gap = np.full(len(low), -np.inf)
    np.subtract(low, high, out=gap, where=low != -np.inf, dtype=np.float64)
    return ExampleStats(
        np.maximum(found.true_logit, later.true_logit),
        np.maximum(found.max_false_logit, later.max_false_logit),
        np.minimum(found.smallest, later.smallest),
        np.where(is_larger, later.prediction, found.prediction),
        high_rest + np.exp(gap) * (1 + low_rest),
    )


def _sorted_parts(logits: Float[np.ndarray, " any"]) -> Iterator[Float[np.ndarray, " any"]]:
    """Sorts logits in parts, in NumPy: its sort uses vector instructions and is many times faster than XLA's."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # NumPy sorts outside of the interpreter lock
        yield from threads.map(np.sort, np.array_split(logits, os.cpu_count() or 1))


def _histogram(ascending: Float[np.ndarray, " any"], bins: Float[np.ndarray, " edges"]) -> np.ndarray:
    """How many values are in each bin, as `numpy.histogram`: the last bin has both its edges."""
    edges = bins.astype(ascending.dtype)  # with edges of another dtype, NumPy would convert all values
    below = np.searchsorted(ascending, edges)
    below[-1] = np.searchsorted(ascending, edges[-1], side="right")
    return np.diff(below)


@functools.cache
def _on_devices(function: Callable, devices: tuple[Any, ...]) -> Callable:
    """The function, compiled once per shape for all splits and runs."""
    return jax.pmap(function, devices=devices)
