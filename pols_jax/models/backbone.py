"""What all backbones share: their options, their input check, and the layer "linear, batch norm, ReLU"."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from pols_jax.models.batch_norm import AxisName, BatchNorm
from pols_jax.models.convolution import Choice, Conv

Images = Float[Array, "batch height width channels"]
Features = Float[Array, "batch features"]
Where = Bool[Array, " batch"] | None
"""True for real examples; None if all are real."""

# Every linear layer is followed by a ReLU, which halves the variance: start with twice the usual one.
kernel_init = nn.initializers.he_normal()

# Of pixels in [0, 1], as torchvision and timm have them.
_IMAGENET_MEAN, _IMAGENET_STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


class Backbone(nn.Module):
    """Base of the networks that map images ``[m, h, w, c]`` to features ``[m, d]``.

    Attributes:
      width: A factor on the width of every layer; 1.0 is the published network.
      dtype: The dtype to compute in, such as ``jnp.bfloat16``; parameters and batch statistics stay float32. None
        computes in float32.
      axis_name: The device axes that the batch is split over, for batch norm. Networks without batch norm ignore it.
      convolution: How a CPU computes convolutions, see `Conv`: "auto", "xla" or "products". Parameters and, to rounding,
        values are the same.
      pixels: What the first layer is given: "symmetric" for pixels in [-1, 1] as they are, "imagenet" for what published
        networks expect, the pixels in [0, 1] minus ImageNet's mean, over its standard deviation.

    Examples:
      >>> gray = jnp.zeros((1, 8, 8, 3))  # halfway between black and white
      >>> [f"{pixel:.3f}" for pixel in Backbone(pixels="imagenet").prepared(gray)[0, 0, 0]]
      ['0.066', '0.196', '0.418']
    """

    width: float = 1.0
    dtype: Any = None
    axis_name: AxisName | None = None
    convolution: Choice = "auto"
    pixels: str = "symmetric"

    @property
    def smallest_image(self) -> int:
        """The smallest height and width of images that the network can be trained on."""
        return 1

    @property
    def conv_norm(self) -> Callable[..., "ConvNorm"]:
        """Makes layers with this network's options; the arguments are the other attributes of `ConvNorm`."""
        return functools.partial(
            ConvNorm, axis_name=self.axis_name, dtype=self.dtype, convolution=self.convolution
        )

    def prepared(self, images: Images, *, smallest: int | None = None) -> Images:
        """Checks images in [-1, 1], and gives the pixels that the first layer takes.

        They are not folded into that layer: it pads with zeros, and those mean ImageNet's mean to a published network.

        Args:
          images: Images, shape ``[m, h, w, c]``.
          smallest: The least height and width; by default `smallest_image`.

        Raises:
          TypeError: if the images are not floating-point numbers.
          ValueError: if the shape is wrong, or ImageNet's pixels are asked for and the images are not in color.
        """
        smallest = self.smallest_image if smallest is None else smallest
        if images.ndim != 4:
            raise ValueError(f"images must have shape [m, h, w, c], got shape {images.shape}.")
        if not jnp.issubdtype(images.dtype, jnp.floating):
            raise TypeError(f"images must be floating-point numbers, got {images.dtype}: scale them first.")
        if min(images.shape[1:3]) < smallest:
            raise ValueError(
                f"images must be at least {smallest} pixels high and wide for this network, got shape {images.shape}."
            )
        if self.pixels == "symmetric":
            return images
        if images.shape[-1] != 3:
            raise ValueError(
                f"images must have three channels for ImageNet's pixels, got shape {images.shape}."
            )
        factor = np.reshape(0.5 / _IMAGENET_STD, (1, 1, 1, 3))
        offset = np.reshape((0.5 - _IMAGENET_MEAN) / _IMAGENET_STD, (1, 1, 1, 3))
        return images * factor.astype(images.dtype) + offset.astype(images.dtype)


def scaled(units: int, width: float) -> int:
    """Returns the number of units (or feature maps) of a layer under the factor ``width``, at least 1.

    Examples:
      >>> scaled(500, 0.25)
      125
    """
    return max(1, round(units * width))


class AsFeatures(Backbone):
    """Takes features for images and gives them back: the backbone of a network whose output layer is trained alone.

    Examples:
      >>> AsFeatures().apply({}, jnp.ones((2, 5))).shape
      (2, 5)
    """

    def __call__(self, images: Features, *, train: bool = False, where: Where = None) -> Features:
        """Maps features ``[m, d]`` to themselves."""
        return images


class DenseNorm(nn.Module):
    """A dense layer without bias (batch norm has one), batch norm and ReLU.

    Attributes:
      features: The number of units.
      axis_name: See `BatchNorm`.
      dtype: The dtype to compute in; None for float32.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> y, variables = DenseNorm(features=4).init_with_output(jax.random.key(0), jnp.ones((2, 3)))
      >>> y.shape, sorted(variables["params"])
      ((2, 4), ['dense', 'norm'])
    """

    features: int
    axis_name: AxisName | None = None
    dtype: Any = None

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch inputs"], *, train: bool = False, where: Where = None
    ) -> Features:
        """Maps ``[m, inputs]`` to ``[m, features]``."""
        dense = nn.Dense(
            self.features, use_bias=False, kernel_init=kernel_init, dtype=self.dtype, name="dense"
        )
        norm = BatchNorm(axis_name=self.axis_name, dtype=self.dtype, name="norm")
        return nn.relu(norm(dense(x), train=train, where=where))


class ConvNorm(nn.Module):
    """A convolution without bias (batch norm has one), batch norm and, unless ``relu`` is off, ReLU.

    Attributes:
      features: The number of feature maps.
      kernel_size: The height and width of the kernel.
      stride: The step in both directions.
      padding: "SAME", "VALID", or the number of zeros on every side.
      relu: Whether ReLU follows.
      epsilon: See `BatchNorm`.
      axis_name: See `BatchNorm`.
      dtype: The dtype to compute in; None for float32.
      convolution: How a CPU computes it, see `Conv`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> layer = ConvNorm(features=4, kernel_size=(3, 3), stride=2)
      >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.ones((2, 8, 8, 3)))
      >>> y.shape, sorted(variables["params"])
      ((2, 4, 4, 4), ['conv', 'norm'])
    """

    features: int
    kernel_size: tuple[int, int]
    stride: int = 1
    padding: Literal["SAME", "VALID"] | int = "SAME"
    relu: bool = True
    epsilon: float = 1e-5
    axis_name: AxisName | None = None
    dtype: Any = None
    convolution: Choice = "auto"

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch height width inputs"], *, train: bool = False, where: Where = None
    ) -> Float[Array, "batch new_height new_width features"]:
        """Maps ``[m, h, w, inputs]`` to ``[m, h', w', features]``."""
        x = Conv(
            self.features,
            self.kernel_size,
            self.stride,
            self.padding,
            use_bias=False,
            kernel_init=kernel_init,
            dtype=self.dtype,
            form=self.convolution,
            name="conv",
        )(x)
        norm = BatchNorm(axis_name=self.axis_name, epsilon=self.epsilon, dtype=self.dtype, name="norm")
        x = norm(x, train=train, where=where)
        return nn.relu(x) if self.relu else x
