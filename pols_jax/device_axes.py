"""Which device axes an array differs along, as ``shard_map`` keeps track of it (its ``check_vma``)."""

from typing import TypeVar

import jax
from jax import lax
from jaxtyping import Array

Tree = TypeVar("Tree")


def vary_alike(tree: Tree) -> Tree:
    """Marks all arrays as different along every device axis that one of them differs along.

    The branches of a conditional have to agree in this, and so have arguments and cotangents of a custom derivative.
    JAX adds up, over an axis, the gradient of an array that was the same along it before. Outside of ``shard_map``, or
    without its ``check_vma``, nothing is marked and nothing happens.

    Args:
      tree: A tree of arrays.

    Returns:
      The same arrays.

    Examples:
      >>> import jax.numpy as jnp
      >>> vary_alike((jnp.ones(2), jnp.zeros(3)))
      (Array([1., 1.], dtype=float32), Array([0., 0., 0.], dtype=float32))
    """
    axes = frozenset().union(*map(_varying_axes, jax.tree.leaves(tree)))

    def mark(array: Array) -> Array:
        return lax.pcast(array, tuple(sorted(axes - _varying_axes(array))), to="varying")

    return jax.tree.map(mark, tree)


def _varying_axes(array: Array) -> frozenset[str]:
    return jax.typeof(array).manual_axis_type.varying
