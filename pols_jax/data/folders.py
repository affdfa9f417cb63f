"""`folder:PATH`: your own pictures, one folder per class.

    PATH/train/CLASS/*.jpg     to learn from
    PATH/test/CLASS/*.jpg      to test with
    PATH/val/CLASS/*.jpg       to validate with; without it, the last tenth of every class in train

Files are JPEG, PNG or WebP.  What cannot be used is named and counted in a warning and in the provenance.
"""

import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from pols_jax.data import array_cache
from pols_jax.data.dataset import (
    DEFAULT_MAX_BYTES,
    ArraySplit,
    DataError,
    Dataset,
    DataWarning,
    EncodedImage,
    StreamSplit,
    num_bytes,
)
from pols_jax.data.images import IMAGE_SUFFIXES, ImageError, decode_image

Records = list[tuple[EncodedImage, int]]


def load_folder(
    path: str | Path, *, image_size: int = 224, channels: int = 3, max_bytes: int = DEFAULT_MAX_BYTES
) -> Dataset:
    """Load folders of pictures.

    Args:
        path: Directory with train/ and test/, optionally val/.
        image_size: Height and width in pixels that pictures are fitted to.
        channels: 3 for colour, 1 for grey.
        max_bytes: Decoded images of at most this size together are kept in memory, larger sets are streamed.

    Returns:
        The data set; classes are the folders of train/ in alphabetical order.

    Raises:
        DataError: A folder is missing or empty, or has a class that train/ has not.

    >>> import tempfile, PIL.Image
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in ("train/cat/1", "train/cat/2", "train/dog/1", "test/cat/3", "test/dog/2"):
    ...         file = Path(folder, name + ".png")
    ...         file.parent.mkdir(parents=True, exist_ok=True)
    ...         PIL.Image.new("RGB", (40, 30)).save(file)
    ...     dataset = load_folder(folder, image_size=28)
    >>> dataset.class_names, len(dataset.train), len(dataset.validation), len(dataset.test)
    (('cat', 'dog'), 2, 1, 2)
    """
    root = Path(path).expanduser()
    for split in ("train", "test"):
        if not (root / split).is_dir():
            raise DataError(f"{root / split} is not a directory: a folder data set has train/ and test/")
    class_names = tuple(sorted(folder.name for folder in _subdirectories(root / "train")))
    if len(class_names) < 2:
        raise DataError(f"{root / 'train'} has {len(class_names)} class folders, at least 2 are needed")
    image_shape = (image_size, image_size, channels)

    foreign: list[str] = []
    records = {"train": _list_records(root / "train", class_names, foreign)}
    if (root / "val").is_dir():
        records["validation"] = _list_records(root / "val", class_names, foreign)
        rule = "train/, val/ and test/"
    else:
        records["train"], records["validation"] = _hold_out_last_tenth(records["train"], len(class_names))
        rule = "train/ and test/; validation is the last tenth of every class in train/, by file name"
    records["test"] = _list_records(root / "test", class_names, foreign)
    unusable = [f"{file}: not one of {', '.join(IMAGE_SUFFIXES)}" for file in foreign]

    splits: dict[str, ArraySplit | StreamSplit] = {}
    fits = num_bytes((sum(map(len, records.values())), *image_shape)) <= max_bytes
    for split, files in records.items():
        splits[split] = _decoded(files, image_shape, unusable) if fits else StreamSplit(files, image_shape)
    _report(unusable)
    for split, examples in splits.items():
        if not len(examples):
            raise DataError(f"the {split} split of {root} has no pictures")
    return Dataset(
        name=f"folder:{path}",
        class_names=class_names,
        image_shape=image_shape,
        train=splits["train"],
        validation=splits["validation"],
        test=splits["test"],
        provenance={
            "path": str(root),
            "split_rule": rule,
            "files": {split: len(files) for split, files in records.items()},
            "fingerprint": _fingerprint(root, records),
            "unusable_files": unusable,
            "num_unusable_files": len(unusable),
        },
    )


def _subdirectories(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]


def _list_records(folder: Path, class_names: Sequence[str], foreign: list[str]) -> Records:
    """List the pictures of a split by class and file name; other files are added to `foreign`."""
    unknown = sorted({subfolder.name for subfolder in _subdirectories(folder)} - set(class_names))
    if unknown:
        raise DataError(f"{folder} has classes that train/ has not: {', '.join(unknown)}")
    records: Records = []
    for class_id, class_name in enumerate(class_names):
        if not (folder / class_name).is_dir():
            continue  # a class without examples in this split
        for parent, subfolders, files in os.walk(folder / class_name):
            subfolders.sort()
            for file in sorted(file for file in files if not file.startswith(".")):
                file_path = os.path.join(parent, file)
                if file.lower().endswith(IMAGE_SUFFIXES):
                    records.append((file_path, class_id))
                else:
                    foreign.append(file_path)
    return records


def _hold_out_last_tenth(records: Records, num_classes: int) -> tuple[Records, Records]:
    """Split off the last tenth of every class, at least one where there are two."""
    counts = np.bincount([label for _, label in records], minlength=num_classes)
    held_out = np.where(counts >= 2, np.maximum(counts // 10, 1), 0)
    first_held_out = np.cumsum(counts) - held_out
    train, validation = [], []
    for i, record in enumerate(records):
        (validation if i >= first_held_out[record[1]] else train).append(record)
    return train, validation


def _decoded(records: Records, image_shape: tuple[int, int, int], unusable: list[str]) -> ArraySplit:
    """Decode all pictures of a split; those that cannot be are added to `unusable`."""
    images, labels = np.empty((len(records), *image_shape), np.uint8), np.empty(len(records), np.int32)
    num_decoded = 0

    def decode(source: EncodedImage) -> np.ndarray | ImageError:
        try:
            return decode_image(source, image_shape)
        except ImageError as error:
            return error

    with ThreadPoolExecutor() as threads:  # Pillow works outside of the interpreter lock
        decoded = threads.map(decode, (source for source, _ in records))
        for image, (_, label) in zip(decoded, records, strict=True):
            if isinstance(image, ImageError):
                unusable.append(str(image))
            else:
                images[num_decoded], labels[num_decoded] = image, label
                num_decoded += 1
    return ArraySplit(images[:num_decoded], labels[:num_decoded])


def _report(unusable: list[str]) -> None:
    if unusable:
        shown = "; ".join(unusable[:5]) + ("; ..." if len(unusable) > 5 else "")
        warnings.warn(
            f"{len(unusable)} files cannot be used and are left out: {shown}", DataWarning, stacklevel=3
        )


def _fingerprint(root: Path, records: dict[str, Records]) -> str:
    """Identifies the files by their names, sizes and classes."""
    return array_cache.fingerprint(
        [
            [
                split,
                [
                    (os.path.relpath(str(file), root), os.path.getsize(str(file)), label)
                    for file, label in files
                ],
            ]
            for split, files in records.items()
        ]
    )
