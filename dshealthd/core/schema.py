"""Types of JSON values, with bounds: what comes from elsewhere is checked before anything sees it.

Each type reads a JSON value (`SchemaError` if it does not fit) and writes one. `of` derives the
type of a dataclass from its annotations: what is written and read of an object is declared once,
where the object is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import json
import math
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NoReturn, Protocol

from dshealthd.core import documents

MAX_EXACT = 2**53
"""Integers up to this are the same in every JSON implementation."""
MANY = 1 << 20
"""More items than any list of a document has, and more characters than any text."""
MAX_TEXT = 1000
"""Most characters of a text of an object; errors of drivers and file systems can be long."""
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
    raise SchemaError(f"{place} {problem}")


class Plain:
    """A type whose values are the same in JSON."""

    def read(self, value: object, place: str) -> Any:
        raise NotImplementedError

    def write(self, value: Any, place: str) -> object:
        return self.read(value, place)


@dataclass(frozen=True, slots=True)
class Integer(Plain):
    """A whole number within bounds."""

    minimum: int = 0
    maximum: int = MAX_EXACT

    def read(self, value: object, place: str) -> int:
        if type(value) is not int or not self.minimum <= value <= self.maximum:
            misfit(place, f"is not an integer from {self.minimum} to {self.maximum}")
        return value


@dataclass(frozen=True, slots=True)
class Number(Plain):
    """A finite number within bounds."""

    minimum: float
    maximum: float

    def read(self, value: object, place: str) -> float:
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
        if type(value) is not bool:
            misfit(place, "is neither true nor false")
        return value


@dataclass(frozen=True, slots=True)
class Choice(Plain):
    """One of the values of an enumeration."""

    values: type[enum.StrEnum]

    def __repr__(self) -> str:
        """Return the type with its values, which the name of their enumeration does not say."""
        return f"Choice{sorted(map(str, self.values))}"

    def read(self, value: object, place: str) -> enum.StrEnum:
        for member in self.values:
            if member == value:
                return member
        misfit(place, f"is not a valid {self.values.__name__}")


@dataclass(frozen=True, slots=True)
class String(Plain):
    """A text of a bounded length; one that is written is cut, without what UTF-8 cannot encode."""

    maximum: int = MANY

    def read(self, value: object, place: str) -> str:
        if not isinstance(value, str) or len(value) > self.maximum:
            misfit(place, f"is not a text of at most {self.maximum} characters")
        return value

    def write(self, value: Any, place: str) -> str:  # noqa: ARG002 - of every type
        return documents.cut(str(value), self.maximum)


@dataclass(frozen=True, slots=True)
class OrNull:
    """A value, or null; a number that is not within its bounds is written as null, too."""

    kind: Type

    def read(self, value: object, place: str) -> Any:
        return None if value is None else self.kind.read(value, place)

    def write(self, value: Any, place: str) -> object:
        if value is None or (
            isinstance(self.kind, Number) and not self.kind.minimum <= value <= self.kind.maximum
        ):
            return None
        return self.kind.write(value, place)


FIGURE = Number(-sys.float_info.max, sys.float_info.max)


@dataclass(frozen=True, slots=True)
class Array:
    """A list of a bounded length; a tuple in Python, unless `made` makes something else of it."""

    item: Type
    maximum: int = MANY
    minimum: int = 0
    made: Callable[[Iterator[Any]], Any] = tuple

    def read(self, value: object, place: str) -> Any:
        return self.made(
            self.item.read(entry, f"{place}[{index}]")
            for index, entry in enumerate(self._entries(value, place))
        )

    def write(self, value: Any, place: str) -> list[object]:
        return [
            self.item.write(entry, f"{place}[{index}]")
            for index, entry in enumerate(self._entries(value, place))
        ]

    def _entries(self, value: object, place: str) -> list[Any] | tuple[Any, ...]:
        if not isinstance(value, list | tuple) or not self.minimum <= len(value) <= self.maximum:
            misfit(place, f"is not a list of {self.minimum} to {self.maximum} items")
        return value


@dataclass(frozen=True, slots=True)
class Row:
    """A list with an item of each of these types; a tuple in Python."""

    items: tuple[Type, ...]
    made: Callable[[list[Any]], Any] = tuple

    def read(self, value: object, place: str) -> Any:
        if not isinstance(value, list | tuple) or len(value) != len(self.items):
            misfit(place, f"is not a list of {len(self.items)} items")
        each = zip(self.items, value, strict=True)
        return self.made([kind.read(one, f"{place}[{at}]") for at, (kind, one) in enumerate(each)])

    def write(self, value: Any, place: str) -> list[object]:
        each = zip(self.items, value, strict=True)
        return [kind.write(one, f"{place}[{at}]") for at, (kind, one) in enumerate(each)]


@dataclass(frozen=True, slots=True)
class Pairs:
    """A mapping whose keys are no texts: a list of keys and values."""

    pair: Row

    def read(self, value: object, place: str) -> dict[Any, Any]:
        return dict(Array(self.pair).read(value, place))

    def write(self, value: Any, place: str) -> list[object]:
        return Array(self.pair).write([*value.items()], place)


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """An object with these fields and no others, unless `rest` is the type of others.

    Fields of `optional` may be missing; then they are missing in Python too.
    """

    fields: Mapping[str, Type]
    optional: Mapping[str, Type] = field(default_factory=dict)
    rest: Type | None = None

    def read(self, value: object, place: str = "body") -> dict[str, Any]:
        return {
            name: kind.read(entry, f"{place}.{name}")
            for name, kind, entry in self._entries(value, place)
        }

    def write(self, value: Any, place: str = "body") -> dict[str, object]:
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


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """A dataclass: an object with its fields, of which those that have defaults may be missing.

    What only `rest` allows is left out as it is read.
    """

    made: type[Any] = field(repr=False)
    fields: Record

    def read(self, value: object, place: str = "body") -> Any:
        known = self.fields.read(value, place)
        return self.made(**{name: known[name] for name in known.keys() & self._kinds.keys()})

    def write(self, value: Any, place: str = "body") -> dict[str, object]:
        return {
            name: kind.write(getattr(value, name), f"{place}.{name}")
            for name, kind in self._kinds.items()
        }

    @property
    def _kinds(self) -> Mapping[str, Type]:
        return {**self.fields.fields, **self.fields.optional}


def transient(**settings: Any) -> Any:
    """Declare a field of a dataclass that its document lacks; it has a default."""
    return field(metadata={"transient": True}, **settings)


_SCALARS: dict[Any, Type] = {
    bool: Flag(),
    int: Integer(-(2**63), 2**63),
    float: FIGURE,
    str: String(MAX_TEXT),
}


@functools.cache
def of(hint: Any, rest: Any = None) -> Any:
    """Return the type that an annotation stands for: of a dataclass its `Form`, whose other fields
    are of the type `rest`; of a mapping with keys that are no texts `Pairs`; `Annotated[X, type]`
    is that type.
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _form(hint, rest)  # type: ignore[arg-type] # is_dataclass also admits instances
    if origin is Annotated:
        return inner[1]
    if origin in (types.UnionType, typing.Union):
        return OrNull(of(next(one for one in inner if one is not types.NoneType), rest))
    if origin is dict:
        key, value = (of(one, rest) for one in inner)
        return Record({}, rest=value) if inner[0] is str else Pairs(Row((key, value)))
    if origin is tuple and inner[-1] is not Ellipsis:
        return Row(tuple(of(one, rest) for one in inner))
    if origin in (list, tuple):
        return Array(of(inner[0], rest), made=origin)
    if issubclass(hint, tuple):
        return Row(tuple(map(of, typing.get_type_hints(hint).values())), hint._make)
    return Choice(hint) if issubclass(hint, enum.StrEnum) else _SCALARS[hint]


def _form(made: type[Any], rest: Any) -> Form:
    hints = typing.get_type_hints(made, include_extras=True)
    kinds: tuple[dict[str, Type], dict[str, Type]] = {}, {}
    for one in dataclasses.fields(made):
        if not one.metadata.get("transient"):
            needed = one.default is one.default_factory  # both are missing
            kinds[not needed][one.name] = of(hints[one.name], rest)
    return Form(made, Record(*kinds, rest))


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
        raise SchemaError("body is not JSON") from error


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
