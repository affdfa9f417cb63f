"""Convolutions that are fast on a CPU too: `Conv`, with the parameters of ``flax.linen.Conv``.

Accelerators get XLA's convolution. On a CPU XLA's convolution is slow for many shapes, and very slow inside a compiled loop,
while matrix products are fast everywhere: there a convolution is computed in the form that `choose_form` names, by a table whose
forms ``results/tools/convolution_forms.py`` measures. Which of the two programs is used is decided when a traced function is lowered
for its platform, so one traced (or exported) function serves all platforms.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from jax import lax
from jaxtyping import Array

from pols_jax.models.products import (
    Images,
    Kernel,
    Maps,
    convolve_by_products,
    fold_columns,
    fold_stride,
    new_sizes,
)

Form = Literal["xla", "im2col", "winograd"]
"""How a CPU computes a convolution: as XLA does, as one product of patches, or as small products of transformed tiles."""

Choice = Literal["auto", "xla", "products"]
"""What a network asks for: the table, XLA's convolution everywhere, or products only (for compiled loops)."""

# A picture's channels are too few to be moved in such small groups: neighboring pixels become channels.
_FEW_INPUTS, _GROUP = 4, 4


class Conv(nn.Module):
    """A convolution with the parameters, values and gradients of ``flax.linen.Conv``.

    Attributes:
      features: The number of feature maps.
      kernel_size: The height and width of the kernel.
      stride: The step in both directions.
      padding: "SAME", "VALID", or the number of zeros on every side.
      use_bias: Whether a bias is added.
      kernel_init: The initializer of the kernel.
      dtype: The dtype to compute in; None for that of the input and the parameters.
      form: How a CPU computes it: "auto" by the table of `choose_form`, "xla" or "products".

    Examples:
      >>> images = jnp.ones((2, 8, 8, 3))
      >>> y, variables = Conv(4, (3, 3), stride=2).init_with_output(jax.random.key(0), images)
      >>> y.shape, jax.tree.map(jnp.shape, variables["params"])
      ((2, 4, 4, 4), {'bias': (4,), 'kernel': (3, 3, 3, 4)})
    """

    features: int
    kernel_size: tuple[int, int]
    stride: int = 1
    padding: Literal["SAME", "VALID"] | int = "SAME"
    use_bias: bool = True
    kernel_init: Callable[..., Array] = dataclasses.field(default_factory=nn.initializers.lecun_normal)
    dtype: Any = None
    form: Choice = "auto"

    @nn.compact
    def __call__(self, x: Images) -> Maps:
        """Maps ``[m, h, w, inputs]`` to ``[m, h', w', features]``."""
        shape = (*self.kernel_size, x.shape[-1], self.features)
        # Flax traces the initializer again whenever a parameter is read, to know its shape.
        init = nn.initializers.zeros if self.has_variable("params", "kernel") else self.kernel_init
        kernel = self.param("kernel", init, shape, jnp.float32)
        bias = (
            self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
            if self.use_bias
            else None
        )
        x, kernel, bias = promote_dtype(x, kernel, bias, dtype=self.dtype)
        # What a network computes while it is initialized is thrown away: the shortest program will do.
        form = "xla" if self.is_initializing() else self.form
        y = convolve(x, kernel, stride=self.stride, padding=self.padding, form=form)
        return y if bias is None else y + bias.reshape(1, 1, 1, -1)


@functools.partial(jax.jit, static_argnames=("stride", "padding", "form"))
def convolve(
    x: Images,
    kernel: Kernel,
    *,
    stride: int = 1,
    padding: Literal["SAME", "VALID"] | int = "SAME",
    form: Choice | Form = "auto",
) -> Maps:
    """Convolves images with a kernel.

    Differentiable in reverse mode; the gradients are convolutions in the same forms.

    Args:
      x: Images, shape ``[m, h, w, inputs]``.
      kernel: Shape ``[height, width, inputs, features]``.
      stride: The step in both directions.
      padding: "SAME", "VALID", or the number of zeros on every side.
      form: How a CPU computes it; see `Conv`, or one of the three forms.

    Returns:
      Feature maps, shape ``[m, h', w', features]``.

    Examples:
      >>> x = jnp.arange(9.0).reshape(1, 3, 3, 1)
      >>> convolve(x, jnp.ones((3, 3, 1, 1)), padding="VALID", form="winograd").item()
      36.0
    """
    if isinstance(padding, int):
        pads = ((padding, padding), (padding, padding))
    else:
        both = (stride, stride)
        pads = tuple(lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], both, padding))
    # In a program that is exported for any batch, the number of images, which the choice depends on, is not known.
    if form == "xla" or not isinstance(x.shape[0], int):
        return _xla(x, kernel, stride=stride, pads=pads)
    return _differentiable(x, kernel, stride, pads, form)


