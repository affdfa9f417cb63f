"""What a JSON or npz file may hold: dataclasses say it, and one reader checks it.

`read_record` reads a JSON file into a dataclass, `read_arrays` an npz file into arrays of stated kinds and shapes. Whatever
is wrong with a file becomes one sentence with the name of the file and of the field.
"""

import dataclasses
import functools
import io
import json
import math
import types
import typing
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from pols_jax.errors import ConfigError, PolsError, RunError, reason_of
from pols_jax.files import read_bytes, reading

__all__ = [
    "TYPE_WORDS",
    "ArrayKind",
    "decode",
    "encode",
    "json_field",
    "npz_arrays",
    "parse_json",
    "read_arrays",
    "read_json",
    "read_record",
]

T = TypeVar("T")

_MAX_INTEGER = 2**63
TYPE_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    bool: "true or false",
    type(None): "null",
    tuple: "a list",
    list: "a list",
    dict: "an object",
    Mapping: "an object",
}
"""What messages call the values of a type."""


def json_field(name: str) -> Any:
    """A field of a dataclass that has another name in JSON."""
    return dataclasses.field(metadata={"json": name})


def encode(value: Any) -> Any:
    """Turns a dataclass, and all that it holds, into what JSON can hold; `decode` reads it back."""
    if dataclasses.is_dataclass(value):
        return {name: encode(getattr(value, field.name)) for name, (field, _) in _fields(type(value)).items()}
    if isinstance(value, tuple | list):
        return [encode(entry) for entry in value]
    if isinstance(value, dict):
        return {name: encode(entry) for name, entry in value.items()}
    return value


def decode(kind: Any, value: Any, *, where: str = "") -> Any:
    """Checks a value that came from JSON, and makes a dataclass of it.

    Args:
      kind: A dataclass, or any type that JSON can hold: numbers, text, lists as ``tuple[X, ...]``, ``dict[str, X]``,
        ``Literal``, unions of them, and ``Any``.
      value: What `json.loads` gave.
      where: The name of the value, for messages.

    Raises:
      ConfigError: if a field is missing, unknown or of another type, or the dataclass refuses its values.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _decode_union(kind, value, where)
    if dataclasses.is_dataclass(kind):
        if isinstance(value, dict):
            return _decode_fields(kind, value, where)
    elif origin is Literal:
        if any(type(value) is type(known) and value == known for known in arguments):
            return value
    elif origin in (tuple, list):
        if isinstance(value, list | tuple):
            return _decode_items(kind, value, where)
    elif origin in (dict, Mapping):
        if isinstance(value, dict):
            return {
                name: decode(arguments[1], entry, where=_inside(where, name)) for name, entry in value.items()
            }
    elif kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        if math.isfinite(value):
            return float(value)
    elif type(value) is kind:
        return value
    raise ConfigError(f"{where or 'The content'} must be {_described(kind)}, got {_shortened(value)}.")


def read_json(path: str | Path, *, error: type[PolsError] = RunError) -> Any:
    """Reads a JSON file whose numbers are finite and have at most 64 bits, and whose texts are Unicode.

    Raises:
      PolsError: of the given kind, if the file is missing, not a regular file, not UTF-8, not JSON, nested too deeply, or
        holds another number or text.
    """
    with reading(path, error=error):
        return parse_json(read_bytes(path))


def parse_json(content: bytes) -> Any:
    """Reads JSON as `read_json` does; a `ValueError` for what it refuses."""
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 (byte {error.start})") from error
    try:
        value = json.loads(text, parse_int=_integer, parse_float=_number, parse_constant=_number)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error})") from error
    if "\\ud" in text.lower():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("it holds half of a surrogate pair, which is no text") from error
    return value


def read_record(kind: type[T], path: str | Path, *, error: type[PolsError] = RunError) -> T:
    """Reads a JSON file into a dataclass, or another type that `decode` knows, or raises ``error``."""
    content = read_json(path, error=error)
    try:
        return decode(kind, content)
    except ConfigError as problem:
        raise error(f"{path} cannot be used: {problem}") from problem


class ArrayKind(typing.NamedTuple):
    """What an array of an npz file has to be.

    Attributes:
      kinds: The kinds of its dtype, such as ``"iu"`` for integers; see `numpy.dtype.kind`.
      shape: Its shape: a number, or a name for a size that several arrays share.
      is_optional: Whether the file may do without it.
    """

    kinds: str
    shape: tuple[int | str, ...] = ()
    is_optional: bool = False


def read_arrays(path: str | Path, kinds: Mapping[str, ArrayKind], **sizes: int) -> dict[str, np.ndarray]:
    """Reads the arrays of an npz file, by name, or raises a `RunError` if they are not of the given kinds.

    Sizes that are not given by their names in the shapes follow from the arrays.
    """
    with reading(path):
        content = read_bytes(path)
    try:
        arrays = npz_arrays(content)
    except Exception as problem:  # whatever a damaged file makes the libraries raise
        raise RunError(f"{path} cannot be read: it is damaged ({reason_of(problem)}).") from problem
    if why := _array_problem(arrays, kinds, sizes):
        raise RunError(f"{path} cannot be used: {why}.")
    return arrays


def npz_arrays(content: bytes) -> dict[str, np.ndarray]:
    """The arrays in the content of an npz file, by name; raises whatever a damaged one makes the libraries raise."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        # Reading a member whole checks its checksum.
        return {
            name.removesuffix(".npy"): np.load(io.BytesIO(archive.read(name)), allow_pickle=False)
            for name in archive.namelist()
        }


