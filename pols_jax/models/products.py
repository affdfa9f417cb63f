"""Convolutions as matrix products: patches (im2col) or transformed tiles (Winograd), a bounded number of bytes at a time.

`convolve_by_products` takes every kernel and stride. Its gradients are convolutions of the same kind, so a training step consists of
products too.
"""

import functools
import itertools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

Form = Literal["im2col", "winograd"]
Pads = tuple[tuple[int, int], tuple[int, int]]
Images = Float[Array, "batch height width inputs"]
Kernel = Float[Array, "kernel_height kernel_width inputs features"]
Maps = Float[Array, "batch new_height new_width features"]

BUDGET_BYTES: dict[Form, int] = {"im2col": 8 * 2**20, "winograd": 32 * 2**20}
"""Patches and transformed tiles are made for so many bytes at a time: a group of images, or some rows of one."""

# Winograd's F(2, 3): two outputs of a kernel of three taps from four products instead of six. For each of the four, which entries of
# the input (offset, factor) and which taps of the kernel are added up; for each output, which of the products.
_INPUTS = (((0, 1.0), (2, -1.0)), ((1, 1.0), (2, 1.0)), ((2, 1.0), (1, -1.0)), ((1, 1.0), (3, -1.0)))
_TAPS = (((0, 1.0),), ((0, 0.5), (1, 0.5), (2, 0.5)), ((0, 0.5), (1, -0.5), (2, 0.5)), ((2, 1.0),))
_OUTPUTS = (((0, 1.0), (1, 1.0), (2, 1.0)), ((1, 1.0), (2, -1.0), (3, -1.0)))


