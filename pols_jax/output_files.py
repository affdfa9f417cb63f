"""Files that a script writes at the end: checked at the beginning, so that no work is lost on a mistyped path."""

import os
from pathlib import Path

from pols_jax.config import ConfigError


def check_writable(*paths: Path | None) -> None:
    """Raises unless every file can be written.

    Args:
      *paths: Files; None for one that is not wanted.

    Raises:
      ConfigError: if a file is a directory, its directory does not exist, or it cannot be written.

    Examples:
      >>> check_writable(Path("no/such/directory/table.md"))
      Traceback (most recent call last):
      pols_jax.config.ConfigError: no/such/directory/table.md cannot be written: no/such/directory is not a directory.
    """
    for path in paths:
        if path is None:
            continue
        if not path.parent.is_dir():
            raise ConfigError(f"{path} cannot be written: {path.parent} is not a directory.")
        if path.is_dir():
            raise ConfigError(f"{path} cannot be written: it is a directory.")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError(f"{path} cannot be written: permission denied.")


def make_directory(path: Path | None) -> None:
    """Creates a directory for output, if one is wanted.

    Raises:
      ConfigError: if it cannot be created or written to.
    """
    if path is None:
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"The directory {path} cannot be created ({error.strerror}).") from error
    if not os.access(path, os.W_OK):
        raise ConfigError(f"The directory {path} cannot be written to.")


def write_text(path: Path | None, text: str) -> None:
    """Writes a file, if one is wanted."""
    if path is not None:
        path.write_text(text, encoding="utf-8")