def _array_problem(arrays: Mapping[str, Any], kinds: Mapping[str, ArrayKind], sizes: Any) -> str | None:
    """What is wrong with the arrays of a file, if anything is."""
    if unknown := [name for name in arrays if name not in kinds]:
        return f"it holds {unknown[0]!r}, which a newer version of pols_jax must have written"
    for name, kind in kinds.items():
        array = arrays.get(name)
        if array is None and kind.is_optional:
            continue
        if array is None:
            return f"{name} is missing"
        if not isinstance(array, np.ndarray) or array.dtype.kind not in kind.kinds:
            return f"{name} has the wrong type, {getattr(array, 'dtype', type(array).__name__)}"
        wanted = [sizes.get(size, size) for size in kind.shape]
        if len(wanted) != array.ndim or any(
            isinstance(size, int) and size != actual for size, actual in zip(wanted, array.shape, strict=True)
        ):
            return f"{name} has the shape {list(array.shape)} instead of [{', '.join(map(str, wanted))}]"
        sizes |= dict(zip(kind.shape, array.shape, strict=True))
    return None


@functools.cache
def _fields(kind: type) -> dict[str, tuple[dataclasses.Field, Any]]:
    """The fields of a dataclass with their types, by their names in JSON, without private ones."""
    hints = typing.get_type_hints(kind)
    return {
        field.metadata.get("json", field.name): (field, hints[field.name])
        for field in dataclasses.fields(kind)
        if not field.name.startswith("_")
    }


def _decode_fields(kind: Any, value: dict, where: str) -> Any:
    if hasattr(kind, "with_new_names"):  # what older versions wrote
        value = kind.with_new_names(value)
    fields, arguments = _fields(kind), {}
    for name in value:
        if name not in fields:
            raise ConfigError(
                f"{_inside(where, _shortened(name))} is unknown here: it was written by a newer version of pols_jax, or by "
                "something else."
            )
    for name, (field, _) in fields.items():
        if name not in value and field.default is field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{_inside(where, name)} is missing.")
    for name, entry in value.items():
        field, hint = fields[name]
        arguments[field.name] = decode(hint, entry, where=_inside(where, name))
    return kind(**arguments)


def _decode_union(kind: Any, value: Any, where: str) -> Any:
    choices = typing.get_args(kind)
    if value is None and type(None) in choices:
        return None
    choices = [choice for choice in choices if choice is not type(None)]
    for choice in choices:
        try:
            return decode(choice, value, where=where)
        except ConfigError:
            if len(choices) == 1 and isinstance(value, dict | list):
                raise  # says which part is wrong
    raise ConfigError(f"{where} must be {_described(kind)}, got {_shortened(value)}.")


def _decode_items(kind: Any, value: list | tuple, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple and arguments[-1] is not Ellipsis:
        if len(value) != len(arguments):
            raise ConfigError(f"{where} must have {len(arguments)} entries, got {len(value)}.")
        kinds = arguments
    else:
        kinds = (arguments[0],) * len(value)
    return origin(
        decode(kind, entry, where=f"{where}[{i}]")
        for i, (kind, entry) in enumerate(zip(kinds, value, strict=True))
    )


def _described(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_described, arguments))
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    return TYPE_WORDS.get(origin or kind, "an object")


def _inside(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _shortened(value: Any) -> str:
    text = repr(value) if not isinstance(value, dict | list) else TYPE_WORDS[type(value)]
    return text if len(text) <= 60 else text[:57] + "..."


def _integer(text: str) -> int:
    value = int(text) if len(text) < 30 else _MAX_INTEGER
    if abs(value) >= _MAX_INTEGER:
        raise ValueError(f"it holds the number {text[:20]}{'...' * (len(text) > 20)}, which is too large")
    return value


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"it holds the number {text}")
    return value
