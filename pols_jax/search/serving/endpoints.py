"""What can be asked for: endpoints and their parameters are declared once, and read, checked and documented by that."""

import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from starlette.exceptions import HTTPException

import pols_jax
from pols_jax.errors import printable, unknown_name
from pols_jax.search.serving.answers import ErrorAnswer

_LONGEST_SHOWN = 40
_PLAIN = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter in the address of a request.

    Attributes:
      name: Its name.
      text: What it means, for the documentation.
      kind: Text, or a whole number.
      smallest: The smallest number, or the fewest characters.
      largest: The largest number, or the most characters.
      default: What it is if it is not given; it has to be given if there is none.
      place: Where in the address it stands.
    """

    name: str
    text: str
    kind: type = str
    smallest: int = 0
    largest: int = 0
    default: Any = ...
    place: str = "query"

    def read(self, text: str) -> Any:
        """Checks a value.

        Examples:
          >>> Parameter("limit", "How many hits.", int, 1, 500).read("0")
          Traceback (most recent call last):
          starlette.exceptions.HTTPException: 400: limit must be a whole number from 1 to 500, got '0'.
        """
        if self.kind is int:
            # isdecimal takes digits of every script, and int reads them; more digits than the limit has are too many.
            is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(self.largest))
            if is_number and self.smallest <= int(text) <= self.largest:
                return int(text)
            raise HTTPException(
                400,
                f"{self.name} must be a whole number from {self.smallest} to {self.largest}, got {_shown(text)}.",
            )
        if not self.smallest <= len(text) <= self.largest:
            raise HTTPException(
                400,
                f"{self.name} must have {self.smallest} to {self.largest} characters, got {len(text)}.",
            )
        return text

    def to_openapi(self) -> dict[str, Any]:
        """The parameter as OpenAPI describes it."""
        if self.kind is int:
            schema: dict[str, Any] = {"type": "integer", "minimum": self.smallest, "maximum": self.largest}
        else:
            schema = {"type": "string", "minLength": self.smallest, "maxLength": self.largest}
        required = self.default is ...
        if not required and self.default is not None:
            schema["default"] = self.default
        return {
            "name": self.name,
            "in": self.place,
            "required": required,
            "description": self.text,
            "schema": schema,
        }


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """What there is to ask for.

    Attributes:
      path: Its address.
      summary: What it does.
      parameters: What may be said in the address.
      answer: The dataclass of its answer, or the media types of a file.
      method: GET or POST; what is posted is the content of a picture's file.
      errors: The statuses that it may have beside 200, and those that every request may have.
    """

    path: str
    summary: str
    parameters: tuple[Parameter, ...] = ()
    answer: type | tuple[str, ...] = ()
    method: Literal["GET", "POST"] = "GET"
    errors: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """What comes after ``/api/``."""
        return self.path.split("/")[2].partition(".")[0]


def read_parameters(
    parameters: Sequence[Parameter], query: Sequence[tuple[str, str]], in_path: Mapping[str, str]
) -> dict[str, Any]:
    """Reads the parameters of a request.

    Raises:
      HTTPException: for one that is missing, unknown, given twice, or has a value that cannot be.
    """
    known = {parameter.name: parameter for parameter in parameters if parameter.place == "query"}
    given: dict[str, str] = {}
    for name, text in query:
        if name not in known:
            if not known:
                raise HTTPException(400, f"There are no parameters here, got {_shown(name)}.")
            raise HTTPException(400, printable(unknown_name("parameter", name[:_LONGEST_SHOWN], known)))
        if name in given:
            raise HTTPException(400, f"{name} is given twice; give it once.")
        given[name] = text
    given |= in_path
    values = {}
    for parameter in parameters:
        if parameter.name in given:
            values[parameter.name] = parameter.read(given[parameter.name])
        elif parameter.default is ...:
            raise HTTPException(400, f"{parameter.name} is missing: {parameter.text}")
        else:
            values[parameter.name] = parameter.default
    return values


def openapi_document(endpoints: Iterable[Endpoint], reasons: dict[int, str]) -> dict[str, Any]:
    """Makes the OpenAPI 3.1 document of endpoints; ``reasons`` says what the statuses of errors mean."""
    schemas: dict[str, Any] = {}
    error = schema_of(ErrorAnswer, schemas)
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        if isinstance(endpoint.answer, tuple):
            content = {media_type: {} for media_type in endpoint.answer}
        else:
            content = {"application/json": {"schema": schema_of(endpoint.answer, schemas)}}
        operation: dict[str, Any] = {
            "summary": endpoint.summary,
            "operationId": endpoint.name,
            "parameters": [parameter.to_openapi() for parameter in endpoint.parameters],
            "responses": {
                "200": {"description": "The answer.", "content": content},
                **{
                    str(status): {
                        "description": reasons[status],
                        "content": {"application/json": {"schema": error}},
                    }
                    for status in sorted({400, 503, *endpoint.errors})
                },
            },
        }
        if endpoint.method == "POST":
            body = {"image/*": {}, "application/octet-stream": {}}
            operation["requestBody"] = {"required": True, "content": body}
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "pols serve",
            "version": pols_jax.__version__,
            "description": "Asks a network about one class at a time: search, decisions and thresholds.",
        },
        "paths": paths,
        "components": {"schemas": schemas},
    }


def schema_of(kind: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of a type; dataclasses are added to ``schemas``, and referred to.

    Examples:
      >>> schema_of(tuple[float | None, ...], {})
      {'type': 'array', 'items': {'anyOf': [{'type': 'number'}, {'type': 'null'}]}}
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if kind.__name__ not in schemas:
            schemas[kind.__name__] = {}
            hints = typing.get_type_hints(kind)
            names = {field.metadata.get("json", field.name): field.name for field in dataclasses.fields(kind)}
            schemas[kind.__name__] = {
                "type": "object",
                "description": " ".join((kind.__doc__ or "").split()),
                "properties": {name: schema_of(hints[field], schemas) for name, field in names.items()},
                "required": list(names),
            }
        return {"$ref": f"#/components/schemas/{kind.__name__}"}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [schema_of(argument, schemas) for argument in arguments]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        return {"type": "array", "items": schema_of(arguments[0], schemas)}
    if origin is dict:
        return {"type": "object", "additionalProperties": schema_of(arguments[1], schemas)}
    if kind is dict:
        return {"type": "object"}
    return {"type": _PLAIN[kind]}


def _shown(text: str) -> str:
    cut = text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "..."
    return f"'{printable(cut)}'"
