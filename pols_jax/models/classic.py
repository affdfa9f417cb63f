"""AlexNet and VGG-16: convolutions with biases and two wide dense layers with dropout, no batch norm."""

import flax.linen as nn

from pols_jax.models.backbone import Backbone, Features, Images, Where, kernel_init, scaled
from pols_jax.models.convolution import Conv
from pols_jax.models.pooling import max_pool


class AlexNet(Backbone):
    """AlexNet in the one-tower form of Krizhevsky's "One weird trick" (2014): five convolutions, two dense layers.

    The first dense layer takes the convolutions' output as it is, so it fits only the image size that the network
    was initialized with; 224x224 is the published one, 63x63 the smallest. In training mode dropout draws from the
    random stream "dropout".

    Attributes:
      dropout_rate: The share of a dense layer's inputs that a training step sets to zero.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> images = jnp.ones((2, 224, 224, 3))
      >>> features, variables = jax.eval_shape(AlexNet().init_with_output, jax.random.key(0), images)
      >>> features.shape
      (2, 4096)
    """

    dropout_rate: float = 0.5

    @property
    def smallest_image(self) -> int:
        """The smallest height and width of images that the network can be trained on."""
        return 63

    @nn.compact
    def __call__(self, images: Images, *, train: bool = False, where: Where = None) -> Features:
        """Maps images ``[m, h, w, c]`` to features ``[m, 4096 * width]``; no layer mixes examples or needs ``where``."""
        x = self.prepared(images)
        layers = ((64, 11, 4, 2), (192, 5, 1, 2), (384, 3, 1, 1), (256, 3, 1, 1), (256, 3, 1, 1))
        for index, (channels, size, stride, padding) in enumerate(layers, start=1):
            x = nn.relu(_conv(self, f"conv{index}", channels, size, stride, padding)(x))
            if index in (1, 2, 5):
                x = max_pool(x, size=3, stride=2)
        x = x.reshape((x.shape[0], -1))
        for index in (1, 2):
            x = nn.Dropout(self.dropout_rate, deterministic=not train)(x)
            x = nn.relu(_dense(self, index)(x))
        return x


class VGG(Backbone):
    """VGG (Simonyan and Zisserman, 2015): stages of 3x3 convolutions and 2x2 max-pooling, then two dense layers.

    The first dense layer takes the convolutions' output as it is, so it fits only the image size that the network
    was initialized with; 224x224 is the published one, 32x32 the smallest of VGG-16. In training mode dropout draws
    from the random stream "dropout".

    Attributes:
      stage_sizes: The number of convolutions in each stage; the default is VGG-16.
      dropout_rate: The share of a dense layer's outputs that a training step sets to zero.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> images = jnp.ones((2, 224, 224, 3))
      >>> features, variables = jax.eval_shape(VGG().init_with_output, jax.random.key(0), images)
      >>> features.shape
      (2, 4096)
    """

    stage_sizes: tuple[int, ...] = (2, 2, 3, 3, 3)
    dropout_rate: float = 0.5

    @property
    def smallest_image(self) -> int:
        """The smallest height and width of images that the network can be trained on."""
        return 2 ** len(self.stage_sizes)

    @nn.compact
    def __call__(self, images: Images, *, train: bool = False, where: Where = None) -> Features:
        """Maps images ``[m, h, w, c]`` to features ``[m, 4096 * width]``; no layer mixes examples or needs ``where``."""
        x = self.prepared(images)
        for stage, size in enumerate(self.stage_sizes, start=1):
            channels = min(64 * 2 ** (stage - 1), 512)
            for index in range(1, size + 1):
                x = nn.relu(_conv(self, f"conv{stage}_{index}", channels, size=3, stride=1, padding=1)(x))
            x = max_pool(x, size=2, stride=2)
        x = x.reshape((x.shape[0], -1))
        for index in (1, 2):
            x = nn.relu(_dense(self, index)(x))
            x = nn.Dropout(self.dropout_rate, deterministic=not train)(x)
        return x


def _conv(backbone, name, channels, size, stride, padding):
    """Returns a convolution of either network; call it inside the backbone."""
    options = {"kernel_init": kernel_init, "dtype": backbone.dtype, "form": backbone.convolution}
    return Conv(scaled(channels, backbone.width), (size, size), stride, padding, name=name, **options)


def _dense(backbone, index):
    """Returns one of the two wide dense layers that end both networks; call it inside the backbone."""
    units = scaled(4096, backbone.width)
    return nn.Dense(units, kernel_init=kernel_init, dtype=backbone.dtype, name=f"dense{index}")
