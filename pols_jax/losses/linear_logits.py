"""Logits as the product that they are: features times an output layer, not yet multiplied."""

import dataclasses

import jax
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class LinearLogits:
    """The logits ``features @ kernel.T + bias``, for a loss that never needs all of them at once.

    It stands wherever a loss takes logits. The loss has the value and the gradients, up to rounding, that it has for
    ``all_logits(features, kernel, bias)``, but it goes over the classes block by block: no array of examples times
    classes is ever made. It is a pytree, so ``jax.grad`` with respect to it gives the gradients of its parts.
    Derivatives are in reverse mode (``jax.grad``, ``jax.vjp``) alone.

    In ``shard_map`` the rows of ``kernel`` and ``bias`` may be spread over a mesh axis in equal parts: device s of C
    has the classes from ``s k / C`` on, and ``class_axis_name`` names the axis. Labels count over all k classes.
    `pols_jax.heads.pad_classes` makes k a multiple of C. Leave ``check_vma`` at True, or take the gradient outside of
    ``shard_map``: both give the gradients of the whole loss, without ``pmean``.

    Attributes:
      features: Features, shape ``[..., d]``. 16-bit features and kernels are accumulated in float32.
      kernel: One row per class, shape ``[k, d]``. Other libraries store ``[d, k]``: give them as ``kernel.T``.
      bias: One number per class, shape ``[k]``; none if None.
      block_size: How many classes are looked at in one go; chosen if None. It need not divide k.
      class_axis_name: The mesh axis that the rows of ``kernel`` are spread over; None if they are all here.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from pols_jax.losses import cross_entropy
      >>> logits = LinearLogits(jnp.array([[1.0, 0.0]]), kernel=jnp.array([[2.0, 0.0], [1.0, 0.0]]))
      >>> cross_entropy(logits, jnp.array([0]))
      Array([0.3133], dtype=float32)
      >>> jax.grad(lambda logits: cross_entropy(logits, jnp.array([0])).sum())(logits).features
      Array([[-0.2689,  0.    ]], dtype=float32)
    """

    features: Float[Array, "*batch features"]
    kernel: Float[Array, "classes features"]
    bias: Float[Array, " classes"] | None = None
    _: dataclasses.KW_ONLY
    block_size: int | None = dataclasses.field(default=None, metadata={"static": True})
    class_axis_name: str | None = dataclasses.field(default=None, metadata={"static": True})
