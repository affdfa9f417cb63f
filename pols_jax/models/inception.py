"""Inception-v3, with the auxiliary classifier of its training recipe as an option."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from pols_jax.models.backbone import Backbone, ConvNorm, check_images, scaled
from pols_jax.models.batch_norm import AxisName

# The published network's own value; other networks here use 1e-5.
_EPSILON = 1e-3


class InceptionV3(Backbone):
    """Inception-v3 (Szegedy et al., 2016); all image sizes from 75x75 up fit the same parameters.

    In training mode dropout draws from the random stream "dropout".

    Attributes:
      stage_sizes: The number of blocks in each of the three stages.
      dropout_rate: The share of the features that a training step sets to zero.
      auxiliary: Whether there is a side branch after the second stage, for `Classifier` to put a second output layer
        on. It needs images of at least 299x299 in training and ``init``, and costs nothing in evaluation.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> images = jnp.ones((2, 299, 299, 3))
      >>> features, variables = jax.eval_shape(InceptionV3().init_with_output, jax.random.key(0), images)
      >>> features.shape
      (2, 2048)
    """

    stage_sizes: tuple[int, int, int] = (3, 4, 2)
    dropout_rate: float = 0.2
    auxiliary: bool = False

    def __call__(
        self,
        images: Float[Array, "batch height width channels"],
        *,
        train: bool = False,
        mask: Bool[Array, " batch"] | None = None,
    ) -> Float[Array, "batch features"]:
        """Maps images ``[m, h, w, c]`` to features ``[m, 2048 * width]``."""
        return self.with_auxiliary(images, train=train, mask=mask)[0]

    @nn.compact
    def with_auxiliary(
        self,
        images: Float[Array, "batch height width channels"],
        *,
        train: bool = False,
        mask: Bool[Array, " batch"] | None = None,
    ) -> tuple[Float[Array, "batch features"], Float[Array, "batch auxiliary_features"] | None]:
        """Maps images to features and to the side branch's features ``[m, 768 * width]``.

        The latter are None without ``auxiliary``, and in evaluation.
        """
        branch_off = self.auxiliary and (train or self.is_initializing())
        check_images(images, smallest=299 if branch_off else 75)

        def conv(x, name, features, size, stride=1, padding: Literal["SAME", "VALID"] = "VALID"):
            layer = ConvNorm(
                scaled(features, self.width),
                (size, size),
                stride,
                padding,
                epsilon=_EPSILON,
                axis_name=self.axis_name,
                dtype=self.dtype,
                name=name,
            )
            return layer(x, train=train, mask=mask)

        def mixed(x, name, branches):
            block = _Mixed(branches, self.width, self.axis_name, self.dtype, name=name)
            return block(x, train=train, mask=mask)

        x = conv(images, "stem1", 32, 3, stride=2)
        x = conv(x, "stem2", 32, 3)
        x = conv(x, "stem3", 64, 3, padding="SAME")
        x = _max_pool(x)
        x = conv(x, "stem4", 80, 1)
        x = conv(x, "stem5", 192, 3)
        x = _max_pool(x)

        first, second, third = self.stage_sizes
        for index in range(1, first + 1):
            x = mixed(x, f"stage1_block{index}", _block_a(pool_features=32 if index == 1 else 64))
        x = mixed(x, "reduction1", _REDUCTION_1)
        for index in range(1, second + 1):
            inner_features = 128 if index == 1 else 192 if index == second else 160
            x = mixed(x, f"stage2_block{index}", _block_c(inner_features))
        auxiliary_features = None
        if branch_off:
            side = _average_pool(x, size=5, stride=3, padding="VALID")
            side = conv(side, "auxiliary1", 128, 1)
            side = conv(side, "auxiliary2", 768, 5)
            auxiliary_features = jnp.mean(side, axis=(1, 2))
        x = mixed(x, "reduction2", _REDUCTION_2)
        for index in range(1, third + 1):
            x = mixed(x, f"stage3_block{index}", _BLOCK_E)
        features = jnp.mean(x, axis=(1, 2))
        features = nn.Dropout(self.dropout_rate, deterministic=not train)(features)
        return features, auxiliary_features


class _Conv(NamedTuple):
    """A convolution in a branch, padded to keep the image's size; with stride 2 it is not padded."""

    features: int
    kernel_size: tuple[int, int] = (1, 1)
    stride: int = 1


