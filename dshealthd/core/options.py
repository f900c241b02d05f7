"""Typed options: dataclasses decoded from TOML tables, with the key's path in every error.

An option is a dataclass field made by `option(default, doc)`; its type determines the valid TOML
values. The reference file (`docs/dshealthd.toml`) is made from the same declaration.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from pathlib import Path
from typing import Any, Literal, TypeVar

T = TypeVar("T")

_DURATION = re.compile(
    "".join(rf"(?:(\d+(?:\.\d+)?){unit})?" for unit in ("d", "h", "m(?!s)", "s", "ms"))
)
_SIZE = re.compile(r"(\d+)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_BAD: Any = object()
COMMAND_LINE = "command line"
"""The source of a flag's mistake in a `ConfigError`; else it is a file."""


class Duration(float):
    """A time span in seconds; written "250ms", "5s", "1m30s", "2h", "30d"."""

    @classmethod
    def parse(cls, text: str) -> Duration:
        """Return the duration in `text`, or raise ValueError."""
        match = _DURATION.fullmatch(text)
        if not text or match is None:
            raise ValueError('not a duration such as "250ms", "5s", "1m30s", "2h" or "30d"')
        days, hours, minutes, seconds, milliseconds = (float(part or 0) for part in match.groups())
        hours += 24 * days
        return cls(hours * 3600 + minutes * 60 + seconds + milliseconds / 1000)

    def __str__(self) -> str:
        """Return the span in its largest whole unit."""
        for unit, seconds in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
            if self % seconds == 0 and (self >= seconds or unit == "s"):
                return f"{int(self // seconds)}{unit}"
        return f"{self * 1000:g}ms"


class Bytes(int):
    """A number of bytes; written 65536, "64KiB" or "1GB" in the config."""

    @classmethod
    def parse(cls, text: str) -> Bytes:
        """Return the number of bytes in `text`, or raise ValueError.

        "1GB" is 10^9 and "1GiB" 2^30 bytes; a bare "1G" is 2^30, as in systemd.
        """
        match = _SIZE.fullmatch(text.strip())
        if match is None or (match[3] and not match[2]):
            raise ValueError('not a size such as "512MiB", "1GB" or 65536')
        decimal = match[2] and not match[3] and text.strip()[-1:] in "Bb"
        return cls(int(match[1]) * (1000 if decimal else 1024) ** _POWERS[match[2].upper()])

    def __str__(self) -> str:
        """Return the number in its largest whole unit."""
        for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
            if self and self % 1024**power == 0:
                return f"{self // 1024**power}{unit}"
        return int.__repr__(self)


def option(
    default: Any,
    doc: str,
    *,
    minimum: float | str | None = None,
    maximum: float | None = None,
    form: str = "",
    aliases: typing.Mapping[str, str] = types.MappingProxyType({}),
) -> Any:
    """Declare an option with its default, its documentation and its bounds.

    A duration is given as text. `form` is the value's placeholder in `--help`, where the type alone
    does not show it; `aliases` are other spellings of a Literal's values.
    """
    metadata = {
        "doc": doc,
        "minimum": minimum,
        "maximum": maximum,
        "form": form,
        "aliases": aliases,
    }
    if isinstance(default, list):
        return dataclasses.field(
            default_factory=lambda: tuple(default), metadata={**metadata, "default": tuple(default)}
        )
    if isinstance(default, str) and _DURATION.fullmatch(default) and default:
        default = Duration.parse(default)
    return dataclasses.field(default=default, metadata={**metadata, "default": default})


def constant(value: Any) -> Any:
    """Declare a field that only code sets, such as a test; a duration is given as text."""
    if isinstance(value, str):
        value = Duration.parse(value)
    return dataclasses.field(default=value, metadata={"constant": True})


def settable(schema: Any) -> list[dataclasses.Field[Any]]:
    """Return the fields of options that a configuration can set."""
    return [one for one in dataclasses.fields(schema) if not one.metadata.get("constant")]


class Section:
    """Base of a package's section of the configuration, a dataclass in its module `options`.

    The section has the package's name: `dshealthd/slurm/options.py` declares `[slurm]`.
    """


class ConfigError(Exception):
    """An invalid configuration.

    `errors` has one `key: reason` per mistake.
    """

    def __init__(self, source: str, errors: list[str]) -> None:
        super().__init__("\n".join(f"{source}: {error}" for error in errors))
        self.errors = errors


class Errors(list[str]):
    """The mistakes in a config, one `key: reason` each."""

    def add(self, key: str, reason: str) -> None:
        """Add a mistake in the option `key`."""
        self.append(f"{key}: {reason}")


