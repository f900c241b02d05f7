"""The schema of messages of the peer API: types of their fields, with bounds.

A message is checked before its handler sees any of it.

Each type reads a JSON value (`SchemaError` if it does not fit) and writes one. Undeclared fields
are refused.
"""

from __future__ import annotations

import base64
import binascii
import enum
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from dshealthd.probe.members.hostlist import is_name
from dshealthd.probe.peers.contract import SLUG
from dshealthd.probe.reasons import known

MAX_EXACT = 2**53
"""Integers up to this are the same in every JSON implementation."""


class SchemaError(ValueError):
    """A message that does not fit its schema; the text names the field."""


class Type(Protocol):
    """Reads and writes one kind of value."""

    def read(self, value: object, place: str) -> Any:
        """Return the Python value of a JSON value by its schema; a SchemaError names `place`."""

    def write(self, value: Any, place: str) -> object:
        """Return the JSON value of a Python value by its schema; a SchemaError names `place`."""


def _bad(place: str, problem: str) -> NoReturn:
    message = f"{place} {problem}"
    raise SchemaError(message)


class _Plain:
    """A type whose values are the same in JSON."""

    def read(self, value: object, place: str) -> Any:
        raise NotImplementedError

    def write(self, value: Any, place: str) -> object:
        return self.read(value, place)


@dataclass(frozen=True, slots=True)
class Integer(_Plain):
    """A whole number within bounds."""

    minimum: int = 0
    maximum: int = MAX_EXACT

    def read(self, value: object, place: str) -> int:
        """Return the number that the schema allows."""
        if type(value) is not int or not self.minimum <= value <= self.maximum:
            _bad(place, f"is not an integer from {self.minimum} to {self.maximum}")
        return value


@dataclass(frozen=True, slots=True)
class Number(_Plain):
    """A finite number within bounds."""

    minimum: float
    maximum: float

    def read(self, value: object, place: str) -> float:
        """Return the number that the schema allows."""
        if type(value) not in {int, float} or not self.minimum <= value <= self.maximum:  # type: ignore[operator] # it is a number
            _bad(place, f"is not a number from {self.minimum:g} to {self.maximum:g}")
        return float(value)  # type: ignore[arg-type] # it is a number


@dataclass(frozen=True, slots=True)
class Flag(_Plain):
    """True or false."""

    def read(self, value: object, place: str) -> bool:
        """Return the flag that the schema allows."""
        if type(value) is not bool:
            _bad(place, "is neither true nor false")
        return value


@dataclass(frozen=True, slots=True)
class Choice(_Plain):
    """One of the values of an enumeration."""

    values: type[enum.StrEnum]

    def read(self, value: object, place: str) -> enum.StrEnum:
        """Return the member of the schema's enumeration."""
        if isinstance(value, str) and value in self.values.__members__.values():
            return self.values(value)
        _bad(place, f"is not a valid {self.values.__name__}")


@dataclass(frozen=True, slots=True)
class NodeName(_Plain):
    """A node's name, which is only compared with those of the membership."""

    def read(self, value: object, place: str) -> str:
        """Return the node's name that the schema allows."""
        if not isinstance(value, str) or not is_name(value):
            _bad(place, "is not a valid node name")
        return value


@dataclass(frozen=True, slots=True)
class Slug(_Plain):
    """A reason, or nothing: lower case letters, digits and underscores."""

    def read(self, value: object, place: str) -> str:
        """Return the slug that the schema allows."""
        if not isinstance(value, str) or (value and SLUG.fullmatch(value) is None):
            _bad(place, "is not a slug")
        return value


@dataclass(frozen=True, slots=True)
class KnownReason(Slug):
    """A reason that this release knows, or nothing; any other slug becomes `other`."""

    def read(self, value: object, place: str) -> str:
        """Return the reason that the schema allows."""
        return known(Slug.read(self, value, place))


@dataclass(frozen=True, slots=True)
class Text(_Plain):
    """Printable ASCII of a bounded length."""

    maximum: int

    def read(self, value: object, place: str) -> str:
        """Return the text that the schema allows."""
        if (
            not isinstance(value, str)
            or len(value) > self.maximum
            or not value.isascii()
            or not (value.isprintable())
        ):
            _bad(place, f"is not printable ASCII text of at most {self.maximum} characters")
        return value


@dataclass(frozen=True, slots=True)
class Data:
    """Bytes; base64 in JSON."""

    maximum: int

    def read(self, value: object, place: str) -> bytes:
        """Return the bytes that the schema allows."""
        try:
            data = base64.b64decode(value, validate=True) if isinstance(value, str) else None
        except (binascii.Error, ValueError):
            data = None
        if data is None or len(data) > self.maximum:
            _bad(place, f"is not base64 of at most {self.maximum} bytes")
        return data

    def write(self, value: Any, place: str) -> str:
        """Return the base64 text of bytes that the schema allows."""
        if not isinstance(value, bytes) or len(value) > self.maximum:
            _bad(place, f"is not bytes, at most {self.maximum} of them")
        return base64.b64encode(value).decode()


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
            _bad(place, f"is not a list of {self.minimum} to {self.maximum} items")
        return value


@dataclass(frozen=True, slots=True)
class Record:
    """An object with these fields and no others.

    Fields of `optional` may be missing; then they are missing in Python too.
    """

    fields: Mapping[str, Type]
    optional: Mapping[str, Type] = field(default_factory=dict)

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
            _bad(place, "is not an object")
        if missing := self.fields.keys() - value.keys():
            _bad(place, f"lacks {min(missing)}")
        if value.keys() - self.fields.keys() - self.optional.keys():
            _bad(place, "has an unknown field")
        return [
            (name, self.fields.get(name) or self.optional[name], entry)
            for name, entry in value.items()
        ]


def loads(body: bytes, schema: Record) -> dict[str, Any]:
    """Return a parsed message. Raises SchemaError if it is not JSON, is ambiguous JSON, or does not
    fit `schema`.
    """
    try:
        value = json.loads(
            body.decode(),
            object_pairs_hook=_unique,
            parse_constant=_constant,
            parse_int=_integer,
            parse_float=_finite,
        )
    except SchemaError:
        raise
    except (ValueError, RecursionError) as error:
        message = "body is not JSON"
        raise SchemaError(message) from error
    return schema.read(value)


def dumps(value: Mapping[str, Any], schema: Record) -> bytes:
    """Return the JSON of a message. Raises SchemaError if it does not fit `schema`."""
    return json.dumps(schema.write(value), separators=(",", ":"), allow_nan=False).encode()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        _bad("body", "has a field twice")
    return value


def _constant(_name: str) -> NoReturn:
    _bad("body", "has NaN or Infinity for a number")


def _integer(digits: str) -> int:
    if len(digits) > len(str(-MAX_EXACT)):
        _bad("body", "has an integer that is too large")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        _bad("body", "has a number that is too large")
    return value
