"""Options: what a value of each type may be, and how it is written."""

from __future__ import annotations

import pytest

from dshealthd.config import config, registry
from dshealthd.core.options import Bytes, Duration, Errors, decode, encode


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
    encoding and decoding.
    """
    for name, kind in registry.all_collectors().items():
        errors = Errors()
        options = config.load(None).collectors[name]
        assert decode(kind.Options, encode(options), name, errors) == options
        assert not errors