def decode(schema: type[T], table: object, key: str, errors: Errors) -> T:
    """Return the options `schema` filled from a TOML table.

    A mistake is added to `errors`, and the option keeps its default.
    """
    if not isinstance(table, dict):
        errors.add(key, f"must be a table, not {_toml_type(table)}")
        return schema()
    hints = typing.get_type_hints(schema)
    fields = {field.name: field for field in settable(schema)}
    for name in table:
        if name not in fields:
            errors.add(join(key, name), unknown(name, fields))
    values = {
        name: _value(hints[name], fields[name].metadata, value, join(key, name), errors)
        for name, value in table.items()
        if name in fields
    }
    before = len(errors)
    values = {name: value for name, value in values.items() if value is not _BAD}
    instance = schema(**values)
    if len(errors) == before and hasattr(instance, "check"):
        for name, reason in instance.check():
            errors.add(join(key, name), reason)
    return instance


def decoded(schema: type[T], table: object) -> T:
    """Return options that another process of ours has encoded; ValueError says what is wrong."""
    errors = Errors()
    found = decode(schema, table, "", errors)
    if errors:
        raise ValueError("; ".join(errors))
    return found


def join(key: str, name: str) -> str:
    """Return the path of an option `name` inside `key`, quoted where TOML needs it."""
    name = name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else f'"{name}"'
    return f"{key}.{name}" if key else name


def unknown(name: str, known: typing.Iterable[str]) -> str:
    """Return the error for an unknown key, with a suggestion."""
    import difflib  # 0.2 MiB in each process, which only a wrong config needs

    close = difflib.get_close_matches(name, list(known), n=1)
    return (
        f"unknown key; did you mean {close[0]}?"
        if close
        else f"unknown key; known are {', '.join(sorted(known))}"
    )


def _value(
    hint: Any, metadata: typing.Mapping[str, Any], value: object, key: str, errors: Errors
) -> Any:
    """Convert a TOML value to the type `hint`; return `_BAD` if that is impossible."""
    if dataclasses.is_dataclass(hint):
        # is_dataclass also admits instances
        return decode(hint, value, key, errors)  # type: ignore[arg-type]
    try:
        if isinstance(value, str):
            value = metadata.get("aliases", {}).get(value, value)
        converted = _convert(hint, value)
        _bound(converted, metadata)
    except (ValueError, ArithmeticError) as error:
        errors.add(
            key, f"{_show(value)} is {error}" if str(error).startswith("not ") else str(error)
        )
        return _BAD
    return converted


def _convert(hint: Any, value: object) -> Any:
    """Convert a TOML value to the type `hint`; raise ValueError with the expected form."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"must be an array, not {_toml_type(value)}")
        return tuple(_convert(arguments[0], item) for item in value)
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"not one of {', '.join(_show(a) for a in arguments)}")
        return value
    if origin in (types.UnionType, typing.Union):
        return _convert(next(a for a in arguments if a is not type(None)), value)
    if hint is Duration and isinstance(value, str):
        return Duration.parse(value)
    if hint is Bytes and isinstance(value, str):
        return Bytes.parse(value)
    if hint is Bytes and type(value) is int:
        return Bytes(value)
    if hint is Path and isinstance(value, str):
        if not value or "\0" in value:
            raise ValueError("not a path")
        return Path(value)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):  # no value is beyond a limit that is not a number
            raise ValueError("not a finite number")
        return float(value)
    if hint in (bool, int, float, str) and type(value) is hint:
        return value
    names = {
        Duration: 'a duration such as "5s"',
        Bytes: 'a size such as "512MiB" or an integer',
        Path: "a string with a path",
        bool: "true or false",
        int: "an integer",
        float: "a number",
        str: "a string",
    }
    raise ValueError(f"must be {names[hint]}, not {_toml_type(value)}")


def _bound(value: Any, metadata: typing.Mapping[str, Any]) -> None:
    """Check an option's declared bounds; raise ValueError with the violated one."""
    low, high = metadata.get("minimum"), metadata.get("maximum")
    if isinstance(low, str):
        low = Duration.parse(low)
    if low is not None and value < low:
        raise ValueError(f"must be at least {low}, not {value}")
    if high is not None and value > high:
        raise ValueError(f"must be at most {high}, not {value}")


def _show(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else _plain_text(value)


def _plain_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _toml_type(value: object) -> str:
    names = {
        str: "a string",
        bool: "a boolean",
        int: "an integer",
        float: "a float",
        list: "an array",
        dict: "a table",
    }
    name = names.get(type(value), type(value).__name__)
    return name if isinstance(value, dict | list) else f"{name} ({_plain_text(value)})"


def encode(options: Any) -> dict[str, Any]:
    """Return the TOML table from which `decode` makes these options."""
    table = {field.name: getattr(options, field.name) for field in settable(options)}
    return {name: _plain(value) for name, value in table.items() if value is not None}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return encode(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Duration | Path) else value
