"""Glyph augmentation against a plain interpolation, and its range and purity."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.ndimage

from pols_jax.data import augment_glyphs, augmentation, load, scale_pixels

STILL = {"max_rotation": 0.0, "max_log_scale": 0.0, "max_shift": 0.0, "max_noise": 0.0}


@pytest.fixture(scope="module")
def images():
    return jnp.asarray(load("glyphs", characters="0041-0050").train.images[:16])


@pytest.fixture(scope="module")
def keys():
    return jax.random.split(jax.random.key(0), 16)


def test_no_distortion_leaves_the_images_alone(keys, images):
    # The centre is subtracted and added again, which moves a coordinate by up to 2e-6 of a pixel.
    np.testing.assert_allclose(augment_glyphs(keys, images, **STILL), scale_pixels(images), atol=1e-5)


@pytest.mark.parametrize("channels", [1, 3])
def test_warping_is_bilinear_interpolation_with_a_continued_border(channels):
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (5, 12, 9, channels), np.uint8)
    matrix = (np.eye(2) + generator.normal(0, 0.2, (5, 2, 2))).astype(np.float32)
    offset = generator.normal(0, 2, (5, 2)).astype(np.float32)
    warped = augmentation._warp(jnp.asarray(images), jnp.asarray(matrix), jnp.asarray(offset))
    for i in range(5):
        for channel in range(channels):
            expected = scipy.ndimage.affine_transform(
                images[i, :, :, channel].astype(np.float64), matrix[i], offset[i], order=1, mode="nearest"
            )
            # Coordinates up to 20 in float32 are exact to 2e-6, and neighbours differ by up to 255.
            np.testing.assert_allclose(warped[i, :, :, channel], expected, atol=2e-3)


def test_a_shift_moves_the_picture_by_at_most_its_limit(keys):
    image = np.zeros((16, 33, 33, 1), np.uint8)
    image[:, 16, 16] = 255
    moved = augment_glyphs(keys, jnp.asarray(image), **(STILL | {"max_shift": 0.1}))
    weight = (np.asarray(moved)[..., 0] + 1) / 2
    center_y = (weight * np.arange(33)[None, :, None]).sum(axis=(1, 2)) / weight.sum(axis=(1, 2))
    assert np.abs(center_y - 16).max() <= 3.3 + 1e-3
    assert np.abs(center_y - 16).max() > 1  # sixteen draws of up to 3.3 pixels


def test_noise_has_the_strength_it_is_given(keys):
    grey = jnp.full((16, 32, 32, 1), 128, jnp.uint8)
    noise = augment_glyphs(keys, grey, **(STILL | {"max_noise": 0.4})) - scale_pixels(grey)
    largest = np.abs(noise).max(axis=(1, 2, 3))
    assert largest.max() <= 0.4 + 1e-6
    assert largest.min() < 0.2 < largest.max()  # the strength itself is random
    # 1,024 uniform draws of standard deviation 0.4 / sqrt(3): their mean is within 5 standard errors of 0.
    assert np.abs(noise.mean(axis=(1, 2, 3))).max() < 5 * 0.4 / np.sqrt(3 * 1024)


def test_each_example_depends_on_its_own_key_alone(keys, images):
    together = jax.jit(augment_glyphs)(keys, images)
    alone = jax.jit(augment_glyphs)(keys[5:6], images[5:6])
    # Two programs of two shapes may round differently; another key would move the picture by pixels.
    np.testing.assert_allclose(together[5:6], alone, atol=1e-5)


def test_augmented_images_stay_in_range_and_stay_recognisable(keys, images):
    augmented = jax.jit(functools.partial(augment_glyphs, max_noise=0.0))(keys, images)
    assert augmented.dtype == jnp.float32
    assert float(augmented.min()) >= -1.0
    assert float(augmented.max()) <= 1.0
    ink, original = (np.asarray(a + 1.0).sum(axis=(1, 2, 3)) for a in (augmented, scale_pixels(images)))
    # Ink grows with the area, by up to exp(2 * 0.1) = 1.22; nothing is pushed out of the picture.
    assert (ink / original).max() < 1.25
    assert (ink / original).min() > 1 / 1.25
