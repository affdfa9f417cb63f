"""Arrays that are expensive to make, kept on disk as .npy files.

An entry is a directory that appears under its final name in one rename, when every file in it is complete:
a reader finds all of it or nothing.  A cache that cannot be written costs time, never a run.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]


def user_cache_dir() -> Path:
    """The user's cache directory for this library: $XDG_CACHE_HOME/pols_jax, or ~/.cache/pols_jax.

    >>> user_cache_dir().name
    'pols_jax'
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pols_jax"


def fingerprint(settings: Any) -> str:
    """A short hash of JSON-able settings, to name a cache entry by.

    >>> fingerprint({"size": 32}) == fingerprint({"size": 28})
    False
    """
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:24]


def content_hash(arrays: Sequence[np.ndarray]) -> str:
    """SHA-256 of the shapes, types and bytes of arrays.

    >>> content_hash([np.zeros(3)]) == content_hash([np.zeros(4)])
    False
    """
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def cached_arrays(name: str, make: Callable[[], Arrays], directories: Sequence[Path]) -> Arrays:
    """Read the arrays called `name` from the first directory that has them, or make and store them.

    Args:
        name: Name of the entry; must change whenever the arrays would.
        make: Makes the arrays by name.
        directories: Where to look, and where to store, in order of preference; ones that cannot be written
            are passed over.

    Returns:
        Arrays by name.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     first = cached_arrays("ones", lambda: {"x": np.ones(2)}, [Path(folder)])
    ...     second = cached_arrays("ones", lambda: {"x": np.zeros(2)}, [Path(folder)])
    >>> second["x"]
    array([1., 1.])
    """
    for directory in directories:
        with contextlib.suppress(OSError, ValueError, EOFError):  # absent, or damaged after it was written
            return _read(directory / name)
    arrays = make()
    for directory in directories:
        with contextlib.suppress(OSError):
            _write(directory / name, arrays)
            break
    return arrays


def _read(entry: Path) -> Arrays:
    names = json.loads((entry / "arrays.json").read_text())
    return {name: np.load(entry / f"{name}.npy", allow_pickle=False) for name in names}


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
        (unfinished / "arrays.json").write_text(json.dumps(sorted(arrays)))
        if entry.exists():  # damaged, or else it would have been read; or another process was faster
            shutil.rmtree(entry, ignore_errors=True)
        unfinished.rename(entry)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