def new_sizes(x: Images, kernel: Kernel, stride: int, pads: Pads) -> tuple[int, int]:
    """Returns the height and width of the result.

    Examples:
      >>> new_sizes(jnp.ones((1, 9, 8, 3)), jnp.ones((3, 3, 3, 4)), 2, ((1, 1), (1, 1)))
      (5, 4)
    """
    sizes = zip(x.shape[1:3], kernel.shape[:2], pads, strict=True)
    height, width = ((n + sum(pad) - k) // stride + 1 for n, k, pad in sizes)
    return height, width


def fold_stride(x: Images, kernel: Kernel, stride: int, pads: Pads) -> tuple[Images, Kernel, Pads]:
    """Turns a convolution with a stride into one without: squares of ``stride`` x ``stride`` pixels become channels.

    Returns:
      Images ``[m, h / stride, w / stride, stride * stride * inputs]``, a kernel for them, and its padding (none).

    Examples:
      >>> x, kernel, _ = fold_stride(jnp.ones((1, 8, 8, 3)), jnp.ones((3, 3, 3, 4)), 2, ((1, 1), (1, 1)))
      >>> x.shape, kernel.shape
      ((1, 5, 5, 12), (2, 2, 12, 4))
    """
    sizes = new_sizes(x, kernel, stride, pads)
    taps = [-(-k // stride) for k in kernel.shape[:2]]
    squares = [new + k - 1 for new, k in zip(sizes, taps, strict=True)]
    ends = [n * stride - size - pad[0] for n, size, pad in zip(squares, x.shape[1:3], pads, strict=True)]
    x = _pad(x, ((pads[0][0], ends[0]), (pads[1][0], ends[1])))
    height, width, inputs, features = kernel.shape
    kernel = jnp.pad(kernel, ((0, taps[0] * stride - height), (0, taps[1] * stride - width), (0, 0), (0, 0)))

    def fold(array, sizes, rest):
        array = array.reshape(-1, sizes[0], stride, sizes[1], stride, *rest)
        return array.swapaxes(2, 3)

    x = fold(x, squares, (inputs,)).reshape(len(x), *squares, -1)
    kernel = fold(kernel, taps, (inputs, features)).reshape(*taps, -1, features)
    return x, kernel, ((0, 0), (0, 0))


def fold_columns(x: Images, kernel: Kernel, pads: Pads, group: int) -> tuple[Images, Kernel, Pads]:
    """Turns a convolution into one of ``group`` neighboring outputs at a time: as many pixels of a row become channels.

    Patches then consist of longer pieces, and products have more columns; the price is multiplications with zeros.

    Returns:
      Images ``[m, h, w / group, group * inputs]``, a kernel for them, and its padding. The result, with ``group * features``
      channels, has to be reshaped, and cut to its width.

    Examples:
      >>> x, kernel, _ = fold_columns(jnp.ones((1, 8, 8, 3)), jnp.ones((3, 3, 3, 4)), ((1, 1), (1, 1)), group=4)
      >>> x.shape, kernel.shape
      ((1, 8, 3, 12), (3, 2, 12, 16))
    """
    _, width = new_sizes(x, kernel, 1, pads)
    height, taps, inputs, features = kernel.shape
    columns = -(-width // group)
    squares = -(-(group + taps - 1) // group)
    missing = (columns + squares - 1) * group - x.shape[2] - pads[1][0]
    x = _pad(x, ((0, 0), (pads[1][0], missing)))
    x = x.reshape(*x.shape[:2], -1, group * inputs)
    shifted = [
        jnp.pad(kernel, ((0, 0), (place, squares * group - taps - place), (0, 0), (0, 0)))
        for place in range(group)
    ]
    kernel = jnp.concatenate(shifted, axis=3).reshape(height, squares, group * inputs, group * features)
    return x, kernel, (pads[0], (0, 0))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def convolve_by_products(x: Images, kernel: Kernel, stride: int, pads: Pads, form: Form) -> Maps:
    """Convolves images with a kernel by matrix products.

    Args:
      x: Images, shape ``[m, h, w, inputs]``.
      kernel: Shape ``[height, width, inputs, features]``.
      stride: The step in both directions.
      pads: How many zeros are put above and below, left and right.
      form: "im2col", or "winograd" for stride 1.

    Returns:
      Feature maps, shape ``[m, h', w', features]``.

    Examples:
      >>> x, no_pads = jnp.arange(9.0).reshape(1, 3, 3, 1), ((0, 0), (0, 0))
      >>> [convolve_by_products(x, jnp.ones((3, 3, 1, 1)), 1, no_pads, form).item() for form in ("im2col", "winograd")]
      [36.0, 36.0]
    """
    height, width = new_sizes(x, kernel, stride, pads)
    blocks, x = _blocks(x, kernel, stride, pads, form)
    product = functools.partial(_PRODUCTS[form], kernel=kernel, stride=stride)
    if blocks.number == 1:
        return product(_pad(x, blocks.pads))

    def put(index, y):
        return lax.dynamic_update_index_in_dim(y, product(blocks.inputs(x, index)), index, axis=0)

    # All of it is overwritten. It begins as something that depends on the images, because XLA allocates arrays of zeros, of all layers,
    # when the program starts.
    shape = (blocks.number, blocks.images, blocks.rows, width, kernel.shape[3])
    y = lax.fori_loop(0, blocks.number, put, jnp.broadcast_to(x[0, 0, 0, 0], shape))
    return y.reshape(len(x), -1, width, kernel.shape[3])[:, :height]


def _forward(x, kernel, stride, pads, form):
    return convolve_by_products(x, kernel, stride, pads, form), (x, kernel)


def _backward(stride, pads, form, residuals, dy):
    x, kernel = residuals
    dx = _input_gradient(x, kernel, stride, pads, form, dy)
    return dx, _kernel_gradient(x, kernel, stride, pads, form, dy)


convolve_by_products.defvjp(_forward, _backward)


def _input_gradient(x, kernel, stride, pads, form, dy):
    """With stride 1 this is the convolution of ``dy`` with the turned kernel."""
    if stride > 1:
        plain = _PRODUCTS[form]
        return jax.vjp(lambda x: plain(_pad(x, pads), kernel=kernel, stride=stride), x)[1](dy)[0]
    turned = kernel[::-1, ::-1].swapaxes(2, 3)
    sizes = zip(kernel.shape[:2], pads, x.shape[1:3], dy.shape[1:3], strict=True)
    back = tuple((k - 1 - before, n - new + before) for k, (before, _), n, new in sizes)
    return convolve_by_products(dy, turned, 1, back, form)


def _kernel_gradient(x, kernel, stride, pads, form, dy):
    """The sum over the blocks: products of transposed patches, or tiles, with ``dy``."""
    blocks, x = _blocks(x, kernel, stride, pads, form)

    def of_block(x, dy):
        product = functools.partial(_PRODUCTS[form], x, stride=stride)
        return jax.vjp(lambda kernel: product(kernel=kernel), kernel)[1](dy)[0]

    if blocks.number == 1:
        return of_block(_pad(x, blocks.pads), dy)
    dy = jnp.pad(dy, ((0, 0), (0, blocks.strips * blocks.rows - dy.shape[1]), (0, 0), (0, 0)))

    def add(total, index):
        return total + of_block(blocks.inputs(x, index), blocks.outputs(dy, index)), None

    return lax.scan(add, jnp.zeros_like(kernel), jnp.arange(blocks.number))[0]


class _Blocks(NamedTuple):
    """Parts of a batch: groups of images, or strips of rows of single images."""

    images: int
    rows: int
    strips: int
    number: int
    stride: int
    kernel_height: int
    pads: Pads

    def inputs(self, x, index):
        """The padded pixels that a block's outputs depend on."""
        height = (self.rows - 1) * self.stride + self.kernel_height
        return _pad(self._take(x, index, self.rows * self.stride, height), self.pads)

    def outputs(self, maps, index):
        return self._take(maps, index, self.rows, self.rows)

    def _take(self, array, index, step, height):
        image, strip = index // self.strips * self.images, index % self.strips * step
        sizes = (self.images, height if self.strips > 1 else array.shape[1], *array.shape[2:])
        return lax.dynamic_slice(array, (image, strip, 0, 0), sizes)


def _blocks(x, kernel, stride, pads, form) -> tuple[_Blocks, Images]:
    """Splits a convolution into parts that fit the budget; returns them and the images, padded if there are strips."""
    height, width = new_sizes(x, kernel, stride, pads)
    size, inputs, features = math.prod(kernel.shape[:2]), *kernel.shape[2:]
    numbers = size * inputs
    if form == "winograd":
        tall, wide = (_axis(size) for size in kernel.shape[:2])
        tile = len(tall.outputs) * len(wide.outputs)
        copies = sum(map(len, tall.parts)) * sum(map(len, wide.parts))
        numbers = (copies * inputs + len(tall.parts) * len(wide.parts) * features) / tile
    row_bytes = max(1, math.ceil(numbers * width * x.dtype.itemsize))
    rows, strips, images = height, 1, len(x)
    budget = BUDGET_BYTES[form]
    if size == 1 or row_bytes * height * images <= budget:
        pass
    elif row_bytes * height <= budget:
        most = budget // (row_bytes * height)
        images = max(n for n in range(1, most + 1) if len(x) % n == 0)
    else:
        images = 1
        strips = min(-(-height // 2), -(-row_bytes * height // budget))
        rows = -(-height // strips)
        rows += rows % 2  # Winograd's tiles have two
        strips = -(-height // rows)
    count = len(x) // images * strips
    if strips > 1:
        # The columns are padded in every strip: XLA then makes a copy of the strip, instead of cutting it out again for every tile.
        missing = (strips * rows - height) * stride
        x, pads = _pad(x, ((pads[0][0], pads[0][1] + missing), (0, 0))), ((0, 0), pads[1])
    return _Blocks(images, rows, strips, count, stride, kernel.shape[0], pads), x


def _pad(x, pads):
    # A negative number of zeros takes pixels away.
    zero = jnp.zeros((), x.dtype)
    return (
        lax.pad(x, zero, ((0, 0, 0), *((*pad, 0) for pad in pads), (0, 0, 0))) if any(map(any, pads)) else x
    )


def _im2col(x, *, kernel, stride):
    """One product: every row has the pixels under the kernel at one place."""
    height, width = new_sizes(x, kernel, stride, ((0, 0), (0, 0)))
    slices = [
        x[:, top : top + (height - 1) * stride + 1 : stride, left : left + (width - 1) * stride + 1 : stride]
        for top, left in itertools.product(*map(range, kernel.shape[:2]))
    ]
    patches = slices[0] if len(slices) == 1 else jnp.concatenate(slices, axis=-1)
    y = patches.reshape(-1, patches.shape[-1]) @ kernel.reshape(-1, kernel.shape[3])
    return y.reshape(len(x), height, width, kernel.shape[3])


def _winograd(x, *, kernel, stride):
    """Winograd's F(2x2, 3x3): four outputs of a 3x3 kernel from 16 products instead of 36.

    A larger kernel is a sum of 3x3 ones, whose products are added up by one matrix product over all of them.
    """
    assert stride == 1
    features = kernel.shape[3]
    sizes = new_sizes(x, kernel, 1, ((0, 0), (0, 0)))
    axes = [_axis(size) for size in kernel.shape[:2]]
    tiles = [-(-size // len(axis.outputs)) for size, axis in zip(sizes, axes, strict=True)]
    reach = [axis.reach + len(axis.outputs) * (n - 1) + 1 for n, axis in zip(tiles, axes, strict=True)]
    x = _pad(x, tuple((0, max(0, far - have)) for far, have in zip(reach, x.shape[1:3], strict=True)))  # type: ignore

    def pixels(offsets):
        places = [
            slice(offset, offset + len(axis.outputs) * (n - 1) + 1, len(axis.outputs))
            for offset, n, axis in zip(offsets, tiles, axes, strict=True)
        ]
        return x[:, places[0], places[1]]

    # One product transforms the kernel; written as sums, its gradient would be one long sum for every entry.
    positions = list(itertools.product(*(range(len(axis.parts)) for axis in axes)))
    parts = [
        list(itertools.product(*(axis.parts[p] for p, axis in zip(at, axes, strict=True))))
        for at in positions
    ]
    matrix = np.zeros((sum(map(len, parts)), *kernel.shape[:2]))
    for row, part in enumerate(itertools.chain(*parts)):
        for (top, first), (left, second) in itertools.product(part[0].taps, part[1].taps):
            matrix[row, top, left] = first * second
    matrix = jnp.asarray(matrix.reshape(len(matrix), -1), kernel.dtype)
    taps = (matrix @ kernel.reshape(matrix.shape[1], -1)).reshape(-1, features)
    ends = np.cumsum([len(some) * kernel.shape[2] for some in parts])
    maps = {}
    for at, some, rows in zip(positions, parts, jnp.split(taps, ends[:-1]), strict=True):
        sums = [_weighted([side.pixels for side in part], pixels) for part in some]
        tiled = sums[0] if len(some) == 1 else jnp.concatenate(sums, axis=-1)
        maps[at] = (tiled.reshape(-1, tiled.shape[-1]) @ rows).reshape(len(x), *tiles, features)
    corners = [
        jnp.stack([_weighted([tall, wide], maps.__getitem__) for wide in axes[1].outputs], axis=3)
        for tall in axes[0].outputs
    ]
    y = jnp.stack(corners, axis=2)
    y = y.reshape(len(x), *(n * len(axis.outputs) for n, axis in zip(tiles, axes, strict=True)), features)
    return y[:, : sizes[0], : sizes[1]]


class _Part(NamedTuple):
    pixels: tuple[tuple[int, float], ...]
    taps: tuple[tuple[int, float], ...]


class _Axis(NamedTuple):
    """One direction of a tile.

    Attributes:
      parts: For each product, the pixels and the taps that are added up, for each three taps of the kernel.
      outputs: For each output, the products that are added up.
      reach: The largest offset of a pixel.
    """

    parts: tuple[tuple[_Part, ...], ...]
    outputs: tuple[tuple[tuple[int, float], ...], ...]
    reach: int


def _axis(size: int) -> _Axis:
    if size == 1:
        return _Axis(((_Part(((0, 1.0),), ((0, 1.0),)),),), (((0, 1.0),),), 0)
    parts = []
    for pixels, taps in zip(_INPUTS, _TAPS, strict=True):
        there = [
            (first, [(first + tap, factor) for tap, factor in taps if first + tap < size])
            for first in range(0, size, 3)
        ]
        parts.append(
            tuple(
                _Part(tuple((first + offset, factor) for offset, factor in pixels), tuple(kept))
                for first, kept in there
                if kept
            )
        )
    reach = max(offset for products in parts for part in products for offset, _ in part.pixels)
    kept = [place for place, some in enumerate(parts) if some]  # with two taps the last product is none
    outputs = tuple(
        tuple((kept.index(place), sign) for place, sign in output if place in kept) for output in _OUTPUTS
    )
    return _Axis(tuple(parts[place] for place in kept), outputs, reach)


def _weighted(terms, value):
    """Sums ``value`` of every pair of places, times the product of their signs."""
    total: Any = None
    for (top, first), (left, second) in itertools.product(*terms):
        term = value((top, left))
        if total is None:
            total = term if first * second > 0 else -term
        else:
            total = total + term if first * second > 0 else total - term
    return total


_PRODUCTS = {"im2col": _im2col, "winograd": _winograd}
