"""Arrays as checkpoints store them: plain Zarr, written by every process that has a part of them, with checksums.

The arrays of the output layer, and what the optimizer keeps of them, are stored in chunks of whole rows of about a
megabyte. A chunk is one file, and has a checksum of its own: so a process can write, or read and check, the rows of some
classes and needs nothing of the others. How an array is divided depends on its shape alone, not on the devices.
"""

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import tensorstore
from jax import lax

from pols_jax.training.hosts import sum_of_hosts

# Rows are stored and checked in chunks of about this size: one class is read with one small file.
_CHUNK_BYTES = 2**20
# ... but never in more chunks than this.
_MAX_CHUNKS = 4096
# Chunks that are read or written together.
_GROUP = 8


def leaf_name(path: Any) -> str:
    """The name that a leaf of the state is stored under."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def is_of_head(name: str) -> bool:
    """Whether an array has a row per class: kernel or bias of the output layer, or what the optimizer keeps of them.

    Examples:
      >>> is_of_head("params.head.kernel"), is_of_head("params.auxiliary_head.kernel")
      (True, False)
    """
    return name.split(".")[-2:] in (["head", "kernel"], ["head", "bias"])


def chunk_rows(name: str, shape: tuple[int, ...], dtype: Any) -> int | None:
    """How many rows of an array are stored together; None for one that is stored in one piece.

    Examples:
      >>> chunk_rows("params.head.kernel", (2**20, 256), np.float32)
      1024
    """
    if not is_of_head(name) or not math.prod(shape):
        return None
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    return min(shape[0], max(1, max(_CHUNK_BYTES, num_bytes // _MAX_CHUNKS) * shape[0] // num_bytes))


def group_rows(name: str, shape: tuple[int, ...], dtype: Any) -> int:
    """How many rows of an array are read or written together."""
    return _GROUP * (chunk_rows(name, shape, dtype) or 1)


def tree_bytes(tree: Any) -> int:
    """The size of all arrays of a tree, of which the shapes and dtypes are enough."""
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def crc32(*arrays: np.ndarray) -> int:
    """The checksum of the bytes of some arrays, one after the other."""
    value = 0
    for array in arrays:
        value = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, value)
    return value


@dataclasses.dataclass(frozen=True)
class ArrayParts:
    """An array as one process writes it.

    Attributes:
      name: The name that it is stored under.
      shape: The shape of the whole array.
      dtype: Its dtype.
      parts: By their first row, the rows that this process has; each part begins where a chunk begins. A process that
        writes nothing of the array has none. Rows beyond ``shape`` are padding. A part on a device is copied to the
        host a little at a time, and must not be given to another program before it is written.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    parts: Mapping[int, np.ndarray | jax.Array]

    @classmethod
    def of_first_host(cls, name: str, array: np.ndarray) -> "ArrayParts":
        """An array that all processes have as a whole: the first one writes it."""
        return cls(name, array.shape, array.dtype, {0: array} if jax.process_index() == 0 else {})

    @property
    def chunk_rows(self) -> int | None:
        """How many rows make a chunk; None if there is only one."""
        return chunk_rows(self.name, self.shape, self.dtype)

    @property
    def is_on_device(self) -> bool:
        """Whether there is no copy of it on the host."""
        return any(isinstance(part, jax.Array) for part in self.parts.values())

    def chunks(self) -> Iterator[tuple[int, np.ndarray]]:
        """The chunks that this process has, each with its number."""
        rows = self.chunk_rows
        for first, piece in self._pieces(rows):
            yield first // (rows or 1), piece

    def _pieces(self, rows: int | None) -> Iterator[tuple[int, np.ndarray]]:
        """The parts in pieces of so many rows, each with its first row; if None, as they are."""
        for first, part in self.parts.items():
            if rows is None:
                yield first, np.asarray(part)
                continue
            end = min(first + len(part), self.shape[0])
            for start in range(first, end, rows):
                size = min(rows, end - start)
                if isinstance(part, jax.Array):
                    yield start, np.asarray(lax.dynamic_slice_in_dim(part, start - first, size))
                else:
                    yield start, part[start - first : start - first + size]

    async def write(self, directory: Any) -> None:
        """Writes the parts into a folder of the array's name."""
        if not self.parts:
            return
        rows = self.chunk_rows
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": f"{directory}/{self.name}/"},
            "metadata": {
                "compressor": {"id": "zstd", "level": 1},
                "chunks": list(self.shape if rows is None else (rows, *self.shape[1:])),
            },
        }
        store = await tensorstore.open(spec, create=True, open=True, dtype=self.dtype, shape=self.shape)
        for first, piece in self._pieces(rows and _GROUP * rows):  # a few at a time: what waits is copied
            await (store if rows is None else store[first : first + len(piece)]).write(piece)


