"""Options: what a value of each type may be, and how it is written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from dshealthd.config import config, registry
from dshealthd.core.options import Bytes, Duration, Errors, decode, decoded, encode, option


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("250ms", 0.25),
        ("5s", 5),
        ("1m30s", 90),
        ("2h", 7200),
        ("1h1m1s1ms", 3661.001),
        ("2d", 172_800),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    """Durations are written as in Prometheus."""
    assert Duration.parse(text) == pytest.approx(seconds)
    for other in ("", f"{text}x"):
        with pytest.raises(ValueError, match="not a duration"):
            Duration.parse(other)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("512", 512),
        ("64KiB", 65536),
        ("1GB", 10**9),
        ("1g", 2**30),
        ("2 MiB", 2**21),
        ("3TiB", 3 * 2**40),
        ("7B", 7),
    ],
)
def test_sizes(text: str, number: int) -> None:
    """Sizes may be written with a unit, decimal with B and binary with iB or a bare letter."""
    assert Bytes.parse(text) == number
    assert Bytes.parse(str(Bytes.parse(text))) == number


def test_options_survive_the_way_to_a_worker() -> None:
    """What a worker decodes is what the agent has. The options of every collector are equal after
    encoding and decoding; anything else is a defect.
    """
    for name, kind in registry.all_collectors().items():
        options = config.load(None).collectors[name]
        assert decoded(kind.Options, encode(options)) == options
    with pytest.raises(ValueError, match="colour"):
        decoded(kind.Options, {"colour": "red"})


@dataclass(frozen=True, kw_only=True)
class Kinds:
    """An option of each type."""

    flag: bool = option(False, "")
    count: int = option(0, "", minimum=0, maximum=9)
    ratio: float = option(0.5, "")
    text: str = option("", "")
    path: Path | None = option(None, "")
    span: Duration = option("5s", "", minimum="1s")
    size: Bytes = option(Bytes(1), "")
    names: tuple[str, ...] = option([], "")
    level: Literal["low", "high"] = option("low", "", aliases={"l": "low"})


@pytest.mark.parametrize(("name", "given", "value"), [
    ("flag", True, True),
    ("count", 9, 9),
    ("ratio", 1, 1.0),
    ("ratio", 0.25, 0.25),
    ("text", "a", "a"),
    ("path", "/a", Path("/a")),
    ("span", "1s", 1.0),
    ("size", 5, 5),
    ("size", "1KiB", 1024),
    ("names", ["a"], ("a",)),
    ("level", "l", "low"),
])  # fmt: skip
def test_what_an_option_may_be(name: str, given: object, value: object) -> None:
    """By its type; a whole number is a number, too, and a value may have other spellings."""
    errors = Errors()
    found = getattr(decode(Kinds, {name: given}, "", errors), name)
    assert (found, type(found) is bool, errors) == (value, type(value) is bool, [])
    assert isinstance(found, float) is isinstance(value, float)


@pytest.mark.parametrize(("name", "given"), [
    ("flag", 1), ("flag", "true"),
    ("count", True), ("count", 1.0), ("count", -1), ("count", 10),
    ("ratio", True), ("ratio", "1"),
    ("text", 1), ("path", 1), ("path", ""), ("path", "a\0"),
    ("span", 5), ("span", "999ms"), ("size", True), ("size", 1.5),
    ("size", "1iB"), ("size", "x"), ("names", "a"), ("names", [1]), ("level", "l "),
])  # fmt: skip
def test_what_an_option_may_not_be(name: str, given: object) -> None:
    """It keeps its default, and the mistake is named."""
    errors = Errors()
    assert decode(Kinds, {name: given}, "", errors) == Kinds()
    (error,) = errors
    assert error.startswith(f"{name}: ")
