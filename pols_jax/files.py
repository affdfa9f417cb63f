"""Files: checked before the work, read only if they are regular, and written at once or not at all.

`write_bytes` is the one writer of the package. A regular file is replaced by a complete new one, so that a reader, or a
kill at any moment, meets the old content or the new one. A symbolic link stays, and its target is replaced. What is not a
regular file, such as a device or a pipe, is written to and never replaced.
"""

import contextlib
import errno
import io
import json
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.filesize import decimal

from pols_jax.errors import ConfigError, FileError, PolsError, RunError, reason_of

__all__ = [
    "check_directory",
    "check_new",
    "check_space",
    "check_writable",
    "finite",
    "make_directory",
    "new_directory",
    "read_bytes",
    "reading",
    "write_arrays",
    "write_bytes",
    "write_json",
    "write_text",
]

# What is read of a file even if it says that it is shorter.
_MOST_AT_ONCE = 2**30
# As many links in a row as Linux follows.
_MAX_LINKS = 40
# A file in a directory that takes no other files, or that is mounted on its own, cannot be replaced, only overwritten.
_NO_ROOM_BESIDE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)


def check_writable(*paths: str | Path | None) -> None:
    """Raises a `ConfigError` unless every file can be written, and is named once. Writes nothing.

    Examples:
      >>> check_writable(Path("no/such/directory/table.md"))
      Traceback (most recent call last):
      pols_jax.errors.ConfigError: no/such/directory/table.md cannot be written: no/such/directory is not a directory.
    """
    targets: set[Path] = set()
    for path in paths:
        if path is None:
            continue
        if why := _why_not_writable(Path(path)):
            raise ConfigError(f"{path} cannot be written: {why}.")
        target = _replaceable(Path(path))
        if target in targets:
            raise ConfigError(f"{path} is to be written twice; name a file of its own for each.")
        if target is not None:  # a device takes everything
            targets.add(target)


def check_directory(path: str | Path | None) -> None:
    """Raises unless files can be written into a directory, which need not exist yet. Creates nothing."""
    if path is None:
        return
    existing = Path(path).absolute()
    try:
        while not os.path.lexists(existing):
            existing = existing.parent
        why = _why_no_new_file(existing) if existing.is_dir() else f"{existing} is not a directory"
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be written to: {reason_of(error)}.") from error
    if why:
        raise ConfigError(f"{path} cannot be written to: {why}.")


def check_space(directory: str | Path, num_bytes: int) -> None:
    """Raises unless the disk of a directory has room. The directory need not exist yet.

    Examples:
      >>> check_space("runs", 10**18)  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      pols_jax.errors.ConfigError: runs needs 1.0 EB, and its disk has ... left; free some space, or name another ...
    """
    existing = Path(directory).absolute()
    while not existing.exists():
        existing = existing.parent
    disk = os.statvfs(existing)
    free = disk.f_bavail * disk.f_frsize
    if free < num_bytes:
        raise ConfigError(
            f"{directory} needs {decimal(num_bytes)}, and its disk has {decimal(free)} left; free some space, or name "
            "another directory."
        )


def make_directory(path: str | Path | None) -> None:
    """Creates a directory for output, if one is wanted."""
    if path is None:
        return
    check_directory(path)
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"The directory {path} cannot be created ({reason_of(error)}).") from error


def check_new(directory: str | Path) -> None:
    """Raises a `ConfigError` unless there is nothing in the place of a directory, and it can be made."""
    if os.path.lexists(directory):
        raise ConfigError(f"{directory} exists already; name another directory with --out, or move it away.")
    check_directory(directory)


