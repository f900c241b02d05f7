"""The schema of messages of the peer API: the types of their fields that only peers use.

A message is checked before its handler sees any of it. Undeclared fields are refused.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from dshealthd.core.schema import MAX_EXACT, Plain, Record, SchemaError, misfit
from dshealthd.probe.members.hostlist import is_name
from dshealthd.probe.peers.protocol import SLUG
from dshealthd.probe.reasons import known

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class NodeName(Plain):
    """A node's name, which is only compared with those of the membership."""

    def read(self, value: object, place: str) -> str:
        """Return the node's name that the schema allows."""
        if not isinstance(value, str) or not is_name(value):
            misfit(place, "is not a valid node name")
        return value


@dataclass(frozen=True, slots=True)
class Slug(Plain):
    """A reason, or nothing: lower case letters, digits and underscores."""

    def read(self, value: object, place: str) -> str:
        """Return the slug that the schema allows."""
        if not isinstance(value, str) or (value and SLUG.fullmatch(value) is None):
            misfit(place, "is not a slug")
        return value


@dataclass(frozen=True, slots=True)
class KnownReason(Slug):
    """A reason that this release knows, or nothing; any other slug becomes `other`."""

    def read(self, value: object, place: str) -> str:
        """Return the reason that the schema allows."""
        return known(Slug.read(self, value, place))


@dataclass(frozen=True, slots=True)
class Text(Plain):
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
            misfit(place, f"is not printable ASCII text of at most {self.maximum} characters")
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
            misfit(place, f"is not base64 of at most {self.maximum} bytes")
        return data

    def write(self, value: Any, place: str) -> str:
        """Return the base64 text of bytes that the schema allows."""
        if not isinstance(value, bytes) or len(value) > self.maximum:
            misfit(place, f"is not bytes, at most {self.maximum} of them")
        return base64.b64encode(value).decode()


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
        misfit("body", "has a field twice")
    return value


def _constant(_name: str) -> NoReturn:
    misfit("body", "has NaN or Infinity for a number")


def _integer(digits: str) -> int:
    if len(digits) > len(str(-MAX_EXACT)):
        misfit("body", "has an integer that is too large")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        misfit("body", "has a number that is too large")
    return value
