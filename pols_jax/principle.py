"""Does the Principle of Logit Separation hold, by what margin, and how often is it violated?

The principle (Definition 1 of the paper) holds for a set of examples when every true logit is larger than every
false logit of any example of the set.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pols_jax.checks import check_logits_and_labels
from pols_jax.class_stats import DenseStats

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
      The margin, shape ``[]``. The principle holds when it is positive.

    Examples:
      >>> import jax.numpy as jnp
      >>> separation_margin(jnp.array([[2.0, 1.0], [-2.0, -1.0]]), jnp.array([0, 1]))
      Array(-2., dtype=float32)
    """
    z = DenseStats(*check_logits_and_labels(logits, labels, rank=2))
    return jnp.min(z.true) - jnp.max(z.max_false())


def holds(logits: Float[Array, "examples classes"], labels: Int[Array, " examples"]) -> Bool[Array, ""]:
    """Tells whether every true logit is larger than every false logit of the set.

    Args:
      logits: Logits, shape ``[n, k]``.
      labels: True classes in ``[0, k)``, integers, shape ``[n]``.

    Returns:
      A boolean, shape ``[]``.

    Examples:
      >>> import jax.numpy as jnp
      >>> bool(holds(jnp.array([[2.0, 1.0], [0.0, 1.5]]), jnp.array([0, 1])))
      True
    """
    return separation_margin(logits, labels) > 0


@jax.jit
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
    logits, labels = check_logits_and_labels(logits, labels, rank=2)
    num_examples, num_classes = logits.shape
    if num_classes < 2:
        raise ValueError("logits must have at least two classes, or there is no false logit.")
    true = DenseStats(logits, labels).true
    sorted_true = jnp.sort(true)

    def share_not_above(example):
        """The share of the true logits that each false logit of one example is not below."""
        row, label = example
        not_above = jnp.searchsorted(
            sorted_true, row.astype(true.dtype), side="right", method="scan_unrolled"
        )
        is_false = lax.broadcasted_iota(jnp.int32, row.shape, 0) != label.astype(jnp.int32)
        # At most n (k - 1) pairs a row can pass 2^31; a mean of shares cannot.
        return jnp.mean(not_above / num_examples, where=is_false)

    rates = lax.map(share_not_above, (logits, labels), batch_size=_ROWS_AT_ONCE)
    # An invalid label has a NaN true logit, which sorting hides at the end.
    return jnp.where(jnp.isnan(jnp.max(true)), jnp.nan, jnp.mean(rates))
