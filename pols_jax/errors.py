"""Every exception that a user can meet, and the sentence that names the nearest names.

The message of each is one sentence that says what is wrong and what to do. The command lines print it and exit with
``exit_code``; whatever else is raised is a defect, and keeps its traceback.
"""

import difflib
import os
import shlex
import unicodedata
from collections.abc import Iterable

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DataWarning",
    "DivergenceError",
    "FileError",
    "HostError",
    "ImageError",
    "Interrupted",
    "InterruptedRunError",
    "PolsError",
    "ProgramError",
    "RunError",
    "RunWarning",
    "WorkerError",
    "printable",
    "reason_of",
    "shell_word",
    "unknown_name",
]


class PolsError(Exception):
    """What all errors of this package have in common."""

    exit_code = 1


class ConfigError(PolsError, ValueError):
    """A setting that cannot be used; the message says which one, and what to do."""

    exit_code = 2


class RunError(ConfigError):
    """A directory that cannot be used as a trained run; the message says why, and what to do."""


class RunWarning(UserWarning):
    """Part of what a run has written cannot be used; the message says which, and what is used instead."""


class FileError(PolsError, OSError):
    """A file cannot be written; the message says which, and why."""


class DataError(PolsError, ValueError):
    """The data that was asked for cannot be had; the message says why and what to do."""

    exit_code = 2


class ImageError(DataError):
    """An image cannot be decoded; the message says which and why."""


class DataWarning(UserWarning):
    """Part of the data cannot be used; the message names and counts it."""


class CheckpointError(PolsError, RuntimeError):
    """A checkpoint cannot be read or written; the message says which one, and what is left."""


class DivergenceError(PolsError, RuntimeError):
    """The loss was no longer finite; the message says where, and what is left."""


class HostError(PolsError, RuntimeError):
    """Another host of the same training is missing, died, or was started with other settings: ``exit_code`` is 2 then."""

    def __init__(self, message: str, *, exit_code: int = 1):
        super().__init__(message)
        self.exit_code = exit_code


class ProgramError(PolsError, RuntimeError):
    """A compiled program does not do the work that it is timed for."""


class WorkerError(PolsError, RuntimeError):
    """A worker process that decodes pictures died; the message says how, and what to do."""


class InterruptedRunError(PolsError, RuntimeError):
    """The run was stopped by a signal, ``signal_number``, after a checkpoint was saved."""

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number


class Interrupted(KeyboardInterrupt):
    """A signal, ``signal_number``, asked the program to end; no error, so what handles errors should not catch it."""

    def __init__(self, signal_number: int):
        super().__init__("Stopped.")
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Returns the sentence for a name of some kind that is not known, with the nearest ones that are.

    Examples:
      >>> print(unknown_name("loss", "max_margins", ["cross_entropy", "max_margin"]))
      There is no loss named 'max_margins'; did you mean max_margin?
    """
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or known
    return f"There is no {kind} named {name!r}; did you mean {' or '.join(near)}?"


def reason_of(error: BaseException) -> str:
    """Returns what an error says, in one line of sensible length, to stand within a sentence.

    Examples:
      >>> reason_of(FileNotFoundError(2, "No such file or directory", "a.png")), reason_of(KeyError())
      ('No such file or directory', 'KeyError')
    """
    said = (isinstance(error, OSError) and error.strerror) or str(error).strip()
    return said.split("\n")[0][:300] or type(error).__name__


def printable(name: str | os.PathLike) -> str:
    r"""Returns a name as it can be shown: in one line, in valid UTF-8, and without power over a terminal.

    Control characters, marks that turn the direction of text, and bytes that are not UTF-8 become escapes.

    Examples:
      >>> printable("cat\x1b[2J\n.png"), printable(os.fsdecode(b"caf\xe9.png"))
      ('cat\\x1b[2J\\n.png', 'caf\\xe9.png')
    """
    return "".join(_escaped(character) for character in os.fsdecode(name))


def shell_word(name: str | os.PathLike) -> str:
    r"""Returns a name as a command that is shown can have it: pasted into a shell, it is that name again.

    Examples:
      >>> print(shell_word("runs/mine"), shell_word("my photos"), shell_word("it's\n"))
      runs/mine 'my photos' $'it\'s\n'
    """
    text = os.fsdecode(name)
    if printable(text) == text:
        return shlex.quote(text)
    return f"$'{printable(text.replace(chr(92), chr(92) * 2).replace(chr(39), chr(92) + chr(39)))}'"


def _escaped(character: str) -> str:
    # Joiners are part of words and of emoji.
    if unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp") or character in "\u200c\u200d":
        return character
    if "\udc80" <= character <= "\udcff":  # how Python keeps a byte of a name that is not UTF-8
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()
