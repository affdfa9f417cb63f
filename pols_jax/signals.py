"""Ctrl-C, SIGTERM and SIGHUP, in one place: work is saved, and nothing new begins.

A program runs inside of `raised_signals`: a signal ends it by an exception, so that what it has is written and its exit
code tells of the signal. Work that is to be saved first runs inside of `noted_signals`, and looks now and then. A second
signal ends the program at once, whatever it is doing.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pols_jax.errors import Interrupted, InterruptedRunError

__all__ = ["Noted", "noted_signals", "raised_signals"]

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Noted:
    """The first signal that was heard; 0 as long as there was none."""

    number: int = 0


# Set as long as signals are noted: who notes them further in shares what was heard.
_noted: Noted | None = None


@contextmanager
def noted_signals() -> Iterator[Noted]:
    """Within it a signal is noted, and nothing else happens; the work looks at ``number`` and raises when it is ready.

    Contexts within one another are one. Outside of the main thread nothing is noted: there, whoever runs the threads
    handles signals.

    Raises:
      InterruptedRunError: at the end, if a signal was noted and the work ended without an error of its own.
    """
    global _noted
    if _noted is not None:
        yield _noted
        return
    noted = Noted()

    def note(number: int, frame: Any) -> None:
        if not noted.number:
            noted.number = number
            return
        before = previous[number]
        if callable(before):
            before(number, frame)
        elif before != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    with _handled_by(note) as previous:
        _noted = noted
        try:
            yield noted
        finally:
            _noted = None
    if noted.number:
        raise InterruptedRunError("Stopped, after everything was saved.", noted.number)


@contextmanager
def raised_signals() -> Iterator[None]:
    """Within it a signal raises `Interrupted` in the main thread, and a second one ends the program at once."""
    is_stopping = False

    def stop(number: int, _: Any) -> None:
        nonlocal is_stopping
        if is_stopping or (_noted is not None and _noted.number):
            _end_at_once(number)
        is_stopping = True
        raise Interrupted(number)

    with _handled_by(stop):
        yield


@contextmanager
def _handled_by(handler: Callable[[int, Any], None]) -> Iterator[dict[int, Any]]:
    """Within it signals go to a handler; gives the handlers that were there before."""
    previous = {}
    for number in _NUMBERS:
        before = signal.getsignal(number)
        # Under nohup a program is to go on when its terminal closes.
        if number == signal.SIGHUP and before == signal.SIG_IGN:
            continue
        try:
            signal.signal(number, handler)
        except ValueError:  # not in the main thread
            break
        previous[number] = before
    try:
        yield previous
    finally:
        for number, before in previous.items():
            # None is a handler that was not installed from Python, and cannot be from here.
            signal.signal(number, signal.SIG_DFL if before is None else before)


def _end_at_once(number: int) -> None:
    """Ends without waiting for threads; what is being written is left as after a crash, which every reader can bear."""
    show_cursor = b"\x1b[?25h" if os.isatty(2) else b""  # a progress line may have hidden it
    os.write(2, show_cursor + b"Stopped at once.\n")
    os._exit(128 + number)