def checksums(arrays: Mapping[str, ArrayParts]) -> dict[str, Any]:
    """The checksum of every array, on all processes, from the parts that each of them has.

    Returns:
      By name, one number; for an array in chunks ``{"rows": rows of a chunk, "crc32": a number for each chunk}``.

    Raises:
      FileNotFoundError: if no process has a part of an array.
    """
    counts = {
        name: 1 if array.chunk_rows is None else -(-array.shape[0] // array.chunk_rows)
        for name, array in arrays.items()
    }
    # One more than the checksum, and 0 for what other processes have.
    found = {name: np.zeros(count, np.int64) for name, count in counts.items()}
    for name, array in arrays.items():
        for number, chunk in array.chunks():
            found[name][number] = 1 + crc32(chunk)
    summed = sum_of_hosts(np.concatenate([*found.values(), np.zeros(0, np.int64)])) - 1
    if (summed < 0).any():
        raise FileNotFoundError("no host has a part of it")
    ends = np.cumsum([*counts.values()])[:-1]
    split = dict(zip(arrays, np.split(summed, ends), strict=True)) if arrays else {}
    return {
        name: int(split[name][0])
        if array.chunk_rows is None
        else {"rows": array.chunk_rows, "crc32": split[name].tolist()}
        for name, array in arrays.items()
    }


class StoredArray:
    """An array on disk, as tensorstore opened it, of which nothing is given out unchecked; see `checksums`."""

    def __init__(self, store: Any, checksum: Any, error: Callable[[str], Exception], *, name: str):
        self.shape, self.dtype, self.name = tuple(store.shape), store.dtype.numpy_dtype, name
        self._store, self._error = store, error
        self.chunk_rows = checksum["rows"] if isinstance(checksum, dict) else None
        self._crc32 = checksum["crc32"] if isinstance(checksum, dict) else checksum
        self._kept: tuple[int, np.ndarray] | None = None  # the chunk that was read last

    def start(self) -> None:
        """Starts to read an array that is in one piece, and returns meanwhile."""
        if self.chunk_rows is None:
            self._reading  # noqa: B018

    def read(self) -> np.ndarray:
        """Reads all of it."""
        return self._whole if self.chunk_rows is None else self.rows(0, self.shape[0])

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Reads some rows that follow each other, with the chunks that they are in."""
        if self.chunk_rows is None:
            return self._whole[start:stop]
        if (start // self.chunk_rows) == (stop - 1) // self.chunk_rows:
            first, chunk = self._chunk(start // self.chunk_rows)
            return chunk[start - first : stop - first].copy()
        rows = np.empty((stop - start, *self.shape[1:]), self.dtype)
        for first, chunk in self._chunks(start, stop):
            begin, end = max(first, start), min(first + len(chunk), stop)
            rows[begin - start : end - start] = chunk[begin - first : end - first]
        return rows

    def at(self, indices: list[int]) -> np.ndarray:
        """Reads single rows."""
        rows = np.empty((len(indices), *self.shape[1:]), self.dtype)
        for place in sorted(range(len(indices)), key=indices.__getitem__):
            rows[place] = self.rows(indices[place], indices[place] + 1)[0]
        return rows

    def check(self) -> None:
        """Reads all of it, a little at a time."""
        if self.chunk_rows is None:
            self._whole  # noqa: B018
        else:
            for _ in self._chunks(0, self.shape[0]):
                pass

    @functools.cached_property
    def _reading(self) -> Any:
        return self._store.read()

    @functools.cached_property
    def _whole(self) -> np.ndarray:
        array = np.asarray(self._reading.result())
        if crc32(array) != self._crc32:
            raise self._error(f"is damaged: {self.name} has changed")
        return array

    def _chunk(self, number: int) -> tuple[int, np.ndarray]:
        assert self.chunk_rows is not None
        if self._kept is None or self._kept[0] != number * self.chunk_rows:
            (self._kept,) = self._chunks(number * self.chunk_rows, number * self.chunk_rows + 1)
        return self._kept

    def _chunks(self, start: int, stop: int) -> Iterator[tuple[int, np.ndarray]]:
        """The chunks that some rows are in, each with its first row."""
        size = self.chunk_rows
        assert size is not None
        for group in range(start // size * size, stop, _GROUP * size):
            end = min(group + _GROUP * size, -(-stop // size) * size, self.shape[0])
            rows = np.asarray(self._store[group:end].read().result())
            for first in range(group, end, size):
                chunk = rows[first - group : first - group + size]
                if crc32(chunk) != self._crc32[first // size]:
                    last = first + len(chunk) - 1
                    raise self._error(f"is damaged: rows {first} to {last} of {self.name} have changed")
                yield first, chunk
