"""The paper's networks for small images: an MLP for MNIST, a convolutional network for SVHN and CIFAR."""

import flax.linen as nn

from pols_jax.models.backbone import Backbone, DenseNorm, Features, Images, Where, scaled
from pols_jax.models.pooling import max_pool


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
    def __call__(self, images: Images, *, train: bool = False, where: Where = None) -> Features:
        """Maps images ``[m, h, w, c]`` to features ``[m, hidden_sizes[-1]]``."""
        x = self.prepared(images).reshape((images.shape[0], -1))
        for index, size in enumerate(self.hidden_sizes, start=1):
            layer = DenseNorm(scaled(size, self.width), self.axis_name, self.dtype, name=f"layer{index}")
            x = layer(x, train=train, where=where)
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
    def __call__(self, images: Images, *, train: bool = False, where: Where = None) -> Features:
        """Maps images ``[m, h, w, c]`` to features ``[m, 1024 * width]``."""
        x = self.prepared(images)
        for stage, channels in enumerate((128, 256, 512)):
            for place, kernel_size in enumerate(((5, 5), (1, 1)), start=1):
                name = f"conv{2 * stage + place}"
                layer = self.conv_norm(scaled(channels, self.width), kernel_size, name=name)
                x = layer(x, train=train, where=where)
            x = max_pool(x, size=3, stride=2, padding="SAME")
        x = x.reshape((x.shape[0], -1))
        dense = DenseNorm(scaled(1024, self.width), self.axis_name, self.dtype, name="dense")
        return dense(x, train=train, where=where)
