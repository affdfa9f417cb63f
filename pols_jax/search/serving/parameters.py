"""What a request may say: each parameter is declared once, and is read, checked and documented by its declaration."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from pols_jax.errors import printable, unknown_name

_LONGEST_SHOWN = 40


class RequestError(Exception):
    """A request that cannot be answered: the status, and one sentence that says why."""

    def __init__(self, status: int, sentence: str):
        super().__init__(sentence)
        self.status = status


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
          pols_jax.search.serving.parameters.RequestError: limit must be a whole number from 1 to 500, got '0'.
        """
        if self.kind is int:
            # isdecimal takes digits of every script, and int reads them; more digits than the limit has are too many.
            is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(self.largest))
            if is_number and self.smallest <= int(text) <= self.largest:
                return int(text)
            raise RequestError(
                400,
                f"{self.name} must be a whole number from {self.smallest} to {self.largest}, got {_shown(text)}.",
            )
        if not self.smallest <= len(text) <= self.largest:
            raise RequestError(
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


def read_parameters(
    parameters: Sequence[Parameter], query: Sequence[tuple[str, str]], in_path: Mapping[str, str]
) -> dict[str, Any]:
    """Reads the parameters of a request.

    Raises:
      RequestError: for one that is missing, unknown, given twice, or has a value that cannot be.
    """
    known = {parameter.name: parameter for parameter in parameters if parameter.place == "query"}
    given: dict[str, str] = {}
    for name, text in query:
        if name not in known:
            if not known:
                raise RequestError(400, f"There are no parameters here, got {_shown(name)}.")
            raise RequestError(400, printable(unknown_name("parameter", name[:_LONGEST_SHOWN], known)))
        if name in given:
            raise RequestError(400, f"{name} is given twice; give it once.")
        given[name] = text
    given |= in_path
    values = {}
    for parameter in parameters:
        if parameter.name in given:
            values[parameter.name] = parameter.read(given[parameter.name])
        elif parameter.default is ...:
            raise RequestError(400, f"{parameter.name} is missing: {parameter.text}")
        else:
            values[parameter.name] = parameter.default
    return values


def _shown(text: str) -> str:
    cut = text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "..."
    return f"'{printable(cut)}'"
