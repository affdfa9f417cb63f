"""Augmentation against a plain interpolation, and its range and purity."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.ndimage

from pols_jax.data import (
    ArraySplit,
    Dataset,
    StreamSplit,
    augment_glyphs,
    augmentation,
    crop_pictures,
    find_augmentation,
    load,
    scale_pixels,
)

STILL = {"max_rotation": 0.0, "max_log_scale": 0.0, "max_shift": 0.0, "max_noise": 0.0}


def compiled(function, keys, images, **options):
    """What a function gives as one program, which compiles sooner than one for every operation."""
    return jax.jit(functools.partial(function, **options))(keys, images)


@pytest.fixture(scope="module")
def images():
    return jnp.asarray(load("glyphs", characters="0041-0050").train.images[:16])


@pytest.fixture(scope="module")
def keys():
    return jax.random.split(jax.random.key(0), 16)


def test_no_distortion_leaves_the_images_alone(keys, images):
    # The center is subtracted and added again, which moves a coordinate by up to 2e-6 of a pixel.
    np.testing.assert_allclose(
        compiled(augment_glyphs, keys, images, **STILL), scale_pixels(images), atol=1e-5
    )


@pytest.mark.parametrize("channels", [1, 3])
def test_warping_is_bilinear_interpolation_with_a_continued_border(channels):
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (5, 12, 9, channels), np.uint8)
    matrix = (np.eye(2) + generator.normal(0, 0.2, (5, 2, 2))).astype(np.float32)
    offset = generator.normal(0, 2, (5, 2)).astype(np.float32)
    warped = jax.jit(augmentation._warp)(images, matrix, offset)
    for i in range(5):
        for channel in range(channels):
            expected = scipy.ndimage.affine_transform(
                images[i, :, :, channel].astype(np.float64), matrix[i], offset[i], order=1, mode="nearest"
            )
            # Coordinates up to 20 in float32 are exact to 2e-6, and neighbors differ by up to 255.
            np.testing.assert_allclose(warped[i, :, :, channel], expected, atol=2e-3)


def test_a_shift_moves_the_picture_by_at_most_its_limit(keys):
    image = np.zeros((16, 33, 33, 1), np.uint8)
    image[:, 16, 16] = 255
    moved = compiled(augment_glyphs, keys, image, **(STILL | {"max_shift": 0.1}))
    weight = (np.asarray(moved)[..., 0] + 1) / 2
    center_y = (weight * np.arange(33)[None, :, None]).sum(axis=(1, 2)) / weight.sum(axis=(1, 2))
    assert np.abs(center_y - 16).max() <= 3.3 + 1e-3
    assert np.abs(center_y - 16).max() > 1  # sixteen draws of up to 3.3 pixels


def test_noise_has_the_strength_it_is_given(keys):
    gray = jnp.full((16, 32, 32, 1), 128, jnp.uint8)
    noisy = compiled(augment_glyphs, keys, gray, **(STILL | {"max_noise": 0.4}))
    noise = np.asarray(noisy) - np.asarray(scale_pixels(gray))
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


def test_augmented_images_stay_in_range_and_stay_recognizable(keys, images):
    augmented = jax.jit(functools.partial(augment_glyphs, max_noise=0.0))(keys, images)
    assert augmented.dtype == jnp.float32
    assert float(augmented.min()) >= -1.0
    assert float(augmented.max()) <= 1.0
    ink, original = (np.asarray(a + 1.0).sum(axis=(1, 2, 3)) for a in (augmented, scale_pixels(images)))
    # Ink grows with the area, by up to exp(2 * 0.1) = 1.22; nothing is pushed out of the picture.
    assert (ink / original).max() < 1.25
    assert (ink / original).min() > 1 / 1.25


def pixels_of(images):
    return ((np.asarray(images) + np.float32(1)) * np.float32(127.5)).round().astype(np.uint8)


@pytest.mark.parametrize("shape", [(28, 28, 1), (17, 40, 3), (1, 1, 1), (1, 9, 3)])
def test_a_crop_is_bilinear_interpolation_of_a_part_of_the_picture(shape):
    images = np.random.default_rng(0).integers(0, 256, (16, *shape), np.uint8)
    keys = jax.random.split(jax.random.key(1), 16)
    cropped = pixels_of(compiled(crop_pictures, keys, images))
    bits = jax.jit(jax.vmap(lambda key: jax.random.bits(key, (5,), jnp.uint32)))
    words = np.asarray(bits(keys)).astype(np.float64)
    uniform = words / 2**32
    for i in range(16):
        side = 0.5 + 0.5 * uniform[i, 0]
        tilt = (uniform[i, 1] - 0.5) * side / 4
        places = []
        for size, share, start in zip(shape, (side + tilt, side - tilt), uniform[i, 2:4], strict=False):
            share = min(share, 1.0)
            middles = (np.arange(size) + 0.5) * share + start * (1 - share) * size - 0.5
            places.append(np.clip(middles, 0, size - 1))
        grid = np.meshgrid(*places, indexing="ij")
        for channel in range(shape[2]):
            plain = images[i, :, :, channel].astype(np.float64)
            expected = scipy.ndimage.map_coordinates(plain, grid, order=1, mode="nearest")
            # Places are cut to 1/256 of a pixel, on both axes, and neighbors differ by up to 255.
            np.testing.assert_allclose(cropped[i, :, :, channel], expected, atol=3)


def test_a_crop_covers_half_to_all_of_the_side_and_half_are_mirrored_where_asked_for():
    columns = jnp.asarray(
        np.broadcast_to(np.arange(0, 240, 4, dtype=np.uint8)[None, :, None], (200, 60, 60, 1))
    )
    keys = jax.random.split(jax.random.key(0), 200)
    plain, flipped = (
        pixels_of(compiled(crop_pictures, keys, columns, flip=flip))[:, 0, :, 0] for flip in (False, True)
    )
    steps = (plain[:, -1].astype(int) - plain[:, 0]) / 236
    # Half of the side and an eighth less is 0.44; the ends of the row are half a new pixel inside of the part.
    assert 0.4 < steps.min() < 0.6
    assert 0.9 < steps.max() <= 1
    mirrored = (flipped == plain[:, ::-1]).all(axis=1)
    np.testing.assert_array_equal(mirrored, ~(flipped == plain).all(axis=1))
    # Two standard deviations of 200 fair draws are 14.
    assert 72 <= mirrored.sum() <= 128


def test_every_program_crops_with_the_same_bits():
    images = jnp.asarray(np.random.default_rng(0).integers(0, 256, (4, 33, 20, 3), np.uint8))
    keys = jax.random.split(jax.random.key(0), 4)
    together = crop_pictures(keys, images, flip=True)  # one operation at a time
    for i in range(4):
        alone = jax.jit(functools.partial(crop_pictures, flip=True))(keys[i : i + 1], images[i : i + 1])
        np.testing.assert_array_equal(alone[0], together[i])


def test_what_older_runs_call_true_is_a_crop_only_where_the_data_was_streamed():
    split = ArraySplit(np.zeros((2, 8, 8, 1), np.uint8), np.array([0, 1], np.int32))
    memory = Dataset("pair", ("a", "b"), (8, 8, 1), split, split, split, provenance={})
    stream = StreamSplit([("a.png", 0)], (8, 8, 1))
    streamed = Dataset("pair", ("a", "b"), (8, 8, 1), stream, split, split, provenance={})
    assert find_augmentation("older", memory) is find_augmentation("auto", memory) is None
    assert find_augmentation("older", streamed) is augmentation.AUGMENTATIONS["crop-flip"]
    assert find_augmentation("crop", memory) is find_augmentation("crop", streamed) is crop_pictures
