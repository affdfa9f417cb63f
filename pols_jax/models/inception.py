"""Inception-v3, with the auxiliary classifier of its training recipe as an option."""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from pols_jax.models.backbone import Backbone, ConvNorm, Features, Images, Where, scaled
from pols_jax.models.pooling import average_pool, max_pool

# The published network's own value; other networks here use 1e-5.
EPSILON = 1e-3


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

    @property
    def smallest_image(self) -> int:
        """The smallest height and width of images that the network can be trained on."""
        return 299 if self.auxiliary else 75

    def __call__(self, images: Images, *, train: bool = False, where: Where = None) -> Features:
        """Maps images ``[m, h, w, c]`` to features ``[m, 2048 * width]``."""
        return self.with_auxiliary(images, train=train, where=where)[0]

    @nn.compact
    def with_auxiliary(
        self, images: Images, *, train: bool = False, where: Where = None
    ) -> tuple[Features, Float[Array, "batch auxiliary_features"] | None]:
        """Maps images to features and to the side branch's features ``[m, 768 * width]``.

        The latter are None without ``auxiliary``, and in evaluation.
        """
        branch_off = self.auxiliary and (train or self.is_initializing())
        x = self.prepared(images, smallest=None if branch_off else 75)
        conv_norm = functools.partial(self.conv_norm, epsilon=EPSILON)

        def conv(x, name, features, size, stride=1, padding: Literal["SAME", "VALID"] = "VALID"):
            layer = conv_norm(scaled(features, self.width), (size, size), stride, padding, name=name)
            return layer(x, train=train, where=where)

        x = conv(x, "stem1", 32, 3, stride=2)
        x = conv(x, "stem2", 32, 3)
        x = conv(x, "stem3", 64, 3, padding="SAME")
        x = three_largest(x)
        x = conv(x, "stem4", 80, 1)
        x = conv(x, "stem5", 192, 3)
        x = three_largest(x)

        auxiliary_features = None
        for name, branches in blocks(self.stage_sizes).items():
            if name == "reduction2" and branch_off:
                side = average_pool(x, size=5, stride=3)
                side = conv(side, "auxiliary1", 128, 1)
                side = conv(side, "auxiliary2", 768, 5)
                auxiliary_features = jnp.mean(side, axis=(1, 2))
            x = _Mixed(conv_norm, branches, self.width, name=name)(x, train=train, where=where)
        features = jnp.mean(x, axis=(1, 2))
        features = nn.Dropout(self.dropout_rate, deterministic=not train)(features)
        return features, auxiliary_features


class ConvStep(NamedTuple):
    """A convolution in a branch, padded to keep the image's size; with stride 2 it is not padded."""

    features: int
    kernel_size: tuple[int, int] = (1, 1)
    stride: int = 1


class Fork(NamedTuple):
    """The end of a branch: two convolutions of the same input, side by side."""

    left: ConvStep
    right: ConvStep


Branch = tuple[ConvStep | Fork | Callable[[Array], Array], ...]


def three_average(x):
    """Averages windows of 3x3 pixels and keeps the image's size.

    Examples:
      >>> three_average(jnp.ones((1, 5, 5, 1)))[0, 2, 2].tolist()
      [1.0]
    """
    return average_pool(x, size=3, stride=1, padding="SAME")


def three_largest(x):
    """Takes the largest of windows of 3x3 pixels, with stride 2.

    Examples:
      >>> three_largest(jnp.arange(9.0).reshape(1, 3, 3, 1)).tolist()
      [[[[8.0]]]]
    """
    return max_pool(x, size=3, stride=2)


class _Mixed(nn.Module):
    """Parallel branches whose outputs are put together along the channels."""

    conv_norm: Callable[..., ConvNorm]
    branches: tuple[Branch, ...]
    width: float

    @nn.compact
    def __call__(self, x, *, train, where):
        def conv(x, step, name):
            features, padding = scaled(step.features, self.width), "SAME" if step.stride == 1 else "VALID"
            layer = self.conv_norm(features, step.kernel_size, step.stride, padding, name=name)
            return layer(x, train=train, where=where)

        outputs = []
        for branch_index, branch in enumerate(self.branches, start=1):
            y = x
            for step_index, step in enumerate(branch, start=1):
                name = f"branch{branch_index}_step{step_index}"
                if isinstance(step, ConvStep):
                    y = conv(y, step, name)
                elif isinstance(step, Fork):
                    sides = [conv(y, step.left, f"{name}a"), conv(y, step.right, f"{name}b")]
                    y = jnp.concatenate(sides, axis=-1)
                else:
                    y = step(y)
            outputs.append(y)
        return jnp.concatenate(outputs, axis=-1)


def _block_a(pool_features: int) -> tuple[Branch, ...]:
    return (
        (ConvStep(64),),
        (ConvStep(48), ConvStep(64, (5, 5))),
        (ConvStep(64), ConvStep(96, (3, 3)), ConvStep(96, (3, 3))),
        (three_average, ConvStep(pool_features)),
    )


_REDUCTION_1: tuple[Branch, ...] = (
    (ConvStep(384, (3, 3), 2),),
    (ConvStep(64), ConvStep(96, (3, 3)), ConvStep(96, (3, 3), 2)),
    (three_largest,),
)


def _block_c(inner: int) -> tuple[Branch, ...]:
    return (
        (ConvStep(192),),
        (ConvStep(inner), ConvStep(inner, (1, 7)), ConvStep(192, (7, 1))),
        (
            ConvStep(inner),
            ConvStep(inner, (7, 1)),
            ConvStep(inner, (1, 7)),
            ConvStep(inner, (7, 1)),
            ConvStep(192, (1, 7)),
        ),
        (three_average, ConvStep(192)),
    )


_REDUCTION_2: tuple[Branch, ...] = (
    (ConvStep(192), ConvStep(320, (3, 3), 2)),
    (ConvStep(192), ConvStep(192, (1, 7)), ConvStep(192, (7, 1)), ConvStep(192, (3, 3), 2)),
    (three_largest,),
)

_BLOCK_E: tuple[Branch, ...] = (
    (ConvStep(320),),
    (ConvStep(384), Fork(ConvStep(384, (1, 3)), ConvStep(384, (3, 1)))),
    (ConvStep(448), ConvStep(384, (3, 3)), Fork(ConvStep(384, (1, 3)), ConvStep(384, (3, 1)))),
    (three_average, ConvStep(192)),
)


def blocks(stage_sizes: tuple[int, int, int]) -> dict[str, tuple[Branch, ...]]:
    """Returns the branches of every block by its name, from the stem to the features.

    Examples:
      >>> list(blocks((1, 0, 1)))
      ['stage1_block1', 'reduction1', 'reduction2', 'stage3_block1']
    """
    first, second, third = stage_sizes
    table = {f"stage1_block{i}": _block_a(32 if i == 1 else 64) for i in range(1, first + 1)}
    table["reduction1"] = _REDUCTION_1
    for i in range(1, second + 1):
        table[f"stage2_block{i}"] = _block_c(128 if i == 1 else 192 if i == second else 160)
    table["reduction2"] = _REDUCTION_2
    return table | {f"stage3_block{i}": _BLOCK_E for i in range(1, third + 1)}
