"""Device axes that JAX keeps track of: those an array differs along in ``shard_map``, and those of an explicit mesh."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P
from jaxtyping import Array

Tree = TypeVar("Tree")


def vary_alike(tree: Tree) -> Tree:
    """Marks all arrays as different along every device axis that one of them differs along.

    The branches of a conditional have to agree in this, and so have arguments and cotangents of a custom derivative.
    JAX adds up, over an axis, the gradient of an array that was the same along it before. Outside of ``shard_map``, or
    without its ``check_vma``, nothing is marked and nothing happens.

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


def is_on_explicit_mesh(tree: Any) -> bool:
    """Tells whether an array of the tree is sharded over axes of an explicit mesh.

    Examples:
      >>> import jax.numpy as jnp
      >>> is_on_explicit_mesh(jnp.ones(3))
      False
    """
    return any(any(jax.typeof(leaf).sharding.spec) for leaf in jax.tree.leaves(tree))


def partitioned_by_xla(function: Callable[..., Tree], arrays: tuple[Any, ...], *, out_spec: P) -> Tree:
    """Calls a function of arrays on an explicit mesh, and leaves it to XLA where its work is done.

    In explicit mode JAX itself refuses what it does not know the place of: to look up one class per example, or to take
    some of the rows. Inside of the call the axes of the mesh are automatic.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import NamedSharding
      >>> mesh = jax.make_mesh((8,), ("class",), axis_types=(AxisType.Explicit,))
      >>> logits = jax.device_put(jnp.arange(16.0), NamedSharding(mesh, P("class")))
      >>> partitioned_by_xla(lambda logits: logits[jnp.array([3, 5])], (logits,), out_spec=P())
      Array([3., 5.], dtype=float32)
    """
    mesh = next(
        sharding.mesh for leaf in jax.tree.leaves(arrays) if any((sharding := jax.typeof(leaf).sharding).spec)
    )
    names = zip(mesh.axis_names, mesh.axis_types, strict=True)
    axes = tuple(name for name, kind in names if kind == AxisType.Explicit)
    with jax.sharding.use_abstract_mesh(mesh):
        run: Any = jax.sharding.auto_axes(function, axes=axes, out_sharding=out_spec)
        return run(*arrays)
