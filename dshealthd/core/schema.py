"""Types of JSON values, with bounds: what comes from elsewhere is checked before anything sees it.

Each type reads a JSON value (`SchemaError` if it does not fit) and writes one.
"""

from __future__ import annotations

import contextlib
import enum
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from dshealthd.core import documents

MAX_EXACT = 2**53
"""Integers up to this are the same in every JSON implementation."""
_DIGITS = len(str(-(2**63)))
"""Most characters of an integer: what a counter of 64 bits holds. 400 digits are no float."""


class SchemaError(ValueError):
    """A message that does not fit its schema; the text names the field."""


class Type(Protocol):
    """Reads and writes one kind of value."""

    def read(self, value: object, place: str) -> Any:
        """Return the Python value of a JSON value by its schema; a SchemaError names `place`."""

    def write(self, value: Any, place: str) -> object:
        """Return the JSON value of a Python value by its schema; a SchemaError names `place`."""


def misfit(place: str, problem: str) -> NoReturn:
    """Raise SchemaError about the value at a place."""
    message = f"{place} {problem}"
    raise SchemaError(message)


class Plain:
    """A type whose values are the same in JSON."""

    def read(self, value: object, place: str) -> Any:
        """Return the value if it fits, which each type decides."""
        raise NotImplementedError

    def write(self, value: Any, place: str) -> object:
        """Return the value if it fits."""
        return self.read(value, place)


@dataclass(frozen=True, slots=True)
class Integer(Plain):
    """A whole number within bounds."""

    minimum: int = 0
    maximum: int = MAX_EXACT

    def read(self, value: object, place: str) -> int:
        """Return the number that the schema allows."""
        if type(value) is not int or not self.minimum <= value <= self.maximum:
            misfit(place, f"is not an integer from {self.minimum} to {self.maximum}")
        return value


@dataclass(frozen=True, slots=True)
class Number(Plain):
    """A finite number within bounds."""

    minimum: float
    maximum: float

    def read(self, value: object, place: str) -> float:
        """Return the number that the schema allows."""
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not self.minimum <= value <= self.maximum
        ):
            misfit(place, f"is not a number from {self.minimum:g} to {self.maximum:g}")
        return float(value)


UNIX_TIME = Number(0, 253402300799)
"""Seconds since 1970, to the end of the year 9999, the last that `datetime` has."""


@dataclass(frozen=True, slots=True)
class Flag(Plain):
    """True or false."""

    def read(self, value: object, place: str) -> bool:
        """Return the flag that the schema allows."""
        if type(value) is not bool:
            misfit(place, "is neither true nor false")
        return value


@dataclass(frozen=True, slots=True)
class Choice(Plain):
    """One of the values of an enumeration."""

    values: type[enum.StrEnum]

    def read(self, value: object, place: str) -> enum.StrEnum:
        """Return the member of the schema's enumeration."""
        if isinstance(value, str) and value in self.values.__members__.values():
            return self.values(value)
        misfit(place, f"is not a valid {self.values.__name__}")


@dataclass(frozen=True, slots=True)
class Array:
    """A list of a bounded length; a tuple in Python."""

    item: Type
    maximum: int
    minimum: int = 0

    def read(self, value: object, place: str) -> tuple[Any, ...]:
        """Return the items that the schema allows."""
        return tuple(
            self.item.read(entry, f"{place}[{index}]")
            for index, entry in enumerate(self._entries(value, place))
        )

    def write(self, value: Any, place: str) -> list[object]:
        """Return the JSON values of the schema's items."""
        return [
            self.item.write(entry, f"{place}[{index}]")
            for index, entry in enumerate(self._entries(value, place))
        ]

    def _entries(self, value: object, place: str) -> list[Any] | tuple[Any, ...]:
        if not isinstance(value, list | tuple) or not self.minimum <= len(value) <= self.maximum:
            misfit(place, f"is not a list of {self.minimum} to {self.maximum} items")
        return value


@dataclass(frozen=True, slots=True)
class Record:
    """An object with these fields and no others, unless `rest` is the type of others.

    Fields of `optional` may be missing; then they are missing in Python too.
    """

    fields: Mapping[str, Type]
    optional: Mapping[str, Type] = field(default_factory=dict)
    rest: Type | None = None

    def read(self, value: object, place: str = "body") -> dict[str, Any]:
        """Return the Python values by field of the schema's record."""
        return {
            name: kind.read(entry, f"{place}.{name}")
            for name, kind, entry in self._entries(value, place)
        }

    def write(self, value: Any, place: str = "body") -> dict[str, object]:
        """Return the JSON values by field of the schema's record."""
        return {
            name: kind.write(entry, f"{place}.{name}")
            for name, kind, entry in self._entries(value, place)
        }

    def _entries(self, value: object, place: str) -> list[tuple[str, Type, Any]]:
        if not isinstance(value, dict):
            misfit(place, "is not an object")
        if missing := self.fields.keys() - value.keys():
            misfit(place, f"lacks {min(missing)}")
        entries = []
        for name, entry in value.items():
            kind = self.fields.get(name) or self.optional.get(name) or self.rest
            if kind is None:
                misfit(place, "has an unknown field")
            entries.append((name, kind, entry))
        return entries


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn whatever the block raises over the shape of a document into a SchemaError.

    For a document that another release, a damaged disk or somebody else may have written.
    """
    try:
        yield
    except documents.MISSHAPEN as error:
        message = f"{what} is not what this release writes: {type(error).__name__}: {error}"
        raise SchemaError(message) from error


def document(body: bytes | str) -> Any:
    """Return the value of a JSON text; SchemaError if it is not unambiguous JSON.

    Its numbers are finite, and its integers have at most 64 bits.
    """
    try:
        return json.loads(
            body.decode() if isinstance(body, bytes) else body,
            object_pairs_hook=_unique,
            parse_constant=_constant,
            parse_int=_integer,
            parse_float=_finite,
        )
    except SchemaError:
        raise
    except (ValueError, ArithmeticError, RecursionError) as error:
        message = "body is not JSON"
        raise SchemaError(message) from error


def loads(body: bytes, schema: Record) -> dict[str, Any]:
    """Return a message; SchemaError if it is not unambiguous JSON that fits `schema`."""
    return schema.read(document(body))


def dumps(value: Mapping[str, Any], schema: Record) -> bytes:
    """Return the JSON of a message. Raises SchemaError if it does not fit `schema`."""
    return documents.dumps(schema.write(value), separators=(",", ":")).encode()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        misfit("body", "has a field twice")
    return value


def _constant(_name: str) -> NoReturn:
    misfit("body", "has NaN or Infinity for a number")


def _integer(digits: str) -> int:
    if len(digits) > _DIGITS:
        misfit("body", "has an integer that is too large")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        misfit("body", "has a number that is too large")
    return value
