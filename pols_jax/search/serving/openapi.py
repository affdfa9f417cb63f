"""The OpenAPI document of the server, made from what the endpoints and their answers declare."""

import dataclasses
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal

import pols_jax
from pols_jax.search.serving.answers import ErrorAnswer
from pols_jax.search.serving.parameters import Parameter

_PLAIN = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}


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
            "operationId": endpoint.path.split("/")[2].partition(".")[0],
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
