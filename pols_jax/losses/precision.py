"""In which precision numbers are added up: never in less than float32."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def accumulation_dtype(*arrays: Float[Array, "..."]) -> jnp.dtype:
    """Returns the widest dtype of the arrays, or float32 if that is wider.

    The value of a single logit is compared with a threshold, and a loss adds up many of them: 16 bits would blur both.
    (``jnp.promote_types`` would refuse to mix bfloat16 and float32 where a program asks for strict promotion.)

    Examples:
      >>> accumulation_dtype(jnp.ones(3, jnp.bfloat16))
      dtype('float32')
    """
    widest = max((array.dtype for array in arrays), key=lambda dtype: jnp.finfo(dtype).bits)
    return widest if jnp.finfo(widest).bits > 32 else jnp.dtype(jnp.float32)
