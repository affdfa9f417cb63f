"""Flags: the fields of a dataclass, in groups on one help page, with one sentence for what cannot be read.

tyro makes the settings from the words. Before it, `given_flags` looks at them, because a mistyped flag or value is best
answered by a sentence with the nearest names; and `help_page` lists the flags, because two screens is what people read.
"""

import contextlib
import dataclasses
import inspect
import io
import os
import re
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from pols_jax.errors import ConfigError, unknown_name
from pols_jax.schema import TYPE_WORDS
from pols_jax.settings import check_text, check_value, flag, shown

Settings = TypeVar("Settings")

# Where the texts of the flags begin, and what a line is at most wide.
_INDENT = 28
_WIDEST = 100
# The longest name of a file, in bytes, that file systems know.
_LONGEST_NAME = 255


@dataclasses.dataclass(frozen=True)
class Page:
    """What the help page of a command says beside its flags; a group has a heading and the names of its fields."""

    command: str
    usage: str
    summary: str
    examples: str = ""
    groups: Mapping[str, str] = dataclasses.field(default_factory=dict)
    more: str = ""


def parse(
    kind: type[Settings], words: Sequence[str] | None, page: Page, *, default: Settings | None = None
) -> Settings:
    """Makes settings from the words of a command line; prints the help page and exits if that is asked for.

    The words are those of the program's own command line if None.

    Examples:
      >>> @dataclasses.dataclass
      ... class Flags:
      ...     steps: int = 1
      >>> parse(Flags, ["--steps", "3"], Page("pols walk", "[FLAGS]", "Walk."))
      Flags(steps=3)
      >>> parse(Flags, ["--stepps", "3"], Page("pols walk", "[FLAGS]", "Walk."))
      Traceback (most recent call last):
      pols_jax.errors.ConfigError: There is no flag named '--stepps'; did you mean --steps? See: pols walk --help.
    """
    words = sys.argv[1:] if words is None else words
    if "-h" in words or "--help" in words:
        print(help_page(kind, page, default))
        raise SystemExit(0)
    given_flags(kind, words, page)
    options: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            return tyro.cli(kind, args=list(words), add_help=False, **options)
    except SystemExit as exit_:
        # Where the dataclass refused a value, tyro has turned its sentence into a box, and left.
        error = exit_.__context__
        while error is not None and not isinstance(error, ConfigError):
            error = error.__context__
        usage = f"{page.command} {page.usage}"
        raise error or ConfigError(f"That is not: {usage}. See: {page.command} --help.") from None


def given_flags(kind: type, words: Sequence[str], page: Page) -> dict[str, list[str]]:
    """Lists the flags of a command line with their words, by field name; "" stands for the words before the first one.

    Raises:
      ConfigError: for a flag that does not exist, is given twice, or has words that are no value of its type.
    """
    fields = _fields(kind)
    names = {spelling: name for name, field in fields.items() for spelling in field.spellings}
    given: dict[str, list[str]] = {"": []}
    current = ""
    for word in words:
        if not re.match(r"-[^\d.in]|--", word):  # a lone dash and negative numbers are values
            given[current].append(word)
            continue
        spelling, equals, value = word.partition("=")
        spelling = "--" + spelling[2:].replace("_", "-") if spelling.startswith("--") else spelling
        if spelling not in names:
            hint = f"See: {page.command} --help."
            raise ConfigError(f"{unknown_name('flag', shown(spelling), names)} {hint}")
        current = names[spelling]
        if current in given and not fields[current].repeats:
            several = ", followed by all its values" if fields[current].is_list else ""
            raise ConfigError(f"{spelling} is given twice; give it once{several}.")
        given.setdefault(current, [])
        if equals:
            given[current].append(value)
    takes_words = any(field.is_positional for field in fields.values())
    if given[""] and not takes_words:
        raise ConfigError(
            f"{page.command} takes flags only, got {shown(given[''][0])!r}. See: {page.command} --help."
        )
    for name, values in given.items():
        if name:
            fields[name].check_words(values, takes_words=takes_words)
    return given


def help_page(kind: type, page: Page, default: Any = None) -> str:
    """Writes the help of a command.

    Examples:
      >>> @dataclasses.dataclass
      ... class Flags:
      ...     '''Walk.
      ...
      ...     Attributes:
      ...       steps: How far.
      ...     '''
      ...     steps: int = 1
      >>> print(help_page(Flags, Page("pols walk", "[FLAGS]", "Walk.", groups={"ways": "steps"})))
      usage: pols walk [FLAGS]
      <BLANKLINE>
      Walk.
      <BLANKLINE>
      ways
        --steps INT               How far. (1)
    """
    width = min(_WIDEST, max(60, shutil.get_terminal_size((_WIDEST, 24)).columns))
    fields, lines = _fields(kind, default), [f"usage: {page.command} {page.usage}", ""]
    lines += textwrap.wrap(page.summary, width)
    if page.examples:
        lines += ["", *(f"  {line}" for line in page.examples.strip().splitlines())]
    groups = {heading: names.split() for heading, names in page.groups.items()}
    listed = {name for names in groups.values() for name in names}
    groups["other"] = [name for name in fields if name not in listed]
    for heading, names in groups.items():
        there = [fields[name] for name in names if name in fields]
        if there:
            lines += ["", heading, *(line for field in there for line in field.help_lines(width))]
    return "\n".join([*lines, *(["", *textwrap.wrap(page.more, width)] if page.more else [])])


