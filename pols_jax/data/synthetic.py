"""Synthetic pictures of as many classes as one asks for: to measure what a number of classes costs, and nothing else.

A class is a pattern of pixels that a hash of its number draws. There are pictures of at most 4,096 classes, whatever the
number of classes is: a million classes take no more memory, and no longer to make, than their names do.
"""

import numpy as np
from jaxtyping import Int

from pols_jax.data.dataset import ArraySplit, Dataset, check_image_size
from pols_jax.errors import DataError

_CLASSES_WITH_PICTURES = 4096
_TRAINING_PICTURES = 2**14
# Noise of up to a quarter of the range on every pixel.
_NOISE = 64
_MOST_CLASSES = 2**31 - 2**20


def load_synthetic(num_classes: int | str, *, image_size: int = 16) -> Dataset:
    """Makes a data set for benchmarks, always the same one.

    Args:
      num_classes: The number of classes; 4,096 of them, at equal distances, have pictures (all, if there are fewer).
      image_size: Height and width; the pictures have one channel.

    Returns:
      About 16,000 pictures to learn from; to validate and to test, one of every class that has pictures.

    Examples:
      >>> dataset = load_synthetic(1_000_000)
      >>> dataset.num_classes, len(dataset.train), len(dataset.test)
      (1000000, 16384, 4096)
    """
    check_image_size(image_size)
    count = str(num_classes).replace(",", "").replace("_", "")
    if not (count.isascii() and count.isdecimal() and 2 <= int(count) <= _MOST_CLASSES):
        raise DataError(f"synthetic:K needs a number of classes K of at least 2, got {num_classes!r}.")
    num_classes = int(count)
    classes = np.unique(
        np.linspace(0, num_classes - 1, min(num_classes, _CLASSES_WITH_PICTURES)).round().astype(np.int32)
    )
    copies = -(-_TRAINING_PICTURES // len(classes))
    return Dataset(
        f"synthetic:{num_classes}",
        tuple(f"class {number}" for number in range(num_classes)),
        (image_size, image_size, 1),
        _pictures(np.tile(classes, copies)[:_TRAINING_PICTURES], image_size, seed=0),
        _pictures(classes, image_size, seed=1),
        _pictures(classes, image_size, seed=2),
        provenance={
            "source": "made by pols_jax.data.load_synthetic",
            "fingerprint": f"1-{num_classes}-{image_size}",
        },
    )


def _pictures(labels: Int[np.ndarray, " examples"], image_size: int, *, seed: int) -> ArraySplit:
    noise = np.random.default_rng(seed).integers(
        -_NOISE, _NOISE, (len(labels), image_size**2), np.int16, endpoint=True
    )
    pixels = np.clip(_patterns(labels, image_size**2) + noise, 0, 255).astype(np.uint8)
    return ArraySplit(pixels.reshape(-1, image_size, image_size, 1), labels)


def _patterns(labels: Int[np.ndarray, " examples"], num_pixels: int) -> Int[np.ndarray, "examples pixels"]:
    """One byte per pixel, by the finalizer of MurmurHash3 over class and pixel."""
    words = labels.astype(np.uint32)[:, None] * np.uint32(num_pixels) + np.arange(num_pixels, dtype=np.uint32)
    for factor, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13), (1, 16)):
        words = (words ^ (words >> np.uint32(shift))) * np.uint32(factor)
    return (words & np.uint32(255)).astype(np.int16)
