"""An index: the features of many pictures, computed once, to be asked about any class.

`update_index` makes an index of pictures, or brings one up to date. `FeatureIndex` opens one or several, and scores all
their pictures for a class by one product with its row of the output layer. The features stay on the disk, mapped into
memory, so that a question costs about as much as reading them.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float, Int

from pols_jax.errors import ConfigError, FileError, RunError, shell_word
from pols_jax.files import write_bytes
from pols_jax.normalizers import Normalizer, estimates
from pols_jax.search.class_bank import ClassBank
from pols_jax.search.index_files import (
    SCHEMA,
    IndexInfo,
    PartInfo,
    Rows,
    array_bytes,
    check_features,
    read_info,
    read_part,
)
from pols_jax.search.indexing import IndexUpdate, update_index
from pols_jax.search.pictures import is_index
from pols_jax.training.run_normalizer import normalizer_id

__all__ = ["FeatureIndex", "IndexUpdate", "is_index", "update_index"]

# What one thread takes at a time, and what of that stays in its cache while it is multiplied by several rows.
_TASK_BYTES, _CACHE_BYTES = 2**23, 2**19
# Somebody may change the index while it is opened.
_TRIES = 5


class _Part(NamedTuple):
    """An open part: its features as they are on the disk, and its pictures; ``keep`` leaves out those of another part."""

    directory: Path
    info: PartInfo
    features: Float[np.ndarray, "stored features"]
    pictures: pa.Table
    keep: Bool[np.ndarray, " stored"] | None

    def kept(self, values: np.ndarray) -> np.ndarray:
        return values if self.keep is None else values[self.keep]


class _Paths(Sequence[str]):
    """The paths of an index, decoded as they are asked for."""

    def __init__(self, column: pa.ChunkedArray):
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        return os.fsdecode(self._column[int(place)].as_py())


class FeatureIndex:
    """The features of many pictures, of one or several directories that ``pols index`` wrote; it is only read.

    Attributes:
      directories: The directories.
      checkpoint: What identifies the network that the features are from.
      run_dir: Where that network was.
      num_features: The width d of the features.
      num_broken: How many files could not be decoded.
      paths: The paths of the pictures, in order; names that are not UTF-8 as Python has them.

    Examples:
      >>> from PIL import Image
      >>> Image.new("L", (40, 30), 255).save("white.png")
      >>> bank = ClassBank.open("runs/digits")
      >>> update = update_index(bank, ["white.png"], "index")
      >>> index = FeatureIndex.open("index")
      >>> len(index), os.path.basename(index.path(0)), index.scores(bank, "digit seven").shape
      (1, 'white.png', (1,))
    """

    def __init__(self, directories: Sequence[Path], infos: Sequence[IndexInfo], parts: Sequence[_Part]):
        self.directories = tuple(directories)
        self.checkpoint, self.run_dir = infos[0].checkpoint, infos[0].run_dir
        self.num_features = infos[0].num_features
        self.num_broken = sum(part.num_broken for info in infos for part in info.parts)
        self._parts = parts
        self._pictures = pa.concat_tables([SCHEMA.empty_table(), *(part.pictures for part in parts)])
        self.paths: Sequence[str] = _Paths(self._pictures["path"])
        self._estimates: dict[str, list[np.ndarray]] = {}

    @classmethod
    def open(cls, *directories: str | os.PathLike) -> "FeatureIndex":
        """Opens one or several indexes as one; a picture that is in several counts once.

        Raises:
          RunError: if a directory is no index, a file of it is missing or damaged, or they are of several networks.
        """
        if not directories:
            raise ConfigError("Name at least one index.")
        places, infos, parts = [Path(directory) for directory in directories], [], []
        seen: set[bytes] | None = set() if len(places) > 1 else None
        for place in places:
            info, rows = _read_whole(place)
            infos.append(info)
            if (info.checkpoint, info.num_features) != (infos[0].checkpoint, infos[0].num_features):
                raise RunError(
                    f"{place} holds features of another network than {places[0]} ({info.checkpoint} of {info.run_dir}, not "
                    f"{infos[0].checkpoint} of {infos[0].run_dir}); search them one after the other."
                )
            parts += [_open_part(place, part, row, seen) for part, row in zip(info.parts, rows, strict=True)]
        return cls(places, infos, parts)

    def __len__(self) -> int:
        """The number of pictures that have features."""
        return len(self.paths)

    def path(self, i: int) -> str:
        """The path of a picture."""
        return self.paths[i]

    @property
    def sizes(self) -> Int[np.ndarray, " pictures"]:
        """The size of each file in bytes, when it was indexed."""
        return self._pictures["size"].to_numpy()

    def check(self, bank: ClassBank) -> None:
        """Raises a `RunError` unless the features are those of the network of a bank."""
        if (bank.checkpoint, bank.num_features) != (self.checkpoint, self.num_features):
            raise RunError(
                f"{self.directories[0]} holds features of another network ({self.checkpoint} of {self.run_dir}), not of "
                f"{bank.place} ({bank.checkpoint}); make another index with pols index {shell_word(bank.place)}."
            )

    def verify(self) -> None:
        """Reads all features, and raises a `RunError` if a bit of them has changed since they were written."""
        for part in self._parts:
            check_features(part.directory, part.info, part.features)

    def blocks(self) -> Iterator[tuple[int, Float[np.ndarray, "block features"]]]:
        """Yields the features part by part, mapped into memory: the place of the first picture, and ``[b, d]``."""
        start = 0
        for part in self._parts:
            yield start, part.kept(part.features)
            start += len(part.pictures)

    def scores(
        self, bank: ClassBank, classes: str | int | Sequence[str | int]
    ) -> Float[np.ndarray, "pictures *classes"]:
        """Scores every picture: the logit of a class, minus the normalizer if the bank has one.

        A score depends on the features and the row alone, not on what else is scored with it. `ClassBank.logits` gives the
        same up to rounding.

        Args:
          bank: The network.
          classes: Names or ids of ``c`` classes, or a single one.

        Returns:
          Scores, shape ``[n, c]``; of a single class, ``[n]``.

        Raises:
          RunError: if the features are of another network.
        """
        if isinstance(classes, str | int | np.integer):
            return self.scores(bank, [classes])[:, 0]
        self.check(bank)
        kernel, bias = bank.rows(classes)
        scores = np.empty((len(kernel), len(self)), np.float32)
        estimates = self._estimates_of(bank.estimator)
        num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        with ThreadPoolExecutor(num_cores) as threads:
            tasks = []
            for (start, features), minus in zip(self.blocks(), estimates, strict=True):
                step = max(1, _TASK_BYTES // (features.itemsize * self.num_features))
                for first in range(0, len(features), step):
                    here = slice(first, first + step)
                    out = scores[:, start + first : start + first + len(features[here])]
                    tasks.append(threads.submit(_score, features[here], kernel, bias, minus[here], out))
            for task in tasks:
                task.result()
        return scores.T

    def normalizers(self, bank: ClassBank) -> Float[np.ndarray, " pictures"]:
        """What the normalizer of a bank says about each picture, zeros if it has none: what `scores` subtracts.

        It is computed once, and kept beside the features. An affine normalizer is in the rows already.
        """
        self.check(bank)
        return np.concatenate([np.zeros(0, np.float32), *self._estimates_of(bank.estimator)])

    def _estimates_of(self, normalizer: Normalizer | None) -> list[np.ndarray]:
        if normalizer is None:
            return [np.broadcast_to(np.float32(0), len(part.pictures)) for part in self._parts]
        identity = normalizer_id(normalizer)
        if identity not in self._estimates:
            self._estimates[identity] = [
                part.kept(_stored_estimates(part, identity, normalizer)) for part in self._parts
            ]
        return self._estimates[identity]


def _read_whole(directory: Path) -> tuple[IndexInfo, list[Rows]]:
    """The list of an index and its parts, of one moment, though somebody may be changing it."""
    for attempt in range(_TRIES):
        info = read_info(directory)
        try:
            return info, [read_part(directory, info, part) for part in info.parts]
        except RunError:
            if attempt == _TRIES - 1 or read_info(directory) == info:
                raise
    raise AssertionError


def _open_part(directory: Path, part: PartInfo, rows: Rows, seen: set[bytes] | None) -> _Part:
    pictures, keep = rows.pictures.filter(rows.pictures["broken"].is_null()), None
    if seen is not None:
        paths = pictures["path"].to_pylist()
        is_new = np.array([path not in seen for path in paths], bool)
        seen.update(paths)
        if not is_new.all():
            keep, pictures = is_new, pictures.filter(pa.array(is_new))
    return _Part(directory, part, np.asarray(rows.features), pictures, keep)


def _score(features, kernel, bias, estimates, out) -> None:
    """Fills scores ``[c, b]``. einsum, not BLAS: it reads as fast, takes one thread, and sums every row in the same order."""
    num_rows = max(1, _CACHE_BYTES // (4 * features.shape[1])) if len(kernel) > 1 else max(1, len(features))
    with np.errstate(all="ignore"):
        for first in range(0, len(features), num_rows):
            here = slice(first, first + num_rows)
            for row, row_bias, column in zip(kernel, bias, out, strict=True):
                np.einsum("ij,j->i", features[here], row, out=column[here])
                column[here] += row_bias
                column[here] -= estimates[here]


def _stored_estimates(part: _Part, identity: str, normalizer: Normalizer) -> Float[np.ndarray, " stored"]:
    """What a normalizer says about the pictures of a part: from the file beside it, which is written if it can be."""
    path = part.directory / f"normalizer-{part.info.number:06d}-{identity}.npy"
    with contextlib.suppress(OSError, ValueError, EOFError):
        stored = np.load(path, allow_pickle=False)
        is_whole = (stored.shape, stored.dtype) == (part.features.shape[:1], np.float32)
        if is_whole and np.isfinite(stored).all():
            return stored
    found = estimates(normalizer, part.features)
    with contextlib.suppress(FileError):  # an index that may only be read is asked as well
        write_bytes(path, array_bytes(found))
    return found