class _Field:
    """A field as a flag, or as an argument without a flag."""

    def __init__(self, name: str, annotation: Any, text: str, default: Any):
        self.name, self.annotation, self.text, self.default = name, annotation, text, default
        self.plain = _plain(annotation)
        self.is_list = typing.get_origin(self.plain) is tuple
        self.element = _plain(typing.get_args(self.plain)[0]) if self.is_list else self.plain
        options = getattr(annotation, "__metadata__", ())
        self.is_positional = tyro.conf.Positional in options
        self.repeats = tyro.conf.UseAppendAction in options
        names = [name, f"no_{name}"] if self.plain is bool else [name]
        self.spellings = [] if self.is_positional else [flag(name) for name in names]

    def check_words(self, words: list[str], *, takes_words: bool) -> None:
        """Raises unless words are values of the field's type; ranges are the dataclass's own to check."""
        name = flag(self.name)
        wanted = 0 if self.plain is bool else 1
        if not self.is_list and len(words) < wanted:
            raise ConfigError(f"{name} needs a value.")
        if (not self.is_list or self.repeats) and not takes_words and len(words) > wanted:
            kind = "one value" if wanted else "no value"
            raise ConfigError(f"{name} takes {kind}, got {shown(' '.join(words))!r}.")
        for word in words if self.is_list else words[:wanted]:
            self._check_word(name, word)

    def _check_word(self, name: str, word: str) -> None:
        arms = typing.get_args(self.annotation)
        others = [str(w) for arm in arms if typing.get_origin(arm) is Literal for w in typing.get_args(arm)]
        if word in others or (word == "None" and type(None) in arms):
            return
        check_text(name, word)
        if self.element is Path and max(map(len, os.fsencode(word).split(b"/"))) > _LONGEST_NAME:
            raise ConfigError(
                f"{name} names a file with more than {_LONGEST_NAME} bytes, got {shown(word)!r}."
            )
        if self.element not in (int, float):
            check_value(name, word, self.element)
            return
        try:
            self.element(word)
        except ValueError:
            meant = " or ".join([TYPE_WORDS[self.element], *others])
            raise ConfigError(f"{name} must be {meant}, got {shown(word)!r}.") from None

    def help_lines(self, width: int) -> list[str]:
        if self.is_positional:
            usage = self.name.removesuffix("s").upper() + "..." * self.is_list
        elif self.plain is bool:
            usage = flag(self.name) if not self.default else f"--[no-]{self.name.replace('_', '-')}"
        else:
            usage = f"{flag(self.name)} {self._metavar()}{'...' * (self.is_list and not self.repeats)}"
        lines = textwrap.wrap(f"{self.text}{self._shown_default()}", width - _INDENT) or [""]
        if len(usage) + 4 > _INDENT:
            return [f"  {usage}", *(" " * _INDENT + line for line in lines)]
        return [f"  {usage}".ljust(_INDENT) + lines[0], *(" " * _INDENT + line for line in lines[1:])]

    def _metavar(self) -> str:
        if typing.get_origin(self.element) is Literal:
            return "|".join(map(str, typing.get_args(self.element)))
        return {int: "INT", float: "X", str: "NAME", Path: "PATH"}.get(self.element, "VALUE")

    def _shown_default(self) -> str:
        if (
            self.is_positional
            or any(self.default is v for v in (None, False, dataclasses.MISSING))
            or self.default == ()
        ):
            return ""
        values = self.default if isinstance(self.default, tuple | list) else [self.default]
        return f" ({'on' if self.default is True else ' '.join(map(str, values))})"


def _fields(kind: Any, default: Any = None) -> dict[str, _Field]:
    """All fields of a dataclass and of the dataclasses in it."""
    hints, texts, found = typing.get_type_hints(kind, include_extras=True), _texts(kind), {}
    for field in dataclasses.fields(kind):
        value = field.default
        if default is not None:
            value = getattr(default, field.name)
        elif field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        plain = _plain(hints[field.name])
        if dataclasses.is_dataclass(plain):
            found |= _fields(plain, value)
        else:
            found[field.name] = _Field(field.name, hints[field.name], texts.get(field.name, ""), value)
    return found


def _texts(kind: type) -> dict[str, str]:
    """What the docstrings of a dataclass and of its bases say about their attributes."""
    texts = {}
    for base in reversed(kind.__mro__):
        section = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2]
        for name, text in re.findall(r"^  (\w+): (.*(?:\n    .*)*)", section, re.MULTILINE):
            texts[name] = " ".join(text.split())
    return texts


def _plain(annotation: Any) -> Any:
    """A type without None, words that stand for a value, and ranges."""
    kind, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if kind is Annotated:
        return _plain(arguments[0])
    if kind in (types.UnionType, typing.Union):
        # "sweep" or a list of numbers reads like the list.
        return _plain(next((a for a in arguments if typing.get_origin(a) is tuple), arguments[0]))
    return annotation
