"""The paper's networks for small images: an MLP for MNIST, a convolutional network for SVHN and CIFAR."""

import functools

import flax.linen as nn
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from pols_jax.models.backbone import Backbone, ConvNorm, DenseNorm, check_images, scaled


class MLP(Backbone):
    """Dense layers, each followed by batch norm and ReLU; the paper's MNIST network has two of 500 units.

    Attributes:
      hidden_sizes: The units of each layer; the last is the number of features.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> images = jnp.ones((2, 28, 28, 1))
      >>> features, variables = MLP().init_with_output(jax.random.key(0), images)
      >>> features.shape
      (2, 500)
    """

    hidden_sizes: tuple[int, ...] = (500, 500)

    @nn.compact
    def __call__(
        self,
        images: Float[Array, "batch height width channels"],
        *,
        train: bool = False,
        mask: Bool[Array, " batch"] | None = None,
    ) -> Float[Array, "batch features"]:
        """Maps images ``[m, h, w, c]`` to features ``[m, hidden_sizes[-1]]``."""
        check_images(images)
        x = images.reshape((images.shape[0], -1))
        for index, size in enumerate(self.hidden_sizes, start=1):
            layer = DenseNorm(scaled(size, self.width), self.axis_name, self.dtype, name=f"layer{index}")
            x = layer(x, train=train, mask=mask)
        return x


class CNN(Backbone):
    """The paper's network for SVHN and CIFAR: six convolutions in three stages, then a dense layer of 1024 units.

    A stage is a 5x5 and a 1x1 convolution with 128, 256 or 512 feature maps, then 3x3 max-pooling with stride 2.
    Batch norm and ReLU follow every convolution and the dense layer. The paper does not say how it pads; here
    convolutions and pooling pad so that a stage halves the image, rounding up.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> images = jnp.ones((2, 32, 32, 3))
      >>> quarter = CNN(width=0.25)
      >>> features, variables = jax.eval_shape(quarter.init_with_output, jax.random.key(0), images)
      >>> features.shape
      (2, 256)
    """

    @nn.compact
    def __call__(
        self,
        images: Float[Array, "batch height width channels"],
        *,
        train: bool = False,
        mask: Bool[Array, " batch"] | None = None,
    ) -> Float[Array, "batch features"]:
        """Maps images ``[m, h, w, c]`` to features ``[m, 1024 * width]``."""
        check_images(images)
        shared = {"axis_name": self.axis_name, "dtype": self.dtype}
        x = images
        for stage, channels in enumerate((128, 256, 512)):
            for place, kernel_size in enumerate(((5, 5), (1, 1)), start=1):
                name = f"conv{2 * stage + place}"
                layer = ConvNorm(scaled(channels, self.width), kernel_size, name=name, **shared)
                x = layer(x, train=train, mask=mask)
            x = halve(x)
        x = x.reshape((x.shape[0], -1))
        return DenseNorm(scaled(1024, self.width), name="dense", **shared)(x, train=train, mask=mask)


def halve(
    x: Float[Array, "batch height width channels"],
) -> Float[Array, "batch half_height half_width channels"]:
    """Max-pools 3x3 windows with stride 2 and "SAME" padding, as the maximum of nine slices.

    The values are those of ``nn.max_pool``. Its derivative is compiled to a loop on a CPU that is eight times slower
    than that of the slices. Where several entries of a window are the largest, they share the gradient.

    Examples:
      >>> import jax.numpy as jnp
      >>> halve(jnp.arange(16.0).reshape(1, 4, 4, 1))[0, :, :, 0].tolist()
      [[10.0, 11.0], [14.0, 15.0]]
    """
    sizes = x.shape[1:3]
    padding = lax.padtype_to_pads(sizes, (3, 3), (2, 2), "SAME")
    padded = jnp.pad(x, ((0, 0), *padding, (0, 0)), constant_values=-jnp.inf)
    ends = [2 * (-(-size // 2) - 1) + 1 for size in sizes]
    slices = [
        padded[:, top : top + ends[0] : 2, left : left + ends[1] : 2] for top in range(3) for left in range(3)
    ]
    return functools.reduce(jnp.maximum, slices)
