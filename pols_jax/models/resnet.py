"""ResNet-50 and ResNet-101, with the stride on the 3x3 convolution (the variant called v1.5)."""

from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp

from pols_jax.models.backbone import Backbone, ConvNorm, Features, Images, Where, scaled
from pols_jax.models.pooling import max_pool


class ResNet(Backbone):
    """A residual network of bottleneck blocks (He et al., 2016); all image sizes fit the same parameters.

    Attributes:
      stage_sizes: The number of blocks in each stage; the default is ResNet-50.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> images = jnp.ones((2, 224, 224, 3))
      >>> features, variables = jax.eval_shape(ResNet().init_with_output, jax.random.key(0), images)
      >>> features.shape
      (2, 2048)
    """

    stage_sizes: tuple[int, ...] = (3, 4, 6, 3)

    @nn.compact
    def __call__(self, images: Images, *, train: bool = False, where: Where = None) -> Features:
        """Maps images ``[m, h, w, c]`` to features ``[m, 2048 * width]`` (four stages)."""
        stem = self.conv_norm(scaled(64, self.width), (7, 7), stride=2, padding=3, name="stem")
        x = stem(self.prepared(images), train=train, where=where)
        x = max_pool(x, size=3, stride=2, padding=1)
        for stage, size in enumerate(self.stage_sizes, start=1):
            channels = scaled(64 * 2 ** (stage - 1), self.width)
            for index in range(1, size + 1):
                stride = 2 if stage > 1 and index == 1 else 1
                block = _Bottleneck(self.conv_norm, channels, stride, name=f"stage{stage}_block{index}")
                x = block(x, train=train, where=where)
        return jnp.mean(x, axis=(1, 2))


class _Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions to four times ``channels``, added to the input or to a projection of it."""

    conv_norm: Callable[..., ConvNorm]
    channels: int
    stride: int

    @nn.compact
    def __call__(self, x, *, train, where):
        def conv(x, name, features, size, stride=1, relu=True):
            layer = self.conv_norm(features, (size, size), stride, size // 2, relu, name=name)
            return layer(x, train=train, where=where)

        wide = 4 * self.channels
        y = conv(x, "conv1", self.channels, 1)
        y = conv(y, "conv2", self.channels, 3, self.stride)
        y = conv(y, "conv3", wide, 1, relu=False)
        if x.shape != y.shape:
            x = conv(x, "projection", wide, 1, self.stride, relu=False)
        return nn.relu(x + y)
