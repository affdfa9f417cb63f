"""What the commands share: errors in one sentence, the exit codes, and what is said while one waits."""

import atexit
import contextlib
import dataclasses
import errno
import gc
import io
import logging
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator

from pols_jax.errors import DataWarning, Interrupted, PolsError, RunWarning, printable
from pols_jax.signals import raised_signals

# Nobody searches for garbage in a program that ends: that would take a third of a second.
atexit.register(gc.freeze)

# What the system refuses, whatever the program does.
_SYSTEM_ERRORS = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO),
    *(errno.EMFILE, errno.ENFILE, errno.ENAMETOOLONG, errno.ELOOP, errno.ESTALE),
}


def run(main: Callable[[], int | None]) -> int:
    """Calls the main function of a command and turns what it raises into one sentence and an exit code.

    Returns:
      0 when done, 2 for wrong input, 130, 143 and 129 after Ctrl-C, SIGTERM and SIGHUP, 1 for an error that was
      foreseen. Any other exception is a defect and keeps its traceback.
    """
    # Orbax says through absl's log how long it waited, and more; what matters is raised.
    logging.getLogger("absl").setLevel(logging.ERROR)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A file name that cannot be printed is shown with escapes, as standard error does.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with raised_signals(), _plain_warnings():
            return main() or 0
    except (PolsError, Interrupted) as error:
        return _fail(error, error.exit_code)
    except KeyboardInterrupt:
        return _fail("Stopped.", 128 + signal.SIGINT)
    except BrokenPipeError:  # the reader of our output has gone, as in `pols search ... | head`
        sys.stderr.close()
        return 128 + signal.SIGPIPE
    except MemoryError as error:
        return _fail(_out_of_memory(error), 1)
    except OSError as error:
        if error.errno not in _SYSTEM_ERRORS:
            raise
        return _fail(f"{error.strerror}: {error.filename}." if error.filename else f"{error.strerror}.", 1)
    except RuntimeError as error:  # what XLA raises when a device has no memory left
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _fail(_out_of_memory(error), 1)


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Shows the package's own warnings as the sentences that they are, without a file and a line of the package."""
    shown = warnings.showwarning

    def show(message, category, *place) -> None:
        if issubclass(category, DataWarning | RunWarning):
            print(f"Warning: {message}", file=sys.stderr, flush=True)
        else:
            shown(message, category, *place)

    with warnings.catch_warnings():  # which brings back what was there before
        warnings.showwarning = show
        yield


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostFlags:
    """The flags of a command that several hosts run together.

    Attributes:
      coordinator: HOST:PORT of the first host; TPU pods and SLURM know it.
      num_processes: How many hosts there are.
      process_id: Which one this is, from 0.
      host_timeout: How many seconds to wait for another host.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    host_timeout: float = 600.0

    def joined(self) -> contextlib.AbstractContextManager[None]:
        """Waits until all hosts are there, and in the end until all are done."""
        from pols_jax.training.hosts import joined

        return joined(
            coordinator=self.coordinator,
            num_processes=self.num_processes,
            process_id=self.process_id,
            timeout=self.host_timeout,
        )


def announce(text: str) -> None:
    """Says on a terminal what is being done; standard output is for results, and a file needs no such lines."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def draws_bars(*, quiet: bool) -> bool:
    """Whether bars of progress are drawn: on a terminal, beside results that may go elsewhere."""
    return sys.stderr.isatty() and not quiet


def listed_paths() -> Iterable[str]:
    """The lines of standard input, as they arrive; file names need not be UTF-8, and may hold a carriage return."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape", newline="\n")
    return sys.stdin or ()


def _out_of_memory(error: Exception) -> str:
    first = str(error).partition("\n")[0]
    return f"There is not enough memory ({first or 'no more could be had'}); try a smaller batch, or fewer classes."


def _fail(message: object, code: int) -> int:
    # Names in it come from the disk: they must not be able to control the terminal.
    with contextlib.suppress(BrokenPipeError):
        print(printable(str(message)), file=sys.stderr)
    return code