class _Fork(NamedTuple):
    """The end of a branch: two convolutions of the same input, side by side."""

    left: _Conv
    right: _Conv


_Branch = tuple[_Conv | _Fork | Callable[[Array], Array], ...]


def _average_pool(x, size=3, stride=1, padding="SAME"):
    # The zeros of the padding count, as in torchvision.
    total = nn.pool(x, 0.0, lax.add, (size, size), (stride, stride), padding)
    return total / size**2


def _max_pool(x):
    return nn.max_pool(x, (3, 3), strides=(2, 2))


class _Mixed(nn.Module):
    """Parallel branches whose outputs are put together along the channels."""

    branches: tuple[_Branch, ...]
    width: float
    axis_name: AxisName | None = None
    dtype: Any = None

    @nn.compact
    def __call__(self, x, *, train, mask):
        def conv(x, step, name):
            layer = ConvNorm(
                scaled(step.features, self.width),
                step.kernel_size,
                step.stride,
                padding="SAME" if step.stride == 1 else "VALID",
                epsilon=_EPSILON,
                axis_name=self.axis_name,
                dtype=self.dtype,
                name=name,
            )
            return layer(x, train=train, mask=mask)

        outputs = []
        for branch_index, branch in enumerate(self.branches, start=1):
            y = x
            for step_index, step in enumerate(branch, start=1):
                name = f"branch{branch_index}_step{step_index}"
                if isinstance(step, _Conv):
                    y = conv(y, step, name)
                elif isinstance(step, _Fork):
                    y = jnp.concatenate(
                        [conv(y, step.left, f"{name}a"), conv(y, step.right, f"{name}b")], axis=-1
                    )
                else:
                    y = step(y)
            outputs.append(y)
        return jnp.concatenate(outputs, axis=-1)


def _block_a(pool_features: int) -> tuple[_Branch, ...]:
    return (
        (_Conv(64),),
        (_Conv(48), _Conv(64, (5, 5))),
        (_Conv(64), _Conv(96, (3, 3)), _Conv(96, (3, 3))),
        (_average_pool, _Conv(pool_features)),
    )


_REDUCTION_1: tuple[_Branch, ...] = (
    (_Conv(384, (3, 3), 2),),
    (_Conv(64), _Conv(96, (3, 3)), _Conv(96, (3, 3), 2)),
    (_max_pool,),
)


def _block_c(inner: int) -> tuple[_Branch, ...]:
    return (
        (_Conv(192),),
        (_Conv(inner), _Conv(inner, (1, 7)), _Conv(192, (7, 1))),
        (_Conv(inner), _Conv(inner, (7, 1)), _Conv(inner, (1, 7)), _Conv(inner, (7, 1)), _Conv(192, (1, 7))),
        (_average_pool, _Conv(192)),
    )


_REDUCTION_2: tuple[_Branch, ...] = (
    (_Conv(192), _Conv(320, (3, 3), 2)),
    (_Conv(192), _Conv(192, (1, 7)), _Conv(192, (7, 1)), _Conv(192, (3, 3), 2)),
    (_max_pool,),
)

_BLOCK_E: tuple[_Branch, ...] = (
    (_Conv(320),),
    (_Conv(384), _Fork(_Conv(384, (1, 3)), _Conv(384, (3, 1)))),
    (_Conv(448), _Conv(384, (3, 3)), _Fork(_Conv(384, (1, 3)), _Conv(384, (3, 1)))),
    (_average_pool, _Conv(192)),
)
