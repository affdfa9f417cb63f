"""ResNet-50 and ResNet-101, with the stride on the 3x3 convolution (the variant called v1.5)."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pols_jax.models.backbone import Backbone, ConvNorm, check_images, scaled
from pols_jax.models.batch_norm import AxisName


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
    def __call__(
        self,
        images: Float[Array, "batch height width channels"],
        *,
        train: bool = False,
        mask: Bool[Array, " batch"] | None = None,
    ) -> Float[Array, "batch features"]:
        """Maps images ``[m, h, w, c]`` to features ``[m, 2048 * width]`` (four stages)."""
        check_images(images)
        shared = {"axis_name": self.axis_name, "dtype": self.dtype}
        stem = ConvNorm(scaled(64, self.width), (7, 7), stride=2, padding=3, name="stem", **shared)
        x = stem(images, train=train, mask=mask)
        # Flax takes pairs here too; its annotation says str only.
        one_around = ((1, 1), (1, 1))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding=one_around)  # pyright: ignore[reportArgumentType]
        for stage, size in enumerate(self.stage_sizes, start=1):
            channels = scaled(64 * 2 ** (stage - 1), self.width)
            for index in range(1, size + 1):
                stride = 2 if stage > 1 and index == 1 else 1
                block = _Bottleneck(channels, stride, name=f"stage{stage}_block{index}", **shared)
                x = block(x, train=train, mask=mask)
        return jnp.mean(x, axis=(1, 2))


class _Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions to four times ``channels``, added to the input or to a projection of it."""

    channels: int
    stride: int
    axis_name: AxisName | None = None
    dtype: Any = None

    @nn.compact
    def __call__(self, x, *, train, mask):
        def conv(name, features, size, stride=1, relu=True):
            padding = size // 2
            shared = {"axis_name": self.axis_name, "dtype": self.dtype}
            return ConvNorm(features, (size, size), stride, padding, relu, name=name, **shared)

        wide = 4 * self.channels
        y = conv("conv1", self.channels, 1)(x, train=train, mask=mask)
        y = conv("conv2", self.channels, 3, self.stride)(y, train=train, mask=mask)
        y = conv("conv3", wide, 1, relu=False)(y, train=train, mask=mask)
        if x.shape != y.shape:
            x = conv("projection", wide, 1, self.stride, relu=False)(x, train=train, mask=mask)
        return nn.relu(x + y)
