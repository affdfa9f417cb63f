"""Arrays that are expensive to make, kept on disk as .npy files.

An entry is a directory that appears under its final name in one rename, when every file in it is complete: a reader
finds all of it or nothing, and checksums tell whether it is still what was written. A cache that cannot be written, or
that is damaged, costs time, never a run.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]


def user_cache_dir() -> Path:
    """Returns the user's cache directory for this library: $XDG_CACHE_HOME/pols_jax, or ~/.cache/pols_jax.

    Examples:
      >>> user_cache_dir().name
      'pols_jax'
    """
    home = os.path.expanduser("~")
    if home == "~":  # a user without a home: nothing can be written there, so nothing is cached
        home = os.devnull
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")) / "pols_jax"


def fingerprint(settings: Any) -> str:
    """Returns a short hash of JSON-able settings, to name a cache entry by.

    Examples:
      >>> fingerprint({"size": 32}) == fingerprint({"size": 28})
      False
    """
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:24]


def content_hash(arrays: Sequence[np.ndarray]) -> str:
    """Returns the SHA-256 of the shapes, types and bytes of arrays.

    Examples:
      >>> content_hash([np.zeros(3)]) == content_hash([np.zeros(4)])
      False
    """
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def cached_arrays(name: str, make: Callable[[], Arrays], directories: Sequence[Path]) -> Arrays:
    """Reads the arrays called `name` from the first directory that has them, or makes and stores them.

    The name must change whenever the arrays would. Directories that cannot be written to are passed over.

    Examples:
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     first = cached_arrays("ones", lambda: {"x": np.ones(2)}, [Path(folder)])
      ...     second = cached_arrays("ones", lambda: {"x": np.zeros(2)}, [Path(folder)])
      >>> second["x"]
      array([1., 1.])
    """
    arrays = read_arrays(name, directories)
    if arrays is None:
        arrays = make()
        write_arrays(name, arrays, directories)
    return arrays


def read_arrays(name: str, directories: Sequence[Path]) -> Arrays | None:
    """Reads the arrays called `name` from the first directory that has them intact; None if there is none.

    Examples:
      >>> read_arrays("ones", [Path("no/such/directory")]) is None
      True
    """
    for directory in directories:
        # Absent; or damaged after it was written, and then NumPy raises whatever it stumbles over.
        with contextlib.suppress(Exception):
            return _read(directory / name)
    return None


def write_arrays(name: str, arrays: Arrays, directories: Sequence[Path]) -> None:
    """Stores arrays in the first directory that can be written, instead of what is there under that name.

    Examples:
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     write_arrays("ones", {"x": np.ones(2)}, [Path(folder)])
      ...     read_arrays("ones", [Path(folder)])
      {'x': array([1., 1.])}
    """
    for directory in directories:
        with contextlib.suppress(OSError):
            _write(directory / name, arrays)
            break


def _read(entry: Path) -> Arrays:
    checksums = json.loads((entry / "arrays.json").read_text())
    arrays = {name: np.load(entry / f"{name}.npy", allow_pickle=False) for name in checksums}
    if {name: _checksum(array) for name, array in arrays.items()} != checksums:
        raise ValueError(f"{entry} is damaged")
    return arrays


def _checksum(array: np.ndarray) -> int:
    return zlib.crc32(
        np.ascontiguousarray(array).data, zlib.crc32(f"{array.dtype.str}{array.shape}".encode())
    )


def _write(entry: Path, arrays: Arrays) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{entry.name}.", dir=entry.parent))
    try:
        unfinished.chmod(0o755)  # mkdtemp makes it private; others may read the data, so they may read this
        for name, array in arrays.items():
            with (unfinished / f"{name}.npy").open("wb") as file:
                np.save(file, array, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        checksums = {name: _checksum(array) for name, array in sorted(arrays.items())}
        (unfinished / "arrays.json").write_text(json.dumps(checksums))
        if entry.exists():  # older or damaged; or another process was faster
            shutil.rmtree(entry, ignore_errors=True)
        unfinished.rename(entry)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
