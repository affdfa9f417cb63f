"""What a folder of pictures holds, before any of them is decoded: classes, files, splits, and the pictures' sizes."""

import dataclasses
import os
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from pols_jax.data.images import IMAGE_FORMATS, IMAGE_SUFFIXES, silence_pillow
from pols_jax.errors import DataError, printable

Records = list[tuple[str, int]]
"""Paths of pictures and their labels."""

ALL = ""
"""The name of the one split of a folder that has none of its own."""

# How many pictures are opened to learn their size, and which share of them is at least as large as what is chosen.
_SAMPLE, _SMALL_SHARE = 1000, 10
_GRAY_MODES = ("1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "F")

# Of a folder without splits, the shares that test and validate, in 256ths of all hashes: about a tenth each.
_TEST_BELOW, _VALIDATION_BELOW = 26, 52


@dataclasses.dataclass(frozen=True)
class FolderListing:
    """The pictures of a folder.

    Attributes:
      path: The folder as it was named.
      root: The folder.
      classes: The names of the class folders in alphabetical order.
      records: Paths and labels by split; under `ALL` if the folder has no splits.
      left_out: What is not used, and why.
    """

    path: str
    root: str
    classes: tuple[str, ...]
    records: dict[str, Records]
    left_out: tuple[str, ...]

    @property
    def num_pictures(self) -> int:
        """The number of files that are taken for pictures."""
        return sum(map(len, self.records.values()))


@dataclasses.dataclass(frozen=True)
class PictureSizes:
    """What the headers of a sample of pictures say.

    Attributes:
      sides: The shorter side of each, in ascending order.
      are_gray: Whether none has color.

    Examples:
      >>> sizes = PictureSizes((20, 30, 40), are_gray=True)
      >>> sizes.shape(largest=224), sizes.num_enlarged(32)
      ((20, 20, 1), 2)
    """

    sides: tuple[int, ...]
    are_gray: bool

    @property
    def usual_side(self) -> int | None:
        """The shorter side that nine of ten pictures have at least; None if no picture could be opened."""
        return self.sides[len(self.sides) // _SMALL_SHARE] if self.sides else None

    def shape(
        self, *, largest: int, image_size: int | None = None, channels: int | None = None
    ) -> tuple[int, int, int]:
        """Chooses the shape to decode to: what is asked for, else the pictures' own, at most ``largest`` high and wide."""
        size = image_size or min(self.usual_side or largest, largest)
        return int(size), int(size), int(channels or (1 if self.are_gray else 3))

    def num_enlarged(self, image_size: int) -> int:
        """How many of the sample are smaller than they are decoded to."""
        return int(np.searchsorted(self.sides, image_size))


def list_folder(path: str | Path) -> FolderListing:
    """Lists the pictures of a folder, and opens none.

    Args:
      path: Directory with train/ and test/, optionally val/, and in each a folder per class; or with the folders of the
        classes alone.

    Examples:
      >>> list_folder("no/such/folder")
      Traceback (most recent call last):
      pols_jax.errors.DataError: no/such/folder is not a directory, seen from the one that the program was started in.
    """
    root = os.path.expanduser(path)
    if not str(root):
        raise DataError("A folder of pictures needs a path, as in folder:photos.")
    if not os.path.isdir(root):
        where = "" if os.path.isabs(root) else ", seen from the one that the program was started in"
        raise DataError(f"{printable(root)} is not a directory{where}.")
    left_out: list[str] = []
    there = [split for split in ("train", "test", "val") if os.path.isdir(os.path.join(root, split))]
    folders = {ALL: root}
    if there:
        for split in ("train", "test"):
            if split not in there:
                raise DataError(
                    f"{printable(os.path.join(root, split))} is not a directory; a folder data set has train/ and test/, or "
                    "neither."
                )
        others = [name for name in _class_folders(root, left_out) if name not in there]
        left_out += [
            f"{printable(os.path.join(root, name))}: a folder beside train/ and test/" for name in others
        ]
        names = {"train": "train", "validation": "val", "test": "test"}
        folders = {split: os.path.join(root, name) for split, name in names.items() if name in there}
    records, classes = {}, []
    for split, folder in folders.items():
        found = _class_folders(folder, left_out)
        if not classes:  # the first split has them all
            classes = found
            _check_classes(folder, classes, left_out)
        records[split] = _list_records(folder, classes, found, left_out)
        if not records[split]:
            what = f"The {split} split of {printable(root)}" if split else printable(root)
            raise DataError(f"{what} has no pictures ({', '.join(IMAGE_SUFFIXES)}).")
    return FolderListing(str(path), root, tuple(classes), records, tuple(left_out))


def picture_sizes(listing: FolderListing) -> PictureSizes:
    """Reads the headers of pictures at equal distances in the list, at most 1,000; those that are broken are passed over.

    Examples:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     for name in ("cat", "dog"):
      ...         os.mkdir(os.path.join(folder, name))
      ...         Image.new("L", (40, 30)).save(os.path.join(folder, name, "1.png"))
      ...     picture_sizes(list_folder(folder)).shape(largest=224)
      (30, 30, 1)
    """
    files = next(iter(listing.records.values()))
    places = np.unique(np.linspace(0, len(files) - 1, min(_SAMPLE, len(files))).round().astype(int))

    def header(place: int) -> tuple[int, bool] | None:
        try:
            with Image.open(files[place][0], formats=IMAGE_FORMATS) as image:
                return min(image.size), image.mode in _GRAY_MODES
        except Exception:  # whatever Pillow makes of a damaged header; decoding will name the file
            return None

    silence_pillow()
    with ThreadPoolExecutor() as threads:
        headers = [found for found in threads.map(header, places.tolist()) if found]
    return PictureSizes(
        tuple(sorted(side for side, _ in headers)), bool(headers) and all(is_gray for _, is_gray in headers)
    )


def split_by_content(
    records: Records, hashes: Sequence[str], num_classes: int
) -> tuple[dict[str, Records], dict[str, list[str]]]:
    """Splits pictures by the hashes of their files: about a tenth tests, a tenth validates.

    A picture keeps its split whatever is added to its class or renamed, and copies of a file are never in two splits. Only
    where a class is so small that chance leaves a split without it, its pictures with the lowest hashes fill in: a class
    of two pictures has one to learn from and one to test with, and one of three has one of each.

    Args:
      records: Paths and labels, by class.
      hashes: Of each file, in hexadecimal digits.
      num_classes: The number of classes.

    Examples:
      >>> splits, _ = split_by_content([("a", 0), ("b", 0), ("c", 0)], ["80", "05", "f0"], 1)
      >>> {name: [path for path, _ in files] for name, files in splits.items()}
      {'train': ['c'], 'validation': ['a'], 'test': ['b']}
    """
    chosen = [_split_of(digest) for digest in hashes]
    members_of: list[list[int]] = [[] for _ in range(num_classes)]
    for i, (_, label) in enumerate(records):
        members_of[label].append(i)
    for members in filter(None, members_of):
        by_hash = sorted(members, key=lambda i: hashes[i])
        fill = {"test": by_hash[:1], "validation": by_hash[1:2], "train": by_hash[-1:]}
        wanted = {1: ("train",), 2: ("test", "train")}.get(len(members), tuple(fill))
        if not set(wanted) <= {chosen[i] for i in members}:
            for split in wanted:
                chosen[fill[split][0]] = split
    splits: dict[str, Records] = {"train": [], "validation": [], "test": []}
    digests: dict[str, list[str]] = {name: [] for name in splits}
    for record, digest, split in zip(records, hashes, chosen, strict=True):
        splits[split].append(record)
        digests[split].append(digest)
    return splits, digests


def _split_of(digest: str) -> str:
    first_byte = int(digest[:2] or "ff", 16)  # a file that cannot be read has no hash
    if first_byte < _TEST_BELOW:
        return "test"
    return "validation" if first_byte < _VALIDATION_BELOW else "train"


def _class_folders(folder: str, left_out: list[str]) -> list[str]:
    """Lists the folders in a folder in alphabetical order; hidden ones, and what is none, are added to `left_out`."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise DataError(f"The folder {printable(folder)} cannot be read: {error.strerror}.") from error
    classes = []
    for name in names:
        path = os.path.join(folder, name)
        if os.path.isdir(path):
            if name.startswith("."):
                left_out.append(f"{printable(path)}: a hidden folder")
            else:
                classes.append(name)
        elif not os.path.exists(path):
            left_out.append(f"{printable(path)}: a link that leads nowhere")
        elif not name.startswith("."):
            left_out.append(f"{printable(path)}: in no class folder")
    return classes


def _check_classes(folder: str, classes: Sequence[str], left_out: Sequence[str]) -> None:
    if len(classes) >= 2:
        return
    if not classes and any("in no class folder" in why for why in left_out):
        advice = "; put the pictures of each class into a folder of their own"
    elif classes and len(_class_folders(os.path.join(folder, classes[0]), [])) >= 2:
        advice = f"; the folders in {printable(os.path.join(folder, classes[0]))} may be what you mean"
    else:
        advice = ""
    count = f"{len(classes)} class folder{'s' * (len(classes) != 1)}"
    raise DataError(f"{printable(folder)} has {count}, at least 2 are needed{advice}.")


def _list_records(folder: str, classes: Sequence[str], found: Sequence[str], left_out: list[str]) -> Records:
    """Lists the pictures of a split by class and file name; other files are added to `left_out`."""
    unknown = sorted(set(found) - set(classes))
    if unknown:
        raise DataError(
            f"{printable(folder)} has classes that train/ has not: {', '.join(map(printable, unknown))}."
        )

    def unreadable(error: OSError) -> None:
        left_out.append(f"{printable(error.filename)}: {error.strerror}")

    records: Records = []
    for class_id, class_name in enumerate(classes):
        if class_name not in found:
            continue  # a class without examples in this split
        for parent, subfolders, files in os.walk(os.path.join(folder, class_name), onerror=unreadable):
            hidden = [name for name in sorted(subfolders) if name.startswith(".")]
            left_out += [f"{printable(os.path.join(parent, name))}: a hidden folder" for name in hidden]
            subfolders[:] = sorted(set(subfolders) - set(hidden))
            for file in sorted(file for file in files if not file.startswith(".")):
                path = os.path.join(parent, file)
                if reason := _why_no_picture(path):
                    left_out.append(f"{printable(path)}: {reason}")
                else:
                    records.append((path, class_id))
    return records


def _why_no_picture(path: str) -> str | None:
    """Says what keeps a file from being taken for a picture, without opening it; None if nothing does."""
    if not path.lower().endswith(IMAGE_SUFFIXES):
        return f"not one of {', '.join(IMAGE_SUFFIXES)}"
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return "a link that leads nowhere"
    except OSError as error:
        return str(error.strerror)
    return None if stat.S_ISREG(status.st_mode) else "not a regular file"
