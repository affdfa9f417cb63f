"""Directories that runs are written to: one process at a time, and a new one for every start.

The lock is a file ``lock`` that whoever trains holds with `fcntl.flock`. The system lets go of it when the process ends,
however it ends, so what a killed process leaves is no obstacle. Who only reads takes no lock.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from pols_jax.errors import ConfigError, RunError
from pols_jax.files import make_directory
from pols_jax.schema import parse_json
from pols_jax.training.hosts import from_first_host

_NAME = "lock"
# Somebody who looks whether a directory is in use holds its lock for a moment.
_PATIENCE_SECONDS = 0.5
# File systems that know no locks say one of these.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)

# What this process holds: the thread that took it, and its open file.
_held: dict[Path, tuple[int, int]] = {}


def _let_go_in_child() -> None:
    """A forked child shares the open files; it must not keep the lock of a parent that was killed."""
    for _, descriptor in _held.values():
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_child)


@contextlib.contextmanager
def locked(run_dir: str | Path, *, flag: str = "--run-dir") -> Iterator[None]:
    """Keeps other processes from writing into a directory, which is created if it does not exist.

    Of several hosts only the first one takes the lock. Whoever holds it may take it again. Messages name ``flag``.

    Raises:
      RunError: if another process, or another thread of this one, works there; nothing is touched then.
      ConfigError: if the directory cannot be created or written to.
    """
    if jax.process_index() > 0:
        yield
        return
    try:
        Path(run_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{flag} {run_dir} cannot be created ({error.strerror}); name another.") from error
    place = Path(run_dir).resolve()
    if _held.get(place, (None,))[0] == threading.get_ident():
        yield
        return
    descriptor = _take(Path(run_dir), flag)
    _held[place] = threading.get_ident(), descriptor
    try:
        yield
    finally:
        del _held[place]
        with contextlib.suppress(OSError):  # the directory may be gone
            # Still locked: whoever waits for it sees that it is gone, and makes a new one.
            (place / _NAME).unlink()
        os.close(descriptor)


def check_unlocked(run_dir: str | Path) -> None:
    """Raises a `RunError` if another process, or another thread of this one, trains in a directory. Writes nothing."""
    path = Path(run_dir) / _NAME
    thread, held = _held.get(Path(run_dir).resolve(), (None, -1))
    if jax.process_index() > 0 or thread == threading.get_ident():
        return
    if thread is not None:  # not opened again: on NFS, closing any file of a process lets go of its lock
        raise RunError(_in_use(run_dir, held))
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # nobody has locked it, or who locks it is told
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise RunError(_in_use(run_dir, descriptor)) from error
    except OSError:
        pass
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def run_directory(given: str | Path | None, *, name: str, root: str | Path = "runs") -> Iterator[Path]:
    """Finds the directory for what is written: the given one, or a new one that nobody else gets.

    A new one is called ``name``, the time, and a number where another start was as fast. It is the same on all hosts, and
    is removed again if it is still empty at the end.
    """
    if given is not None:
        yield Path(given)
        return
    root = Path(root)
    is_new_root = not root.exists()
    run_dir = root / from_first_host(_new_folder(root, name) if jax.process_index() == 0 else "")
    try:
        yield run_dir
    finally:
        if jax.process_index() == 0:
            for folder in (run_dir, root) if is_new_root else (run_dir,):
                with contextlib.suppress(OSError):  # it is not empty
                    folder.rmdir()


def _new_folder(root: Path, name: str) -> str:
    make_directory(root)
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1, 1000):
        folder = stem if number == 1 else f"{stem}-{number}"
        try:
            (root / folder).mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"{root / folder} cannot be created ({error.strerror}).") from error
        return folder
    raise ConfigError(f"{root} holds too many directories named {stem}; name one with --run-dir.")


def _take(run_dir: Path, flag: str) -> int:
    """Locks the file, and writes into it who does."""
    path, deadline = run_dir / _NAME, time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(
                f"{flag} {run_dir} cannot be written to ({error.strerror}); name another."
            ) from error
        try:
            if _try_lock(run_dir, descriptor) and _is_still(path, descriptor):
                break
            if time.monotonic() > deadline:
                raise RunError(_in_use(run_dir, descriptor, flag))
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        time.sleep(0.02)
    with contextlib.suppress(OSError):  # a full disk: the lock holds without a name in it
        os.ftruncate(descriptor, 0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
        os.pwrite(descriptor, json.dumps(owner).encode(), 0)
    return descriptor


def _try_lock(run_dir: Path, descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise ConfigError(f"{run_dir / _NAME} cannot be locked ({error.strerror}).") from error
        # All that is left is to ask whether the one who wrote the file still runs.
        owner = _owner(descriptor)
        return not (owner.get("host") == socket.gethostname() and _is_running(owner.get("pid")))
    return True


def _is_still(path: Path, descriptor: int) -> bool:
    """Whether the file was not removed by whoever held it before."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False


def _is_running(pid: object) -> bool:
    if not isinstance(pid, int) or pid <= 0 or pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # it is somebody else's, or cannot be asked about
        pass
    return True


def _owner(descriptor: int) -> dict:
    try:
        owner = parse_json(os.pread(descriptor, 4096, 0))
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _in_use(run_dir: str | Path, descriptor: int, flag: str = "--run-dir") -> str:
    owner, does = _owner(descriptor), "trains" if flag == "--run-dir" else "writes"
    if isinstance(owner.get("pid"), int) and isinstance(owner.get("host"), str):
        who = f"Process {owner['pid']} on {owner['host']!r:.100} {does}"
    else:
        who = f"Another process {does}"
    return f"{who} in {run_dir}; wait until it has ended, or name another {flag}."
