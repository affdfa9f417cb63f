"""The files of an index of features: parts that are written once, and a list of those that count.

A part is two files: ``pictures-N.parquet`` has a row for every picture that was looked at, and ``features-N.npy`` a row
for each of those that could be decoded, in the same order. ``feature_index.json`` lists the parts. It is replaced at once
when the parts of a change are on the disk, so that a reader, or a kill at any moment, meets the index before the change
or after it. What a kill leaves beside the list is removed by the next change.
"""

import contextlib
import dataclasses
import io
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Bool, Float

from pols_jax.errors import ConfigError, RunError, reason_of
from pols_jax.files import read_bytes, write_bytes, write_json
from pols_jax.schema import encode, read_record
from pols_jax.search.pictures import INDEX_LIST, is_index
from pols_jax.training.stored_arrays import crc32

DTYPES = ("float32", "float16")
"""What features can be stored in."""

# A part grows up to this: large enough for few open files, small enough to be written again when it grows.
_PART_BYTES = 2**26
_OWN_NAME = re.compile(r"(features|pictures|normalizer)-\d{6,}\b.*\.(npy|parquet)|\.[0-9a-f]{16}\.tmp|lock")

SCHEMA = pa.schema(
    {
        "path": pa.binary(),  # as the system has it: names need not be UTF-8
        "size": pa.int64(),
        "mtime_ns": pa.int64(),
        "ctime_ns": pa.int64(),
        "sha256": pa.binary(),  # of the contents
        "broken": pa.string(),  # why it could not be decoded; null if it could
    }
)
"""What is kept of a picture."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartInfo:
    """A part, as the list has it.

    Attributes:
      number: What its files are named after; no number is used twice.
      num_pictures: How many pictures have features.
      num_broken: How many could not be decoded.
      features_crc32: The checksum of the features.
      pictures_crc32: The checksum of the Parquet file.
    """

    number: int
    num_pictures: int
    num_broken: int
    features_crc32: int
    pictures_crc32: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexInfo:
    """What ``feature_index.json`` holds.

    Attributes:
      checkpoint: What identifies the network that the features are from.
      run_dir: Where that network was.
      num_features: The width d.
      dtype: What the features are stored in.
      parts: The parts, in order.
      next_number: The number of the next part.
      format: The version of this form.
    """

    checkpoint: str
    run_dir: str
    num_features: int
    dtype: Literal["float32", "float16"]
    parts: tuple[PartInfo, ...] = ()
    next_number: int = 0
    format: Literal[1] = 1


class Rows(NamedTuple):
    """Some pictures: what is kept of each, and the features of those that are not broken, in the same order."""

    pictures: pa.Table
    features: Float[np.ndarray, "pictures features"]

    @classmethod
    def joined(cls, parts: Sequence["Rows"]) -> "Rows":
        """All pictures of some rows."""
        return cls(
            pa.concat_tables([rows.pictures for rows in parts]),
            np.concatenate([rows.features for rows in parts]),
        )

    def kept(self, keep: Bool[np.ndarray, " pictures"]) -> "Rows":
        """The pictures of a mask."""
        whole = self.pictures["broken"].is_null().to_numpy(zero_copy_only=False).astype(bool)
        return Rows(self.pictures.filter(pa.array(keep)), self.features[keep[whole]])


def read_info(directory: Path) -> IndexInfo:
    """Reads the list of an index; a `RunError` if there is none, or it cannot be used."""
    if not is_index(directory):
        raise RunError(f"There is no index in {directory} (no {INDEX_LIST}); make one with pols index.")
    return read_record(IndexInfo, directory / INDEX_LIST)


def features_path(directory: Path, number: int) -> Path:
    """The file of the features of a part."""
    return directory / f"features-{number:06d}.npy"


def pictures_path(directory: Path, number: int) -> Path:
    """The file of the pictures of a part."""
    return directory / f"pictures-{number:06d}.parquet"


def read_part(directory: Path, info: IndexInfo, part: PartInfo) -> Rows:
    """Opens a part: its pictures are read and checked, its features mapped into memory.

    Raises:
      RunError: if a file of it is missing, cut or damaged.
    """
    pictures, path = read_pictures(directory, part), features_path(directory, part.number)
    shape, dtype = (part.num_pictures, info.num_features), np.dtype(info.dtype)
    with _one_sentence(path):
        features = np.load(path, mmap_mode="r" if shape[0] else None, allow_pickle=False)
        if (features.shape, features.dtype) != (shape, dtype):
            raise ValueError(
                f"it holds {features.dtype} {list(features.shape)} instead of {dtype} {list(shape)}"
            )
        return Rows(pictures, features)


def read_pictures(directory: Path, part: PartInfo) -> pa.Table:
    """Reads and checks what is kept of the pictures of a part, as `read_part` does."""
    path = pictures_path(directory, part.number)
    with _one_sentence(path):
        content = read_bytes(path)
        if zlib.crc32(content) != part.pictures_crc32:
            raise ValueError("it has changed since it was written")
        pictures = pq.read_table(pa.BufferReader(content), use_threads=False).cast(SCHEMA)
        num_whole = pictures["broken"].null_count
        if (num_whole, pictures.num_rows - num_whole) != (part.num_pictures, part.num_broken):
            raise ValueError("it has another number of pictures than the index says")
        return pictures


def check_features(directory: Path, part: PartInfo, features: np.ndarray) -> None:
    """Reads the features of a part, and raises a `RunError` if they have changed since they were written."""
    with _one_sentence(features_path(directory, part.number)):
        if crc32(features) != part.features_crc32:
            raise ValueError("it has changed since it was written")


@contextlib.contextmanager
def _one_sentence(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, pa.ArrowException) as error:
        raise RunError(
            f"{path} cannot be used: {reason_of(error)}; delete {path.parent}, and make it again with pols index."
        ) from error


def array_bytes(array: np.ndarray) -> bytes:
    """The content of an npy file."""
    content = io.BytesIO()
    np.save(content, array)
    return content.getvalue()


class IndexWriter:
    """Changes an index, one list after the other; whoever uses it holds the lock of the directory.

    Args:
      directory: The index; its list is written if there is none, or nothing is listed.
      new: What a new index says of itself.

    Raises:
      ConfigError: if the directory holds something else.
    """

    def __init__(self, directory: Path, new: IndexInfo):
        self.directory, self.info = directory, new
        if is_index(directory):
            old = read_info(directory)
            self.info = old if old.parts else new
        elif not all(map(_OWN_NAME.fullmatch, os.listdir(directory))):
            raise ConfigError(f"{directory} is no index, and not empty; name another directory with --out.")
        if self.info is new:
            write_json(directory / INDEX_LIST, encode(new))
        self._remove_leftovers()

    @property
    def rows_per_part(self) -> int:
        """How many pictures a part can have."""
        return max(64, _PART_BYTES // (self.info.num_features * np.dtype(self.info.dtype).itemsize))

    def read(self, part: PartInfo) -> Rows:
        """Reads a part that is about to be written again; its features are checked."""
        rows = read_part(self.directory, self.info, part)
        check_features(self.directory, part, rows.features)
        return rows

    def append(self, rows: Rows) -> None:
        """Adds pictures. Parts at the end that are not larger are merged with them, so that there are never many."""
        parts = list(self.info.parts)
        while parts and _size(parts[-1]) <= rows.pictures.num_rows <= self.rows_per_part - _size(parts[-1]):
            rows = Rows.joined([self.read(parts.pop()), rows])
        self._commit([*parts, self._written(rows)])

    def replace(self, part: PartInfo, rows: Rows) -> None:
        """Puts rows in the place of a part; without rows, removes it."""
        new = [self._written(rows)] if rows.pictures.num_rows else []
        self._commit([other for old in self.info.parts for other in (new if old == part else [old])])

    def _written(self, rows: Rows) -> PartInfo:
        number, features = self.info.next_number, np.ascontiguousarray(rows.features, self.info.dtype)
        table = io.BytesIO()
        pq.write_table(rows.pictures.combine_chunks(), table)
        write_bytes(features_path(self.directory, number), array_bytes(features))
        write_bytes(pictures_path(self.directory, number), table.getvalue())
        return PartInfo(
            number=number,
            num_pictures=len(features),
            num_broken=rows.pictures.num_rows - len(features),
            features_crc32=crc32(features),
            pictures_crc32=zlib.crc32(table.getvalue()),
        )

    def _commit(self, parts: Sequence[PartInfo]) -> None:
        info = dataclasses.replace(self.info, parts=tuple(parts), next_number=self.info.next_number + 1)
        write_json(self.directory / INDEX_LIST, encode(info))
        self.info = info
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """Removes the files of parts that no longer count, and what a kill left half-written."""
        kept = {f"{part.number:06d}" for part in self.info.parts}
        for name in os.listdir(self.directory):
            number = re.search(r"-(\d{6,})\b", name)
            if name != "lock" and _OWN_NAME.fullmatch(name) and not (number and number[1] in kept):
                with contextlib.suppress(OSError):
                    os.unlink(self.directory / name)


def _size(part: PartInfo) -> int:
    return part.num_pictures + part.num_broken
