"""What one device does with a block of classes; see `pols_jax.metrics.class_blocks`."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pols_jax.heads import all_logits


def _block_logits(features, kernel, bias) -> Float[Array, "block examples"]:
    """The logits of a block of classes, one contiguous row per class: what the counting reads."""
    without_bias = all_logits(kernel, features, jnp.zeros(len(features), bias.dtype))
    # A padding class stays at -inf even where a feature is not finite.
    return jnp.where(jnp.isneginf(bias)[:, None], -jnp.inf, without_bias + bias[:, None])


def block_stats(features, labels, start, kernel, bias) -> tuple[Array, ...]:
    """On one device: the true and the largest false logit, the smallest, the predicted class, the rest of the sum.

    Class by class: XLA's own reductions along the first axis jump through memory, and take three times as long.

    Examples:
      >>> features, kernel = jnp.array([[1.0, 0.0], [0.0, 3.0]]), jnp.eye(2)
      >>> true_logit, max_false_logit, *_ = block_stats(features, jnp.array([0, 1]), 0, kernel, jnp.zeros(2))
      >>> true_logit.tolist(), max_false_logit.tolist()
      ([1.0, 3.0], [0.0, 0.0])
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


def count_block(features, labels, per_example, start, kernel, bias, first, end, thresholds):
    """On one device: counts for the examples ``first`` to ``end``, whose classes the block has; and all its scores.

    Examples:
      >>> features, kernel, zeros = jnp.array([[1.0, 0.0], [2.0, 0.0]]), jnp.eye(2), jnp.zeros(2)
      >>> examples = features, jnp.array([0, 0]), (zeros, zeros, zeros)
      >>> own, passing, _ = count_block(*examples, 0, kernel, zeros, 0, 2, jnp.array([[1.5], [1.5]]))
      >>> own[0].tolist(), passing.tolist()
      ([2, 1], [[1], [0]])
    """
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
