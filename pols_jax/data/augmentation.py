"""What training does to pictures at random, on the device: crops and mirroring, or the distortion of characters.

Everything is a pure function of one key per example, so what happens to an example does not depend on which device
draws it, nor on whether the data is in memory or streamed.
"""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Key, UInt8, UInt32

from pols_jax.data.dataset import Augment, Dataset, StreamSplit, scale_pixels

_ONE = 2**16  # a whole side, or a pixel, in the whole numbers that crops are computed in


def find_augmentation(name: str, dataset: Dataset) -> Augment | None:
    """Finds the augmentation of a name.

    Args:
      name: none, crop, crop-flip or distort; or auto, the data set's own. In runs of older versions it may be older:
        the data set's own in memory, crop-flip where it is streamed.
      dataset: The data set that it is for.

    Examples:
      >>> from pols_jax.data import load
      >>> find_augmentation("auto", load("glyphs", characters="0030-0039")) is augment_glyphs
      True
    """
    if name == "older":
        name = "crop-flip" if isinstance(dataset.train, StreamSplit) else "auto"
    return dataset.augment if name == "auto" else AUGMENTATIONS[name]


def crop_pictures(
    keys: Key[jax.Array, "batch"],
    images: UInt8[jax.Array, "batch height width channels"],
    *,
    flip: bool = False,
) -> Float[jax.Array, "batch height width channels"]:
    """Enlarges a random part of each picture to the whole shape, and mirrors every other picture if asked to.

    The part is half to all of the picture's side, up to an eighth more in one direction and less in the other: about
    a quarter to all of its area. All arithmetic is in whole numbers, so every program gives the same bits.

    Args:
      keys: One random key per example, shape ``[m]``.
      images: uint8 pixels, shape ``[m, h, w, c]``.
      flip: Whether to mirror left and right, half of the time.

    Examples:
      >>> keys = jax.random.split(jax.random.key(0), 4)
      >>> jax.jit(crop_pictures)(keys, jnp.zeros((4, 32, 32, 3), "uint8")).shape
      (4, 32, 32, 3)
    """
    num_examples, height, width, _ = images.shape
    words = jax.vmap(lambda key: jax.random.bits(key, (5,), jnp.uint32))(keys)
    side = (words[:, 0] >> np.uint32(17)).astype(jnp.int32) + np.int32(_ONE // 2)
    tilt = (((words[:, 1] >> np.uint32(16)).astype(jnp.int32) - np.int32(_ONE // 2)) * side) >> np.int32(18)
    y, down = _crop_axis(height, jnp.minimum(side + tilt, np.int32(_ONE)), words[:, 2])
    x, right = _crop_axis(width, jnp.minimum(side - tilt, np.int32(_ONE)), words[:, 3])
    if flip:
        mirrored = jnp.broadcast_to((words[:, 4] >> np.uint32(31) == 1)[:, None], x.shape)
        x, right = jnp.where(mirrored, x[:, ::-1], x), jnp.where(mirrored, right[:, ::-1], right)

    def on_grid(of_y, of_x):
        grid = (num_examples, height, width)
        both = jnp.broadcast_to(of_y[:, :, None], grid), jnp.broadcast_to(of_x[:, None, :], grid)
        return [each.reshape(num_examples, height * width) for each in both]

    top_left, low_left, top_right, low_right = _neighbors(images, *on_grid(y, x))
    down, right = (
        jnp.broadcast_to(each[:, :, None], top_left.shape).astype(jnp.uint32) for each in on_grid(down, right)
    )
    left_side = top_left * (np.uint32(256) - down) + low_left * down
    right_side = top_right * (np.uint32(256) - down) + low_right * down
    pixels = left_side * (np.uint32(256) - right) + right_side * right + np.uint32(_ONE // 2)
    return jnp.asarray(scale_pixels((pixels >> np.uint32(16)).astype(jnp.uint8).reshape(images.shape)))


def _crop_axis(
    size: int, share: Int[jax.Array, "batch"], word: UInt32[jax.Array, "batch"]
) -> tuple[Int[jax.Array, "batch size"], Int[jax.Array, "batch size"]]:
    """Places a part of an axis: the pixel that each new one begins at, and its share of the next, of 256."""
    room = (np.int32(_ONE) - share).astype(jnp.uint32)
    start = (((word >> np.uint32(16)) * room) >> np.uint32(16)).astype(jnp.int32)
    middles = jnp.asarray(2 * np.arange(size) + 1, jnp.int32)  # of the new pixels, in halves
    shape = (len(share), size)
    steps = jnp.broadcast_to(middles[None], shape) * jnp.broadcast_to(share[:, None], shape)
    place = jnp.broadcast_to((start * size)[:, None], shape) + (steps >> 1) - np.int32(_ONE // 2)
    place = jnp.clip(place, 0, (size - 1) * _ONE)
    return place >> 16, (place & (_ONE - 1)) >> 8


def augment_glyphs(
    keys: Key[jax.Array, "batch"],
    images: UInt8[jax.Array, "batch height width channels"],
    *,
    max_rotation: float = 0.05,
    max_log_scale: float = 0.05,
    max_shift: float = 0.02,
    max_noise: float = 0.1,
) -> Float[jax.Array, "batch height width channels"]:
    """Rotates, scales and shifts each image by a random amount, then adds noise of a random strength.

    Pixels beyond the border take the value at the border, so dark and light backgrounds both continue. The amounts are
    those that do best on the validation split of glyphs, see docs/results.md.

    Args:
      keys: One random key per example, shape ``[m]``.
      images: uint8 pixels, shape ``[m, h, w, c]``.
      max_rotation: Largest angle in radians.
      max_log_scale: Largest absolute logarithm of the scale, drawn for each axis.
      max_shift: Largest shift of each axis, as a share of the image's size.
      max_noise: Largest amplitude of the uniform noise, where the pixels' range is 2.

    Examples:
      >>> keys = jax.random.split(jax.random.key(0), 4)
      >>> jax.jit(augment_glyphs)(keys, jnp.zeros((4, 32, 32, 1), "uint8")).shape
      (4, 32, 32, 1)
    """
    num_examples, height, width, channels = images.shape
    num_noise_words = -(-height * width * channels // 4)
    # One draw of all random bits per example: 6 words of geometry and strength, then four noise bytes a word.
    words = jax.vmap(lambda key: jax.random.bits(key, (6 + num_noise_words,), jnp.uint32))(keys)
    uniform = words[:, :6].astype(jnp.float32) * 2.0**-31 - 1.0  # in [-1, 1)
    angle, log_scale_y, log_scale_x, shift_y, shift_x, strength = uniform.T
    matrix, offset = _inverse_affine(
        angle=angle * max_rotation,
        scale=jnp.exp(jnp.stack([log_scale_y, log_scale_x], axis=-1) * max_log_scale),
        shift=jnp.stack([shift_y * (max_shift * height), shift_x * (max_shift * width)], axis=-1),
        center=np.array([(height - 1) / 2, (width - 1) / 2], np.float32),
    )
    warped = _warp(images, matrix, offset)
    noise = jax.lax.bitcast_convert_type(words[:, 6:], jnp.uint8).reshape(num_examples, -1)
    noise = noise[:, : height * width * channels].reshape(images.shape).astype(jnp.float32) / 127.5 - 1.0
    amplitude = ((strength + 1.0) * (0.5 * max_noise)).reshape(num_examples, 1, 1, 1)
    noisy = warped / 127.5 - 1.0 + jnp.broadcast_to(amplitude, noise.shape) * noise
    return jnp.clip(noisy, -1.0, 1.0)


def _inverse_affine(*, angle, scale, shift, center):
    """Returns the affine maps from output pixels (y, x) to input pixels, as [m, 2, 2] matrices and [m, 2] offsets."""
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    rotation = jnp.stack([jnp.stack([cos, -sin], axis=-1), jnp.stack([sin, cos], axis=-1)], axis=-2)
    matrix = rotation / jnp.broadcast_to(scale[:, :, None], rotation.shape)
    moved = jnp.broadcast_to(center, shift.shape) + shift
    offset = jnp.broadcast_to(center, shift.shape) - jnp.einsum("mij,mj->mi", matrix, moved)
    return matrix, offset


def _warp(images, matrix, offset):
    """Samples uint8 images bilinearly where the affine maps lead; float32 in [0, 255]."""
    num_examples, height, width, _ = images.shape
    # Written out instead of a product of matrices, which XLA would not fuse with what follows.
    pixel_y, pixel_x = (
        jnp.broadcast_to(jnp.asarray(axis.ravel(), jnp.float32), (num_examples, height * width))
        for axis in np.mgrid[:height, :width]
    )
    matrix = jnp.broadcast_to(matrix[..., None], (num_examples, 2, 2, height * width))
    offset = jnp.broadcast_to(offset[..., None], (num_examples, 2, height * width))
    y, x = (offset[:, i] + matrix[:, i, 0] * pixel_y + matrix[:, i, 1] * pixel_x for i in range(2))
    y, x = jnp.clip(y, 0.0, height - 1.0), jnp.clip(x, 0.0, width - 1.0)
    row, column = jnp.floor(y), jnp.floor(x)
    four = _neighbors(images, row.astype(jnp.int32), column.astype(jnp.int32))
    top_left, low_left, top_right, low_right = (words.astype(jnp.float32) for words in four)
    down_share = jnp.broadcast_to((y - row)[:, :, None], top_left.shape)
    right_share = jnp.broadcast_to((x - column)[:, :, None], top_left.shape)
    left = top_left + down_share * (low_left - top_left)
    right = top_right + down_share * (low_right - top_right)
    return (left + right_share * (right - left)).reshape(images.shape)


def _neighbors(images, row, column):
    """Takes the pixels at [m, h * w] places, those below them, right of them, and both: four uint32 [m, h * w, c]."""
    num_examples, height, width, channels = images.shape
    # Gathers are the slow part on a CPU. Packing each pixel with its three neighbors into one word
    # makes it one gather instead of four.
    down = jnp.concatenate([images[:, 1:], images[:, -1:]], axis=1)
    both = jnp.stack([images, down], axis=-1)
    right = jnp.concatenate([both[:, :, 1:], both[:, :, -1:]], axis=2)
    packed = jax.lax.bitcast_convert_type(jnp.concatenate([both, right], axis=-1), jnp.uint32)
    words = jnp.take_along_axis(
        packed.reshape(num_examples, height * width, channels),
        (row * width + column)[:, :, None],
        axis=1,
        mode="promise_in_bounds",
    )
    return [(words >> np.uint32(8 * i)) & np.uint32(255) for i in range(4)]


AUGMENTATIONS: Mapping[str, Augment | None] = {
    "none": None,
    "crop": crop_pictures,
    "crop-flip": functools.partial(crop_pictures, flip=True),
    "distort": augment_glyphs,
}
"""Every augmentation by its name."""
