"""Settings: the types of fields say which values are allowed, and `check_settings` holds every dataclass to them.

The ranges stand in the annotations (`Count`, `Rate`, ...), so that a Python caller, a command line and a file that was
read back meet the same sentence. Nothing here imports JAX: a wrong flag is found at once.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pols_jax.errors import ConfigError, unknown_name
from pols_jax.schema import TYPE_WORDS

__all__ = [
    "LOSS_NAMES",
    "NETWORK_NAMES",
    "Count",
    "Network",
    "NotNegative",
    "OneOf",
    "Positive",
    "Range",
    "WholeNotNegative",
    "check_settings",
    "check_text",
    "check_value",
    "flag",
    "shown",
]

INT32_MAX = 2**31 - 1
"""The largest number that a step, a seed or a size may have: they are 32-bit numbers on the devices."""

NETWORK_NAMES = ("mlp", "cnn", "alexnet", "vgg16", "inception_v3", "resnet50", "resnet101")
"""The keys of `pols_jax.models.MODELS`, which takes seconds to import."""

LOSS_NAMES = (
    "cross_entropy",
    "max_margin",
    "self_normalization",
    "noise_contrastive_estimation",
    "binary_cross_entropy",
    "batch_cross_entropy",
    "batch_max_margin",
)
"""The keys of `pols_jax.losses.LOSSES`, in their order, which is that of the paper's tables."""


@dataclasses.dataclass(frozen=True)
class Range:
    """The finite numbers that a field may hold; for use in ``Annotated``."""

    least: float | None = None
    most: float | None = None
    above: float | None = None

    def problem(self, value: float) -> str | None:
        """What is wrong with a number; None if nothing is."""
        if not math.isfinite(value):
            return "must be a finite number"
        if self.above is not None and not value > self.above:
            return "must be positive" if self.above == 0 else f"must be more than {self.above:,g}"
        if self.least is not None and value < self.least:
            return "must not be negative" if self.least == 0 else f"must be at least {self.least:,}"
        if self.most is not None and value > self.most:
            return f"must be at most {self.most:,}"
        return None


@dataclasses.dataclass(frozen=True)
class OneOf:
    """The names, of things of some kind, that a field may hold; for use in ``Annotated``."""

    kind: str
    names: tuple[str, ...]


Count = Annotated[int, Range(least=1, most=INT32_MAX)]
"""At least 1, in 32 bits."""

WholeNotNegative = Annotated[int, Range(least=0, most=INT32_MAX)]
"""0 or more, in 32 bits."""

Positive = Annotated[float, Range(above=0)]
"""Finite and more than 0."""

NotNegative = Annotated[float, Range(least=0)]
"""Finite and at least 0."""

Network = Annotated[str, OneOf("network", NETWORK_NAMES)]
"""The name of a network."""


def flag(name: str) -> str:
    """The command-line flag of a field."""
    return "--" + name.replace("_", "-")


def check_settings(settings: Any) -> None:
    """Raises unless every field of a dataclass holds what its annotation allows.

    Raises:
      ConfigError: for the first field that does not; the message names its flag.

    Examples:
      >>> @dataclasses.dataclass
      ... class Settings:
      ...     steps: Count = 1
      >>> check_settings(Settings(steps=0))
      Traceback (most recent call last):
      pols_jax.errors.ConfigError: --steps must be at least 1, got 0.
    """
    hints = typing.get_type_hints(type(settings), include_extras=True)
    for field in dataclasses.fields(settings):
        check_value(flag(field.name), getattr(settings, field.name), hints[field.name])


def check_value(name: str, value: Any, annotation: Any) -> None:
    """Raises a `ConfigError` that calls the value ``name``, unless the value is what an annotation allows.

    An annotation is bool, int, float, str, Path, a Literal, a tuple or a union of them, or one of them ``Annotated``
    with a `Range` or with `OneOf`. Any other type is not checked.
    """
    kind, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if kind is Annotated:
        check_value(name, value, arguments[0])
        for rule in arguments[1:]:
            if isinstance(rule, OneOf) and value not in rule.names:
                raise ConfigError(unknown_name(rule.kind, shown(value), rule.names))
            if isinstance(rule, Range) and (problem := rule.problem(value)):
                raise ConfigError(f"{name} {problem}, got {value}.")
    elif kind in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return
        check_value(name, value, _arm_for(value, arguments))
    elif kind is Literal:
        if value not in arguments:
            raise ConfigError(f"{name} must be {' or '.join(map(str, arguments))}, got {shown(value)!r}.")
    elif kind is tuple:
        if not isinstance(value, tuple | list):
            raise ConfigError(f"{name} must be a list, got {shown(value)!r}.")
        for element in value:
            check_value(name, element, arguments[0])
    elif annotation in TYPE_WORDS and not _is_a(value, annotation):
        raise ConfigError(f"{name} must be {TYPE_WORDS[annotation]}, got {shown(value)!r}.")
    elif annotation is str:
        check_text(name, value)


def shown(value: Any) -> Any:
    """A value as an error shows it: text of any length as a short one."""
    return f"{value[:57]}..." if isinstance(value, str) and len(value) > 60 else value


def _is_a(value: Any, kind: Any) -> bool:
    if kind in (int, float) and isinstance(value, bool):
        return False
    accepted = {float: int | float, Path: Path | str}.get(kind, kind)
    return isinstance(value, accepted)


def check_text(name: str, value: str) -> None:
    """Raises a `ConfigError` unless text is something that can be read and stored."""
    if not value.strip():
        raise ConfigError(f"{name} must not be empty.")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{name} must be text in UTF-8, got {shown(value)!r}.") from None


def _arm_for(value: Any, arms: Iterable[Any]) -> Any:
    """The part of a union that a value is meant for: a word for a Literal, and a list for a tuple."""
    arms = [arm for arm in arms if arm is not type(None)]
    is_word = isinstance(value, str)
    return next((arm for arm in arms if (typing.get_origin(arm) is not tuple) == is_word), arms[0])
