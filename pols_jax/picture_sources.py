"""Where the pictures of a search come from: files, folders, patterns, a list that may never end, or a split."""

import glob
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from pols_jax.config import ConfigError
from pols_jax.data import ArraySplit, DataError, Split
from pols_jax.runs import Run


class Picture(NamedTuple):
    """A picture to be looked at.

    Attributes:
      name: Its path, or its place in a split.
      source: The path or the contents of an image file, or pixels.
    """

    name: str
    source: str | bytes | UInt8[np.ndarray, "height width channels"]


def named_pictures(
    paths: Sequence[str],
    *,
    split: str | None,
    run: Run,
    lines: Iterable[str],
    data_dir: str | Path | None = None,
) -> Iterator[Picture]:
    """Lists the pictures that a user names, by paths or by a split of the data that a run was trained on.

    Args:
      paths: Files, folders, patterns, or ``-`` for the paths in ``lines``.
      split: A split, instead of paths.
      run: The run whose data the split is of.
      lines: One path each, taken as they arrive.
      data_dir: Where prepared tfds data sets are.

    Raises:
      ConfigError: unless there are either paths or a split.
      DataError: if a path stands for no file, or the data cannot be had.
    """
    if split is not None:
        if paths:
            raise ConfigError("Give either PATHs or --split, not both.")
        dataset = run.load_dataset(data_dir=data_dir)
        return split_pictures(getattr(dataset, split), split, dataset.class_names)
    if not paths:
        raise ConfigError(
            "Name the pictures to search: files, folders, patterns, - for a list, or --split test."
        )
    sources = [listed_pictures(lines) if path == "-" else find_pictures([path]) for path in paths]
    return itertools.chain.from_iterable(sources)


def find_pictures(paths: Iterable[str]) -> Iterator[Picture]:
    """Lists the pictures that paths stand for.

    Args:
      paths: Files; folders, which stand for all files in them but hidden ones; and patterns such as ``photos/**/*.jpg``.

    Returns:
      Pictures, sorted within each path; folders are read while the pictures are used.

    Raises:
      DataError: if a path does not exist, or stands for no file.

    Examples:
      >>> find_pictures(["no/such/file.png"])
      Traceback (most recent call last):
      pols_jax.data.dataset.DataError: there is no file, folder or pattern no/such/file.png
    """
    sources = []
    for path in paths:
        files = _files(path)
        first = next(files, None)
        if first is None:
            raise DataError(f"there is no picture in {path}")
        sources.append(itertools.chain([first], files))
    return (Picture(file, file) for file in itertools.chain.from_iterable(sources))


def listed_pictures(lines: Iterable[str]) -> Iterator[Picture]:
    """Takes one path per line as the lines arrive; a path that cannot be read is skipped later, like a broken file.

    Examples:
      >>> [picture.name for picture in listed_pictures(["a.png", "", "b.png"])]
      ['a.png', 'b.png']
    """
    for line in lines:
        if name := line.rstrip("\r\n"):
            yield Picture(name, name)


def split_pictures(split: Split, name: str, class_names: Sequence[str]) -> Iterator[Picture]:
    """Takes the pictures of a split, named after their place and their true class.

    Examples:
      >>> split = ArraySplit(np.zeros((2, 8, 8, 1), np.uint8), np.array([0, 1], np.int32))
      >>> [picture.name for picture in split_pictures(split, "test", ("yes", "no"))]
      ['test[0] (yes)', 'test[1] (no)']
    """
    in_memory = isinstance(split, ArraySplit)
    records = zip(split.images, split.labels, strict=True) if in_memory else split.records
    for i, (source, label) in enumerate(records):
        yield Picture(f"{name}[{i}] ({class_names[int(label)]})", source)


def _files(path: str) -> Iterator[str]:
    if os.path.isdir(path):
        for parent, folders, files in os.walk(path):
            folders[:] = sorted(folder for folder in folders if not folder.startswith("."))
            yield from (os.path.join(parent, file) for file in sorted(files) if not file.startswith("."))
    elif os.path.exists(path):
        yield path
    elif glob.has_magic(path):
        yield from (file for file in sorted(glob.glob(path, recursive=True)) if os.path.isfile(file))
    else:
        raise DataError(f"there is no file, folder or pattern {path}")
