"""Ranks scores on the host, where NumPy sorts with vector instructions: many times faster than XLA's sort on a CPU."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

Side = Literal["left", "right"]

# Columns that are taken out of the scores together, and from how many scores on threads share the work.
_BLOCK = 64
_MANY_SCORES = 10**6
# To compare a column with each of m thresholds is faster than to sort it while m is below this share of its length.
_COMPARED = 1 / 300


def at_or_above(
    ascending: Float[np.ndarray, " any"], thresholds: Float[np.ndarray, " thresholds"], *, side: Side = "left"
) -> Int[np.ndarray, " thresholds"]:
    """Counts the sorted values that are at least each threshold; with ``side="right"``, those above it.

    NaN, which is last, passes no threshold, and nothing passes a threshold of NaN.

    Examples:
      >>> at_or_above(np.array([1.0, 2.0, 2.0, np.nan]), np.array([2.0, 0.0, np.nan])).tolist()
      [2, 3, 0]
    """
    numbers = np.searchsorted(ascending, np.nan)  # NaN is sorted to the end
    return numbers - np.searchsorted(ascending[:numbers], thresholds, side=side)


def positives_passing(
    labels: Int[np.ndarray, " examples"], scores: Float[np.ndarray, " examples"]
) -> Int[np.ndarray, " examples"]:
    """Counts the examples of its own class that score at least as high for it as each example.

    A score of NaN passes nothing, and nothing passes it.

    Examples:
      >>> positives_passing(np.array([0, 1, 0, 0]), np.array([1.0, 5.0, 2.0, 2.0])).tolist()
      [3, 1, 2, 2]
    """
    is_nan = np.isnan(scores)
    labels = np.where(is_nan, -2, labels)  # a class of their own
    order = np.lexsort((scores, labels))
    labels, scores = labels[order], scores[order]
    starts_tie = np.r_[True, (labels[1:] != labels[:-1]) | (scores[1:] != scores[:-1])]
    first_of_tie = np.maximum.accumulate(np.where(starts_tie, np.arange(len(labels)), 0))
    positives = np.empty(len(labels), np.int32)
    positives[order] = np.searchsorted(labels, labels, side="right") - first_of_tie
    positives[is_nan] = 0
    return positives


def rank_own_scores(
    scores: Float[np.ndarray, "examples classes"],
    sorted_labels: Int[np.ndarray, " examples"],
    own_scores: Float[np.ndarray, " examples"],
    *,
    side: Side = "left",
) -> tuple[Float[np.ndarray, " examples"], Int[np.ndarray, " examples"], Int[np.ndarray, " examples"]]:
    """Counts, for the score that each example has for its own class, the examples that score at least as high for it.

    The labels and the own scores are in the order of the labels; examples of class -1 belong to none, and get zeros. With
    ``side="right"``, those are counted that score higher.

    Returns:
      The own scores in ascending order within each class; how many examples score at least as high; and how many of those
      belong to the class.

    Examples:
      >>> scores = np.array([[1.0, 5.0], [3.0, 6.0], [2.0, 7.0]])
      >>> _, examples, _ = rank_own_scores(scores, np.array([0, 0, 1]), np.array([3.0, 1.0, 7.0]))
      >>> examples.tolist()
      [3, 1, 1]
    """
    num_examples = len(scores)
    own_scores, compare = own_scores.copy(), np.greater_equal if side == "left" else np.greater
    examples, positives = np.zeros((2, len(own_scores)), np.int32)
    classes, starts = np.unique(sorted_labels, return_index=True)
    ends = np.append(starts[1:], len(sorted_labels))
    if classes[0] < 0:
        classes, starts, ends = classes[1:], starts[1:], ends[1:]

    def count(first: int) -> None:
        """Counts for some of the classes; their columns become rows of contiguous memory."""
        block = classes[first : first + _BLOCK]
        is_dense = block[-1] - block[0] < 2 * len(block)
        columns = scores[:, block[0] : block[-1] + 1] if is_dense else scores[:, block]
        columns = np.array(columns.T, own_scores.dtype, order="C")
        is_passed = np.empty(num_examples, bool)
        for place, class_id in enumerate(block, first):
            column = columns[class_id - block[0] if is_dense else place - first]
            members = slice(starts[place], ends[place])
            thresholds = own_scores[members]
            thresholds.sort()
            positives[members] = at_or_above(thresholds, thresholds, side=side)
            if len(thresholds) < _COMPARED * num_examples:
                examples[members] = [
                    np.count_nonzero(compare(column, threshold, out=is_passed)) for threshold in thresholds
                ]
            else:
                column.sort()
                examples[members] = at_or_above(column, thresholds, side=side)

    firsts = range(0, len(classes), _BLOCK)
    if num_examples * len(classes) < _MANY_SCORES:
        for first in firsts:
            count(first)
    else:
        with ThreadPoolExecutor(os.cpu_count()) as threads:  # NumPy works outside of the interpreter lock
            list(threads.map(count, firsts))
    return own_scores, examples, positives
