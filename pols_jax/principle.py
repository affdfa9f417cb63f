"""Does the Principle of Logit Separation hold, by what margin, and how often is it violated?

The principle (Definition 1 of the paper) holds for a set of examples when every true logit is larger than every
false logit of any example of the set.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pols_jax.losses.checks import check_logits_and_labels
from pols_jax.losses.class_stats import DenseStats

__all__ = ["holds", "separation_margin", "violation_rate"]

# Rows whose pairs are counted at once by `violation_rate`: bounds its memory to this many rows of counts.
_ROWS_AT_ONCE = 64


def separation_margin(
    logits: Float[Array, "examples classes"], labels: Int[Array, " examples"]
) -> Float[Array, ""]:
    """Returns the smallest true logit minus the largest false logit of the set.

    Args:
      logits: Logits, shape ``[n, k]``.
      labels: True classes in ``[0, k)``, integers, shape ``[n]``.

    Returns:
      The margin, shape ``[]``. The principle holds when it is positive. A label outside ``[0, k)`` gives NaN.

    Examples:
      >>> import jax.numpy as jnp
      >>> separation_margin(jnp.array([[2.0, 1.0], [-2.0, -1.0]]), jnp.array([0, 1]))
      Array(-2., dtype=float32)
    """
    logits, labels = _check_set(logits, labels)
    true_logit, max_false_logit = DenseStats(logits, labels).max_false_logit()
    return jnp.min(true_logit) - jnp.max(max_false_logit)


def holds(logits: Float[Array, "examples classes"], labels: Int[Array, " examples"]) -> Bool[Array, ""]:
    """Tells whether every true logit is larger than every false logit of the set.

    Args:
      logits: Logits, shape ``[n, k]``.
      labels: True classes in ``[0, k)``, integers, shape ``[n]``.

    Examples:
      >>> import jax.numpy as jnp
      >>> bool(holds(jnp.array([[2.0, 1.0], [0.0, 1.5]]), jnp.array([0, 1])))
      True
    """
    return separation_margin(logits, labels) > 0


def violation_rate(
    logits: Float[Array, "examples classes"], labels: Int[Array, " examples"]
) -> Float[Array, ""]:
    """Returns the share of (true logit, false logit) pairs of the set that are in the wrong order.

    All ``n * n * (k - 1)`` pairs count, those of two different examples as well; a tie is a violation. The pairs are
    never built: each false logit is looked up among the sorted true logits.

    Args:
      logits: Logits, shape ``[n, k]``, with at least two classes.
      labels: True classes in ``[0, k)``, integers, shape ``[n]``.

    Returns:
      A number from 0 (the principle holds) to 1, shape ``[]``.

    Examples:
      >>> import jax.numpy as jnp
      >>> violation_rate(jnp.array([[2.0, 1.0], [-2.0, -1.0]]), jnp.array([0, 1]))
      Array(0.25, dtype=float32)
    """
    logits, labels = _check_set(logits, labels)
    if logits.shape[1] < 2:
        raise ValueError("logits must have at least two classes, or there is no false logit.")
    return _violation_rate(logits, labels)


@jax.jit
def _violation_rate(logits, labels):
    num_examples = logits.shape[0]
    true_logit = DenseStats(logits, labels).true_logit()
    sorted_true = jnp.sort(true_logit)

    def share_not_above(example):
        """The share of the true logits that each false logit of one example is not below."""
        row, label = example
        not_above = jnp.searchsorted(
            sorted_true, row.astype(true_logit.dtype), side="right", method="scan_unrolled"
        )
        is_false = lax.broadcasted_iota(jnp.int32, row.shape, 0) != label
        # At most n (k - 1) pairs a row can pass 2^31; a mean of shares cannot.
        return jnp.mean(not_above / num_examples, where=is_false)

    rates = lax.map(share_not_above, (logits, labels), batch_size=_ROWS_AT_ONCE)
    # An invalid label has a NaN true logit, which sorting hides at the end.
    return jnp.where(jnp.isnan(jnp.max(true_logit)), jnp.nan, jnp.mean(rates))


def _check_set(logits, labels):
    logits, labels = check_logits_and_labels(logits, labels, rank=2)
    if not logits.shape[0]:
        raise ValueError("logits must have at least one example: the principle is about the logits of a set.")
    return logits, labels
