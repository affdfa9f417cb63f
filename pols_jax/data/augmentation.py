"""Random rotation, scale, shift and noise for drawn characters, on the device.

Everything is a pure function of one key per example, so an example's distortion does not depend on which
device draws it.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Key, UInt8, UInt32


def augment_glyphs(
    keys: Key[jax.Array, "batch"],
    images: UInt8[jax.Array, "batch height width channels"],
    *,
    max_rotation: float = 0.1,
    max_log_scale: float = 0.1,
    max_shift: float = 0.04,
    max_noise: float = 0.2,
) -> Float[jax.Array, "batch height width channels"]:
    """Rotate, scale and shift each image by a random amount, then add noise of a random strength.

    Pixels beyond the border take the value at the border, so dark and light backgrounds both continue.

    Args:
        keys: [m], one random key per example.
        images: [m, h, w, c], uint8.
        max_rotation: Largest angle in radians.
        max_log_scale: Largest absolute logarithm of the scale, drawn for each axis.
        max_shift: Largest shift of each axis, as a share of the image's size.
        max_noise: Largest amplitude of the uniform noise, where the pixels' range is 2.

    Returns:
        [m, h, w, c], float32 in [-1, 1].

    >>> keys = jax.random.split(jax.random.key(0), 4)
    >>> augment_glyphs(keys, jnp.zeros((4, 32, 32, 1), "uint8")).shape
    (4, 32, 32, 1)
    """
    num_examples, height, width, channels = images.shape
    num_noise_words = -(-height * width * channels // 4)
    # One draw of all random bits per example: 6 words of geometry and strength, then four noise bytes a word.
    words = jax.vmap(lambda key: jax.random.bits(key, (6 + num_noise_words,), jnp.uint32))(keys)
    angle, log_scale_y, log_scale_x, shift_y, shift_x, strength = _uniform(words[:, :6]).T
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


def _uniform(words: UInt32[jax.Array, "..."]) -> Float[jax.Array, "..."]:
    """Turn random words into uniform numbers in [-1, 1)."""
    return words.astype(jnp.float32) * 2.0**-31 - 1.0


def _inverse_affine(*, angle, scale, shift, center):
    """The affine maps from output pixels (y, x) to input pixels, as [m, 2, 2] matrices and [m, 2] offsets."""
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    rotation = jnp.stack([jnp.stack([cos, -sin], axis=-1), jnp.stack([sin, cos], axis=-1)], axis=-2)
    matrix = rotation / jnp.broadcast_to(scale[:, :, None], rotation.shape)
    moved = jnp.broadcast_to(center, shift.shape) + shift
    offset = jnp.broadcast_to(center, shift.shape) - jnp.einsum("mij,mj->mi", matrix, moved)
    return matrix, offset


def _warp(images, matrix, offset):
    """Sample uint8 images bilinearly where the affine maps lead; float32 in [0, 255]."""
    num_examples, height, width, channels = images.shape
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
    # Gathers are the slow part on a CPU. Packing each pixel with its three neighbours into one word
    # makes it one gather instead of four.
    down = jnp.concatenate([images[:, 1:], images[:, -1:]], axis=1)
    both = jnp.stack([images, down], axis=-1)
    right = jnp.concatenate([both[:, :, 1:], both[:, :, -1:]], axis=2)
    packed = jax.lax.bitcast_convert_type(jnp.concatenate([both, right], axis=-1), jnp.uint32)
    index = (row * width + column).astype(jnp.int32)
    words = jnp.take_along_axis(
        packed.reshape(num_examples, height * width, channels),
        index[:, :, None],
        axis=1,
        mode="promise_in_bounds",
    )
    top_left, low_left, top_right, low_right = (
        ((words >> np.uint32(8 * i)) & np.uint32(255)).astype(jnp.float32) for i in range(4)
    )
    down_share = jnp.broadcast_to((y - row)[:, :, None], words.shape)
    right_share = jnp.broadcast_to((x - column)[:, :, None], words.shape)
    left = top_left + down_share * (low_left - top_left)
    right = top_right + down_share * (low_right - top_right)
    return (left + right_share * (right - left)).reshape(images.shape)