def choose_form(
    kernel_shape: tuple[int, ...],
    new_shape: tuple[int, ...],
    *,
    stride: int,
    dtype: Any = jnp.float32,
    products: bool = False,
) -> Form:
    """Returns the form in which a CPU computes a convolution: the first line of the table that fits.

    Args:
      kernel_shape: Height, width, inputs and features.
      new_shape: The shape of the result: images, height, width.
      stride: The step in both directions.
      dtype: What is computed in; 16 bits are too few for transformed tiles.
      products: Whether XLA's convolution is ruled out, as in training.

    Examples:
      >>> choose_form((1, 1, 256, 64), (1, 56, 56), stride=1)
      'im2col'
      >>> choose_form((3, 3, 128, 128), (32, 28, 28), stride=1)
      'winograd'
      >>> choose_form((7, 7, 3, 64), (32, 112, 112), stride=2), choose_form((7, 7, 3, 64), (32, 112, 112), stride=2, products=True)
      ('xla', 'im2col')
    """
    height, width, inputs, _ = kernel_shape
    is_full = jnp.dtype(dtype).itemsize >= 4
    places = math.prod(new_shape[:3])
    fewest = 512 if 1 in (height, width) else 256  # places that the transformed kernel has to be worth
    tiles_fit = max(height, width) in (3, 5, 7) and stride == 1 and inputs >= 16 and is_full
    table: tuple[tuple[bool, Form], ...] = (
        (height == width == 1, "im2col"),
        (tiles_fit and places >= fewest, "winograd"),
        (products, "im2col"),
        (stride > 1 and max(height, width) > 5, "xla"),
        (True, "im2col"),
    )
    return next(form for fits, form in table if fits)


# Forward and backward choose the platform each for themselves: a choice that JAX differentiates would keep what either program
# needs for its gradient.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _differentiable(x, kernel, stride, pads, form):
    return _by_platform(x, kernel, stride, pads, form, train=False)


def _by_platform(x, kernel, stride, pads, form, *, train):
    of_xla = functools.partial(_xla, stride=stride, pads=pads)
    of_form = functools.partial(_on_cpu, stride=stride, pads=pads, form=form, train=train)
    return lax.platform_dependent(x, kernel, cpu=of_form, default=of_xla)


def _forward(x, kernel, stride, pads, form):
    return _by_platform(x, kernel, stride, pads, form, train=True), (x, kernel)


def _backward(stride, pads, form, residuals, dy):
    def gradients_of(convolution):
        return lambda x, kernel, dy: jax.vjp(convolution, x, kernel)[1](dy)

    of_xla = functools.partial(_xla, stride=stride, pads=pads)
    of_form = functools.partial(_on_cpu, stride=stride, pads=pads, form=form, train=True)
    return lax.platform_dependent(*residuals, dy, cpu=gradients_of(of_form), default=gradients_of(of_xla))


_differentiable.defvjp(_forward, _backward)


def _xla(x, kernel, *, stride, pads):
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), pads, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _on_cpu(x, kernel, *, stride, pads, form, train):
    if form in ("auto", "products"):
        new_shape = (len(x), *new_sizes(x, kernel, stride, pads))
        products = train or form == "products"
        form = choose_form(kernel.shape, new_shape, stride=stride, dtype=x.dtype, products=products)
    if form == "xla":
        return _xla(x, kernel, stride=stride, pads=pads)
    if kernel.shape[2] > _FEW_INPUTS or kernel.shape[1] == 1:
        return convolve_by_products(x, kernel, stride, pads, form)
    if stride > 1:
        folded, kernel, pads = fold_stride(x, kernel, stride, pads)
        return convolve_by_products(folded, kernel, 1, pads, form)
    folded, wide_kernel, rest = fold_columns(x, kernel, pads, group=_GROUP)
    y: Any = convolve_by_products(folded, wide_kernel, 1, rest, form)
    height, width = new_sizes(x, kernel, 1, pads)
    return y.reshape(len(x), height, -1, kernel.shape[3])[:, :, :width]
