"""What a data set is: class names, an image shape and three splits; and what a batch is.

A split is either an `ArraySplit`, small enough to live on the device as uint8, or a `StreamSplit`, whose
encoded images stay on disk and are decoded on the way.  Both give the same `Batch`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jaxtyping import Bool, Float, Int, Key, UInt8

from pols_jax.errors import DataError

Augment: TypeAlias = Callable[
    [Key[jax.Array, "batch"], UInt8[jax.Array, "batch height width channels"]],
    Float[jax.Array, "batch height width channels"],
]
"""Maps one random key per example and uint8 images to float32 images in [-1, 1]."""

DEFAULT_MAX_BYTES = 2 * 2**30
"""Data sets whose decoded images are larger are streamed: what a small accelerator can hold beside a network."""

_LARGEST_SIDE = 4096


class Batch(NamedTuple):
    """Examples that go through a network together.

    Attributes:
      images: Pixels in [-1, 1]; uint8 on the way from a stream to `augment_batch`.
      labels: Class ids.
      where: True for real examples, False for the rows that pad a batch to its size.

    Examples:
      >>> batch = Batch(np.zeros((2, 28, 28, 1), np.float32), np.array([3, 0], np.int32), np.array([True, False]))
      >>> batch.labels[batch.where]
      array([3], dtype=int32)
    """

    images: (
        Float[jax.Array | np.ndarray, "batch height width channels"]
        | UInt8[jax.Array | np.ndarray, "batch height width channels"]
    )
    labels: Int[jax.Array | np.ndarray, "batch"]
    where: Bool[jax.Array | np.ndarray, "batch"]


@dataclasses.dataclass(frozen=True, eq=False)
class ArraySplit:
    """A split in memory.

    Attributes:
      images: uint8 pixels, shape ``[n, h, w, c]``; or float32 features in their place, shape ``[n, d]``.
      labels: int32 class ids, shape ``[n]``.

    Examples:
      >>> split = ArraySplit(images=np.zeros((5, 28, 28, 1), np.uint8), labels=np.arange(5, dtype=np.int32))
      >>> len(split)
      5
    """

    images: UInt8[np.ndarray, "examples height width channels"] | Float[np.ndarray, "examples features"]
    labels: Int[np.ndarray, "examples"]

    def __post_init__(self) -> None:
        """Checks that every image has a label."""
        if (self.images.dtype, self.images.ndim) not in ((np.uint8, 4), (np.float32, 2)):
            raise ValueError(
                f"images must be uint8 [n, h, w, c], got {self.images.dtype} {self.images.shape}"
            )
        if self.labels.dtype != np.int32 or self.labels.shape != self.images.shape[:1]:
            raise ValueError(
                f"labels must be int32 [{len(self.images)}], got {self.labels.dtype} {self.labels.shape}"
            )

    def __len__(self) -> int:
        return len(self.labels)


@dataclasses.dataclass(frozen=True, eq=False)
class StreamSplit:
    """A split whose images are read and decoded while it is used.

    Attributes:
      records: Random access to (image, label) pairs; pickled to the worker processes. An image is the path of its file, or
        the contents.
      image_shape: Height, width and channels that images are decoded to.

    Examples:
      >>> split = StreamSplit(records=[("cat/1.jpg", 0), ("dog/1.jpg", 1)], image_shape=(224, 224, 3))
      >>> len(split)
      2
    """

    records: Sequence[tuple[str | bytes, int]]
    image_shape: tuple[int, int, int]

    def __len__(self) -> int:
        return len(self.records)


Split: TypeAlias = ArraySplit | StreamSplit
"""The examples of a split, in memory or streamed."""


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """A classification data set.

    Attributes:
      name: The name that `load` was given.
      class_names: One unique name per class; a label is an index into it.
      image_shape: Height, width and channels; for features, their number alone.
      train: Examples to learn from.
      validation: Examples to choose hyperparameters with.
      test: Examples for the final measurement, never used for a choice.
      provenance: Where the data comes from (versions, hashes, split rule), ready for JSON.
      augment: The augmentation that is the data set's own, or None.

    Examples:
      >>> split = ArraySplit(images=np.zeros((2, 8, 8, 1), np.uint8), labels=np.array([0, 1], np.int32))
      >>> Dataset("pair", ("yes", "no"), (8, 8, 1), split, split, split, provenance={}).num_classes
      2
    """

    name: str
    class_names: tuple[str, ...]
    image_shape: tuple[int, int, int]
    train: Split
    validation: Split
    test: Split
    provenance: dict[str, Any]
    augment: Augment | None = None

    def __post_init__(self) -> None:
        """Checks that a class is known by its name alone, and that labels are classes."""
        if len(set(self.class_names)) != len(self.class_names):
            raise DataError(f"The class names of {self.name} are not unique.")
        for name in ("train", "validation", "test"):
            split = getattr(self, name)
            if isinstance(split, ArraySplit) and np.any(
                (split.labels < 0) | (split.labels >= self.num_classes)
            ):
                raise DataError(
                    f"The {name} split of {self.name} has labels outside [0, {self.num_classes})."
                )

    @property
    def num_classes(self) -> int:
        """The number of classes, k."""
        return len(self.class_names)

    def is_the_data_of(self, provenance: dict[str, Any]) -> bool:
        """Tells whether recorded provenance is that of the same images; software versions may differ."""
        keys = ("content_sha256", "fingerprint")
        recorded = [key for key in keys if key in provenance]
        if not recorded:
            return not any(key in self.provenance for key in keys)
        # Older records of folders have no hash of the contents: what they have is compared.
        return all(self.provenance.get(key) == provenance[key] for key in recorded)


def scale_pixels(images: UInt8[jax.Array | np.ndarray, "..."]) -> Float[jax.Array | np.ndarray, "..."]:
    """Scales uint8 pixels to float32 in [-1, 1], on the device or with NumPy.

    Args:
      images: uint8 pixels, shape ``[..., h, w, c]``.

    Examples:
      >>> scale_pixels(np.array([0, 255], np.uint8)).tolist()
      [-1.0, 1.0]
    """
    # The difference is exact and the product rounds once, so every compiler and NumPy give the same bits.
    return (images.astype(np.float32) - np.float32(127.5)) * np.float32(1 / 127.5)


def network_input(
    images: UInt8[jax.Array | np.ndarray, "..."] | Float[jax.Array | np.ndarray, "..."],
) -> Float[jax.Array | np.ndarray, "..."]:
    """Makes of stored images what a network takes: pixels are scaled to [-1, 1], and features stay as they are.

    Examples:
      >>> network_input(np.array([0, 255], np.uint8)).tolist(), network_input(np.array([7.0], np.float32)).tolist()
      ([-1.0, 1.0], [7.0])
    """
    return scale_pixels(images) if images.dtype == np.uint8 else images


def check_image_size(image_size: int, *, smallest: int = 1) -> None:
    """Raises unless pictures can have a height and width.

    Examples:
      >>> check_image_size(0)
      Traceback (most recent call last):
      pols_jax.errors.DataError: The image size must be a whole number of pixels from 1 to 4096, got 0.
    """
    if not isinstance(image_size, int | np.integer) or not smallest <= image_size <= _LARGEST_SIDE:
        raise DataError(
            f"The image size must be a whole number of pixels from {smallest} to {_LARGEST_SIDE}, got {image_size}."
        )
