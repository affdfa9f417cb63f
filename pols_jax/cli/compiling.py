"""Compiled programs are kept in the user's cache directory, so that the next start need not compile them again.

JAX does the work; this says where, and how much. Whatever is wrong with the directory costs time, never a run: a program
that cannot be read or written there is compiled as if there were no cache.
"""

import contextlib
import os
import warnings
from pathlib import Path

from pols_jax.data.array_cache import user_cache_dir

# What is kept, in bytes; programs that were not used for the longest time go first.
_MAX_BYTES = 2**30
# To read a small program from the disk takes about as long as to compile it.
_MIN_SECONDS = 0.02


def keep_compiled_programs() -> None:
    """Turns JAX's compilation cache on, in a place of our own.

    Nothing is changed if there is a cache already, as with ``JAX_COMPILATION_CACHE_DIR``, or if
    ``JAX_ENABLE_COMPILATION_CACHE`` turns it off.
    """
    import jax  # here, because flags are read without it

    settings = jax.config.values
    if settings["jax_compilation_cache_dir"] or not settings["jax_enable_compilation_cache"]:
        return
    directory = user_cache_dir() / "compiled"
    try:
        directory.mkdir(
            parents=True, exist_ok=True, mode=0o700
        )  # whoever writes there runs code as this user
        prune(directory, _MAX_BYTES)
    except OSError:
        return
    # JAX warns of every program that it cannot read or write there.
    warnings.filterwarnings("ignore", message=".*persistent compilation cache")
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_SECONDS)


def prune(directory: Path, max_bytes: int) -> None:
    """Deletes files of a directory, those first that were not used for the longest time, until the others fit.

    JAX can do so itself, but locks the directory for every program that it reads. Files without content, which a crash
    of the machine leaves, are deleted in any case: JAX would neither use nor replace them.

    Examples:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     for age, name in enumerate(("new", "old")):
      ...         (Path(folder) / name).write_bytes(bytes(10))
      ...         os.utime(Path(folder) / name, (1e9 - age, 1e9 - age))
      ...     prune(Path(folder), max_bytes=15)
      ...     os.listdir(folder)
      10
      10
      ['new']
    """
    with os.scandir(directory) as entries:
        files = [(entry, entry.stat(follow_symlinks=False)) for entry in entries if entry.is_file()]
    total = 0
    for entry, stat in sorted(files, key=lambda file: max(file[1].st_atime, file[1].st_mtime), reverse=True):
        total += stat.st_size
        if total > max_bytes or not stat.st_size:
            with contextlib.suppress(OSError):  # another process was faster, or it is not ours to delete
                os.unlink(entry.path)
