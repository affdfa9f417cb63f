"""Where the pictures of a search come from: files, folders, patterns, a list that may never end, or a split."""

import glob
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from pols_jax.data import ArraySplit, Split
from pols_jax.errors import ConfigError, DataError, printable
from pols_jax.search.class_bank import ClassBank

INDEX_LIST = "feature_index.json"
"""The file by which an index of features is known."""


class Picture(NamedTuple):
    """A picture to be looked at: its path, or its place in a split; and its path, its contents, or its pixels."""

    name: str
    source: str | bytes | UInt8[np.ndarray, "height width channels"]


def named_pictures(
    paths: Sequence[str],
    *,
    split: str | None,
    bank: ClassBank,
    lines: Iterable[str],
    data_dir: str | Path | None = None,
) -> Iterator[Picture]:
    """Lists the pictures that a user names: by paths (``-`` for those in ``lines``), or by a split of the run's data.

    Raises:
      ConfigError: unless there are either paths or a split.
      DataError: if a path stands for no file, or the data cannot be had.
    """
    if split is not None:
        if paths:
            raise ConfigError("Give either PATHs or --split, not both.")
        dataset = bank.run.load_dataset(data_dir=data_dir)
        return split_pictures(getattr(dataset, split), split, dataset.class_names)
    if not paths:
        raise ConfigError(
            "Name the pictures to search: files, folders, patterns, - for a list, or --split test."
        )
    sources = [listed_pictures(lines) if path == "-" else find_pictures([path]) for path in paths]
    return itertools.chain.from_iterable(sources)


def find_pictures(paths: Iterable[str]) -> Iterator[Picture]:
    """Lists the pictures that files, folders (all but hidden files) and patterns such as ``photos/**/*.jpg`` stand for.

    They are sorted within each path; folders are read while the pictures are used. What turns out to be no picture, such
    as a pipe, a link that leads nowhere or a folder that cannot be read, is among them: to be named and counted.

    Raises:
      DataError: if a path does not exist, or stands for no file.
    """
    sources = []
    for path in paths:
        files = _files(path)
        first = next(files, None)
        if first is None:
            raise DataError(f"There is no picture in {printable(path)}.")
        sources.append(itertools.chain([first], files))
    return (Picture(file, file) for file in itertools.chain.from_iterable(sources))


def listed_pictures(lines: Iterable[str]) -> Iterator[Picture]:
    """Takes one path per line as the lines arrive; a path that cannot be read is skipped later, like a broken file."""
    for line in lines:
        if name := line.rstrip("\r\n"):
            yield Picture(name, name)


def split_pictures(split: Split, name: str, class_names: Sequence[str]) -> Iterator[Picture]:
    """Takes the pictures of a split, named after their place and their true class."""
    in_memory = isinstance(split, ArraySplit)
    records = zip(split.images, split.labels, strict=True) if in_memory else split.records
    for i, (source, label) in enumerate(records):
        yield Picture(f"{name}[{i}] ({class_names[int(label)]})", source)


def is_index(directory: str | os.PathLike) -> bool:
    """Whether a directory is an index of features.

    Examples:
      >>> is_index("no/such/directory")
      False
    """
    return os.path.exists(os.path.join(directory, INDEX_LIST))


def files_below(folder: str) -> Iterator[str]:
    """Lists the files of a folder and the folders in it, all but hidden ones; at last, the folders that cannot be read."""
    unreadable: list[str] = []
    for parent, folders, files in os.walk(folder, onerror=lambda error: unreadable.append(error.filename)):
        folders[:] = sorted(folder for folder in folders if not folder.startswith("."))
        yield from (os.path.join(parent, file) for file in sorted(files) if not file.startswith("."))
    yield from unreadable


def _files(path: str) -> Iterator[str]:
    if os.path.isdir(path):
        yield from files_below(path)
    elif os.path.exists(path):
        yield path
    elif glob.has_magic(path):
        yield from (file for file in sorted(glob.glob(path, recursive=True)) if not os.path.isdir(file))
    else:
        raise DataError(f"There is no file, folder or pattern {printable(path)}.")
