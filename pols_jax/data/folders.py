"""`folder:PATH`: your own pictures, one folder per class.

    PATH/train/CLASS/*.jpg     to learn from
    PATH/test/CLASS/*.jpg      to test with
    PATH/val/CLASS/*.jpg       to validate with; without it, the last tenth of every class in train
    PATH/CLASS/*.jpg           instead of all these: split by the contents of the files

Files are JPEG, PNG, WebP, GIF or BMP. What cannot be used is named and counted in a warning and in the provenance.
"""

import hashlib
import math
import os
import warnings
from collections.abc import Mapping, Sized
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from pols_jax.data import array_cache
from pols_jax.data.dataset import DEFAULT_MAX_BYTES, ArraySplit, Dataset, StreamSplit, check_image_size
from pols_jax.data.file_hashes import file_hashes
from pols_jax.data.folder_listing import (
    ALL,
    FolderListing,
    PictureSizes,
    Records,
    list_folder,
    picture_sizes,
    split_by_content,
)
from pols_jax.data.images import decode_image
from pols_jax.data.reporting import counted
from pols_jax.errors import DataError, DataWarning, ImageError, printable
from pols_jax.files import read_bytes

_LARGEST_SIZE = 224  # what larger pictures are shrunk to, unless a size is asked for


def load_folder(
    path: str | Path,
    *,
    image_size: int | None = None,
    channels: int | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Dataset:
    """Loads folders of pictures.

    Args:
      path: Directory with train/ and test/, optionally val/; or with the folders of the classes.
      image_size: Height and width in pixels that pictures are fitted to; by default the shorter side that nine of ten
        pictures have at least, at most 224.
      channels: 3 for color, 1 for gray; by default 1 if no picture has color.
      max_bytes: Decoded images of at most this size together are kept in memory, larger sets are streamed.

    Examples:
      >>> import tempfile, PIL.Image
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     for name in ("train/cat/1", "train/cat/2", "train/dog/1", "test/cat/3", "test/dog/2"):
      ...         file = Path(folder, name + ".png")
      ...         file.parent.mkdir(parents=True, exist_ok=True)
      ...         PIL.Image.new("RGB", (40, 30)).save(file)
      ...     dataset = load_folder(folder)
      >>> dataset.class_names, len(dataset.train), len(dataset.validation), len(dataset.test), dataset.image_shape
      (('cat', 'dog'), 2, 1, 2, (30, 30, 3))
    """
    if image_size is not None:
        check_image_size(image_size)
    if channels not in (None, 1, 3):
        raise DataError(f"Pictures have 1 or 3 channels, not {channels}.")
    listing = list_folder(path)
    sizes = PictureSizes((), False) if image_size and channels else picture_sizes(listing)
    shape = sizes.shape(largest=_LARGEST_SIZE, image_size=image_size, channels=channels)
    return load_listing(listing, shape, max_bytes=max_bytes)


def load_listing(
    listing: FolderListing, image_shape: tuple[int, int, int], *, max_bytes: int = DEFAULT_MAX_BYTES
) -> Dataset:
    """Loads the pictures that `list_folder` has listed, as `load_folder` does.

    Args:
      listing: What to load.
      image_shape: Height, width and channels that pictures are fitted to.
      max_bytes: Decoded images of at most this size together are kept in memory, larger sets are streamed.

    Examples:
      >>> import tempfile, PIL.Image
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     for name in ("cat/1", "cat/2", "cat/3", "dog/1"):
      ...         file = Path(folder, name + ".png")
      ...         file.parent.mkdir(parents=True, exist_ok=True)
      ...         PIL.Image.new("L", (8, 8), len(name)).save(file)
      ...     dataset = load_listing(list_folder(folder), (8, 8, 1))
      >>> len(dataset.train), len(dataset.validation), len(dataset.test)
      (2, 1, 1)
    """
    root, records, unusable = listing.root, dict(listing.records), list(listing.left_out)
    known: dict[str, list[str]] | None = None
    if ALL in records:
        files = [file for file, _ in records[ALL]]
        hashes = file_hashes(root, {ALL: files})[ALL]
        records, known = split_by_content(records[ALL], hashes, len(listing.classes))
        rule = "by the SHA-256 of every file: first byte below 26 test, below 52 validation, else train"
    elif "validation" in records:
        rule = "train/, val/ and test/"
    else:
        train, validation = _hold_out_last_tenth(records["train"], len(listing.classes))
        records = {"train": train, "validation": validation, "test": records["test"]}
        rule = "train/ and test/; validation is the last tenth of every class in train/, by file name"
    _check_splits(root, records)
    splits: dict[str, ArraySplit | StreamSplit] = {}
    if listing.num_pictures * math.prod(image_shape) <= max_bytes:
        decoded, hashes_of = _decoded(records, image_shape, unusable)
        splits |= decoded
    else:
        hashes_of = known or file_hashes(
            root, {split: [file for file, _ in files] for split, files in records.items()}
        )
        splits |= {split: StreamSplit(files, image_shape) for split, files in records.items()}
    reasons = [why.rstrip(".") for why in unusable]
    _warn_of(reasons, "file is left out as unusable", "files are left out as unusable", "; ")
    _check_splits(root, splits)
    there = {label for _, label in records["train"]}
    empty = [printable(name) for i, name in enumerate(listing.classes) if i not in there]
    _warn_of(empty, "class has no pictures to learn from", "classes have no pictures to learn from", ", ")
    return Dataset(
        name=printable(f"folder:{listing.path}"),
        class_names=tuple(map(printable, listing.classes)),
        image_shape=image_shape,
        train=splits["train"],
        validation=splits["validation"],
        test=splits["test"],
        provenance={
            "path": printable(os.path.abspath(root)),
            "split_rule": rule,
            "files": {split: len(files) for split, files in records.items()},
            "fingerprint": _fingerprint(root, records),
            "content_sha256": _content_hash(records, hashes_of),
            "unusable_files": unusable,
            "num_unusable_files": len(unusable),
        },
    )


def _check_splits(root: str, splits: Mapping[str, Sized]) -> None:
    for split, examples in splits.items():
        if not len(examples):
            raise DataError(f"The {split} split of {printable(root)} has no pictures.")


def _hold_out_last_tenth(records: Records, num_classes: int) -> tuple[Records, Records]:
    """Splits off the last tenth of every class, at least one where there are two."""
    counts = np.bincount([label for _, label in records], minlength=num_classes)
    held_out = np.where(counts >= 2, np.maximum(counts // 10, 1), 0)
    first_held_out = np.cumsum(counts) - held_out
    train, validation = [], []
    for i, record in enumerate(records):
        (validation if i >= first_held_out[record[1]] else train).append(record)
    return train, validation


def _decoded(
    records: dict[str, Records], image_shape: tuple[int, int, int], unusable: list[str]
) -> tuple[dict[str, ArraySplit], dict[str, list[str]]]:
    """Decodes all pictures, and hashes their files; those that cannot be decoded are added to `unusable`."""

    def decode(path: str) -> tuple[np.ndarray | str, str]:
        try:
            data = read_bytes(path)
        except OSError as error:
            return f"{printable(path)} cannot be read: {error.strerror}", ""
        digest = hashlib.sha256(data).hexdigest()
        try:
            return decode_image(data, image_shape, name=path), digest
        except ImageError as error:
            return str(error), digest

    paths = [path for files in records.values() for path, _ in files]
    splits, hashes = {}, {}
    with ThreadPoolExecutor() as threads:  # Pillow works outside of the interpreter lock
        decoded = counted(threads.map(decode, paths), "Decoding", len(paths))
        for split, files in records.items():
            images, labels = np.empty((len(files), *image_shape), np.uint8), np.empty(len(files), np.int32)
            num_decoded, hashes[split] = 0, []
            for (_, label), (image, digest) in zip(files, decoded, strict=False):
                hashes[split].append(digest)
                if isinstance(image, str):
                    unusable.append(image)
                else:
                    images[num_decoded], labels[num_decoded] = image, label
                    num_decoded += 1
            splits[split] = ArraySplit(images[:num_decoded], labels[:num_decoded])
    return splits, hashes


def _warn_of(found: list[str], one: str, several: str, separator: str) -> None:
    """Counts what was found in a warning that shows the first five, if there is anything."""
    if found:
        shown = separator.join([*found[:5], *["..."] * (len(found) > 5)])
        count = f"1 {one}" if len(found) == 1 else f"{len(found)} {several}"
        warnings.warn(f"{count}: {shown}.", DataWarning, stacklevel=4)


def _fingerprint(root: str, records: dict[str, Records]) -> str:
    """Identifies the files by their names, sizes and classes."""
    return array_cache.fingerprint(
        [
            [split, [(os.path.relpath(file, root), _size(file), label) for file, label in files]]
            for split, files in records.items()
        ]
    )


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:  # it was there a moment ago
        return -1


def _content_hash(records: dict[str, Records], hashes: dict[str, list[str]]) -> str:
    """Identifies the pictures by their contents and classes, in order."""
    digest = hashlib.sha256()
    for split, files in records.items():
        digest.update(f"{split} {len(files)}\n".encode())
        for (_, label), file_digest in zip(files, hashes[split], strict=True):
            digest.update(f"{label} {file_digest}\n".encode())
    return digest.hexdigest()