@contextlib.contextmanager
def new_directory(path: str | Path) -> Iterator[Path]:
    """Makes a directory at once or not at all: what is written into the one that it gives, or nothing.

    Examples:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     with new_directory(f"{folder}/new") as beside:
      ...         write_text(beside / "notes.txt", "all of it")
      ...         early = os.path.exists(f"{folder}/new")
      ...     early, os.listdir(f"{folder}/new")
      (False, ['notes.txt'])
    """
    check_new(path)
    path = Path(path).absolute()
    make_directory(path.parent)
    beside = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        beside.mkdir()
        yield beside
        check_new(path)
        os.rename(beside, path)
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"{path} could not be written ({reason_of(error)}).") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def read_bytes(path: str | Path, *, max_bytes: int = 2**30) -> bytes:
    """Reads a regular file, and nothing that could block or never end: no pipe, device, socket or directory.

    Raises:
      OSError: if it cannot be read; ``strerror`` says why.

    Examples:
      >>> read_bytes("/dev/zero")
      Traceback (most recent call last):
      OSError: [Errno 22] it is a device, not a regular file: '/dev/zero'
    """
    try:
        _check_regular(os.stat(path), path)  # before it is opened: opening a device can have effects
        # Opened without waiting and checked once more: the name may stand for something else by now.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except ValueError as error:  # no system call takes such a name
        raise OSError(errno.EINVAL, f"it is not a file name ({error})") from error
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        _check_regular(status, path)
        # Python takes the memory before it reads; and a file, as those of /proc, may be longer than it says.
        data = file.read(min(max_bytes, max(status.st_size, _MOST_AT_ONCE)) + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {max_bytes} bytes", str(path))
    return data


@contextlib.contextmanager
def reading(path: str | Path, *, error: type[PolsError] = RunError) -> Iterator[None]:
    """Within it, a file that cannot be read, or that is not what it should be, is an ``error`` in one sentence."""
    try:
        yield
    except (OSError, ValueError) as problem:
        raise error(f"{path} cannot be read: {reason_of(problem)}.") from problem


def write_bytes(path: str | Path | None, content: bytes) -> None:
    """Writes a file at once or not at all, if one is wanted; its directory has to exist.

    Through a symbolic link the target is replaced, and the link stays. The permissions of a file that exists stay as
    well. What is not a regular file is written to, not replaced.

    Raises:
      FileError: if it cannot be written; a regular file is then what it was before.
    """
    if path is None:
        return
    try:
        target = _replaceable(Path(path))
        if target is None:
            _write_through(path, content)
        else:
            _replace(target, content)
    except BrokenPipeError:  # the reader has gone: no fault of the file
        raise
    except (OSError, ValueError) as error:
        raise FileError(f"{path} could not be written ({reason_of(error)}).") from error


def write_text(path: str | Path | None, text: str) -> None:
    r"""Writes a text file as `write_bytes` does, in UTF-8; what UTF-8 cannot hold is written as an escape."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_json(path: str | Path | None, content: Any) -> None:
    """Writes a JSON file as `write_text` does, whose escapes are those of JSON. Numbers that are not finite become null."""
    write_text(path, json.dumps(finite(content), indent=1, ensure_ascii=False) + "\n")


def write_arrays(path: str | Path, arrays: Mapping[str, Any]) -> None:
    """Writes an npz file as `write_bytes` does."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    write_bytes(path, buffer.getvalue())


def _check_regular(status: os.stat_result, path: str | Path) -> None:
    kinds = {
        stat.S_IFDIR: "directory",
        stat.S_IFIFO: "named pipe",
        stat.S_IFCHR: "device",
        stat.S_IFBLK: "device",
        stat.S_IFSOCK: "socket",
    }
    if kind := kinds.get(stat.S_IFMT(status.st_mode)):
        raise OSError(errno.EINVAL, f"it is a {kind}, not a regular file", str(path))


def _replaceable(path: Path) -> Path | None:
    """The regular file behind all links, existing or not; None for what has to be written through."""
    for _ in range(_MAX_LINKS):
        path = path.parent.resolve() / path.name
        # An open file, as /dev/stdout is: whoever opened it goes on writing to it.
        if path.is_relative_to("/proc"):
            return None
        if not path.is_symlink():
            break
        path = path.parent / path.readlink()
    else:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return path
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a directory")
    return path if stat.S_ISREG(mode) else None


def _replace(target: Path, content: bytes) -> None:
    old = target.stat() if target.exists() else None
    if old is not None and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                if old is not None:
                    _keep_owner_and_mode(descriptor, old)
                os.fsync(descriptor)
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        if old is None or error.errno not in _NO_ROOM_BESIDE:
            raise
        target.write_bytes(content)
        return
    with contextlib.suppress(OSError):  # some file systems cannot; the content is safe already
        _sync_directory(target.parent)


def _keep_owner_and_mode(descriptor: int, old: os.stat_result) -> None:
    new = os.fstat(descriptor)
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        with contextlib.suppress(OSError):  # only root may give files away
            os.fchown(descriptor, old.st_uid, old.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(old.st_mode))


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_through(path: str | Path, content: bytes) -> None:
    """Writes to a device, a pipe or an open file."""
    place = os.stat(path)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(number), place):
                # Not opened a second time: what is printed and what is written share one position in the file.
                stream.flush()
                descriptor = os.dup(number)
                break
    else:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    with open(descriptor, "wb") as file:
        file.write(content)


def _why_not_writable(path: Path) -> str | None:
    try:
        target = _replaceable(path)
        if target is None:
            return None if os.access(path, os.W_OK) else "permission denied"
        if not target.parent.is_dir():
            return f"{path.parent if target.parent == path.parent.resolve() else target.parent} is not a directory"
        if target.exists():
            return None if os.access(target, os.W_OK) else "permission denied"
        return _why_no_new_file(target.parent)
    except (OSError, ValueError) as error:
        return reason_of(error)


def _why_no_new_file(directory: Path) -> str | None:
    disk = os.statvfs(directory)
    if disk.f_flag & os.ST_RDONLY:
        return "the file system is read-only"
    if not os.access(directory, os.W_OK | os.X_OK):
        return "permission denied"
    if disk.f_blocks and not disk.f_bavail:
        return "the disk is full"
    return None


def finite(content: Any) -> Any:
    """The same with None in the place of numbers that are not finite: JSON has none."""
    if isinstance(content, Mapping):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not np.isfinite(content) else content
