"""Pooling that is fast on a CPU too: the maximum, or sum, of shifted slices instead of XLA's windows.

XLA compiles windows to plain loops on a CPU, and the derivative of their maximum to one that is eight times slower than that of the
slices. Accelerators get windows. Which program is used is decided when a traced function is lowered for its platform.
"""

import functools
import itertools
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

Images = Float[Array, "batch height width channels"]
Padding = Literal["SAME", "VALID"] | int


@functools.partial(jax.jit, static_argnames=("size", "stride", "padding"))
def max_pool(x: Images, *, size: int, stride: int, padding: Padding = "VALID") -> Images:
    """Takes the largest value of every window.

    Where several entries of a window are the largest, the first of them gets the gradient.

    Args:
      x: Images, shape ``[m, h, w, c]``.
      size: The height and width of a window.
      stride: The step in both directions.
      padding: "SAME", "VALID", or the number of pixels on every side; they are never the largest.

    Returns:
      The largest values, shape ``[m, h', w', c]``.

    Examples:
      >>> max_pool(jnp.arange(16.0).reshape(1, 4, 4, 1), size=3, stride=2, padding="SAME")[0, :, :, 0].tolist()
      [[10.0, 11.0], [14.0, 15.0]]
    """
    return _maximum(x, size, stride, _pads(x, size, stride, padding))


@functools.partial(jax.jit, static_argnames=("size", "stride", "padding"))
def average_pool(x: Images, *, size: int, stride: int, padding: Padding = "VALID") -> Images:
    """Averages every window; the zeros of the padding count, as in torchvision. The arguments are those of `max_pool`.

    Examples:
      >>> average_pool(9.0 * jnp.ones((1, 3, 3, 1)), size=3, stride=2, padding=1).ravel().tolist()
      [4.0, 4.0, 4.0, 4.0]
    """
    pads = _pads(x, size, stride, padding)

    def windows(x):
        return nn.pool(x, 0.0, lax.add, (size, size), (stride, stride), pads)

    def slices(x):
        return functools.reduce(jnp.add, _slices(x, size, stride, pads, 0.0))

    return lax.platform_dependent(x, cpu=slices, default=windows) / size**2


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _maximum(x, size, stride, pads):
    def slices(x):
        return functools.reduce(jnp.maximum, _slices(x, size, stride, pads, -jnp.inf))

    return lax.platform_dependent(x, cpu=slices, default=_windows(size, stride, pads))


def _windows(size, stride, pads):
    # Flax takes pairs here too; its annotation says str only.
    return lambda x: nn.max_pool(x, (size, size), strides=(stride, stride), padding=pads)


def _maximum_forward(x, size, stride, pads):
    y = _maximum(x, size, stride, pads)
    return y, (x, y)


def _maximum_backward(size, stride, pads, residuals, dy):
    def of_slices(x, y, dy):
        """Every window hands its gradient to the first of its largest entries; a pixel adds up what it gets."""
        place = jnp.zeros(y.shape, jnp.int32)
        for index, entries in reversed(list(enumerate(_slices(x, size, stride, pads, -jnp.inf)))):
            place = jnp.where(entries == y, index, place)
        place = lax.optimization_barrier(place)
        parts = [jnp.where(place == index, dy, jnp.zeros_like(dy)) for index in range(size**2)]
        return _add_slices(parts, x.shape, size, stride, pads)

    def of_windows(x, y, dy):
        return jax.vjp(_windows(size, stride, pads), x)[1](dy)[0]

    return (lax.platform_dependent(*residuals, dy, cpu=of_slices, default=of_windows),)


_maximum.defvjp(_maximum_forward, _maximum_backward)


def _add_slices(parts, shape, size, stride, pads):
    """The transpose of `_slices`: pixels whose places have the same remainder are added up together, and interleaved."""
    before, channels = (pads[0][0], pads[1][0]), shape[3]
    squares = [-(-(n + sum(pad)) // stride) for n, pad in zip(shape[1:3], pads, strict=True)]

    def plane(remainders):
        total = jnp.zeros((shape[0], *squares, channels), parts[0].dtype)
        for place, part in zip(itertools.product(range(size), repeat=2), parts, strict=True):
            steps = [(offset - first) / stride for offset, first in zip(place, remainders, strict=True)]
            if all(step >= 0 and step == int(step) for step in steps):
                sizes = zip(steps, squares, part.shape[1:3], strict=True)
                around = [(int(step), n - int(step) - new, 0) for step, n, new in sizes]
                total += lax.pad(part, jnp.zeros((), part.dtype), ((0, 0, 0), *around, (0, 0, 0)))
        return total

    rows = [jnp.stack([plane((a, b)) for b in range(stride)], axis=3) for a in range(stride)]
    whole = jnp.stack(rows, axis=2).reshape(shape[0], *(n * stride for n in squares), channels)
    return whole[:, before[0] : before[0] + shape[1], before[1] : before[1] + shape[2]]


def _pads(x, size, stride, padding):
    if isinstance(padding, int):
        return ((padding, padding), (padding, padding))
    return tuple(lax.padtype_to_pads(x.shape[1:3], (size, size), (stride, stride), padding))


def _slices(x, size, stride, pads, fill):
    new = [(n + sum(pad) - size) // stride + 1 for n, pad in zip(x.shape[1:3], pads, strict=True)]
    if any(map(any, pads)):
        x = jnp.pad(x, ((0, 0), *pads, (0, 0)), constant_values=fill)
    ends = [stride * (n - 1) + 1 for n in new]
    return [
        x[:, top : top + ends[0] : stride, left : left + ends[1] : stride]
        for top, left in itertools.product(range(size), repeat=2)
    ]
