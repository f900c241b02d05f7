"""Slurm's node list expressions."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshealthd.probe.members.hostlist import HostlistError, expand, is_name, quote

MAX_NAMES = 65_536


@pytest.mark.parametrize(("expression", "names"), [
    ("login1", ("login1",)),
    ("gpu[001-003,130],login1", ("gpu001", "gpu002", "gpu003", "gpu130", "login1")),
    ("gpu[8-11]", ("gpu8", "gpu9", "gpu10", "gpu11")),
    ("gpu[08-10]", ("gpu08", "gpu09", "gpu10")),
    ("gpu[99-101]", ("gpu99", "gpu100", "gpu101")),
    ("rack[1-2]node[01-02]", ("rack1node01", "rack1node02", "rack2node01", "rack2node02")),
    ("a[1-2]-ib0", ("a1-ib0", "a2-ib0")),
    ("a[1,3].example.org b", ("a1.example.org", "a3.example.org", "b")),
    (" a,,b, ", ("a", "b")),
    ("[1-2]", ("1", "2")),
    ("a" + "[1]" * 99, ("a" + "1" * 99,)),
    ("gpu[000000001]", ("gpu000000001",)),
])  # fmt: skip
def test_expands_as_slurm_does(expression: str, names: tuple[str, ...]) -> None:
    """Ranges keep the width of their first number, the last of several brackets varies fastest, and
    empty items count as nothing.
    """
    assert expand(expression) == names


@pytest.mark.parametrize(("expression", "reason"), [
    ("", "names no node"),
    (" , ", "names no node"),
    ("gpu[1-3", '"gpu[1-3" has nested brackets or an unmatched one'),
    ("gpu1-3]", '"gpu1-3]" has nested brackets or an unmatched one'),
    ("gpu[[1-2]]", '"gpu[[1-2]]" has nested brackets or an unmatched one'),
    ("gpu[]", '"" in "gpu[]" is neither a number nor a range of numbers'),
    ("gpu[1-]", '"1-" in "gpu[1-]" is neither a number nor a range of numbers'),
    ("gpu[a-c]", '"a-c" in "gpu[a-c]" is neither a number nor a range of numbers'),
    (
        "gpu[\u0661-\u0662]",
        r'"\u0661-\u0662" in "gpu[\u0661-\u0662]" is neither a number nor a range of numbers',
    ),
    ("gpu[5-1]", '"5-1" in "gpu[5-1]" is a descending range'),
    ("gpu[1-3,2]", '"gpu2" is a duplicate'),
    ("a/b", '"a/b" is not a valid node name'),
    ("-x", '"-x" is not a valid node name'),
    ("gpu[0-999999999]", '"gpu[0-999999999]" expands to more than 65536 names'),
    (
        "a[0-9999]b[0-9999]c[0-9999]",
        '"a[0-9999]b[0-9999]c[0-9999]" expands to more than 65536 names',
    ),
    (
        "gpu[0000000001]",
        '"0000000001" in "gpu[0000000001]" is neither a number nor a range of numbers',
    ),
])  # fmt: skip
def test_says_what_is_wrong(expression: str, reason: str) -> None:
    """Each kind of error in an expression has its message. An expression that is too large is
    rejected before it is expanded.
    """
    with pytest.raises(HostlistError) as error:
        expand(expression)
    assert str(error.value) == reason


def test_the_largest_expression() -> None:
    """Slurm's maximum number of names is expanded, and one more is not."""
    assert len(expand(f"n[1-{MAX_NAMES}]")) == MAX_NAMES
    with pytest.raises(HostlistError):
        expand(f"n[1-{MAX_NAMES}],m")


@pytest.mark.parametrize(
    "name", ["worker-1", "gpu001.example.org", "10.0.0.1", "fd00::1", "::1", "a_b", "A" * 253]
)
def test_names(name: str) -> None:
    """Host names, IPv4 and IPv6 addresses can be names of nodes."""
    assert is_name(name)


@pytest.mark.parametrize(
    "name",
    ["", "a b", "a/b", "a@b", "a\n", "é", "-rf", "..", "a=b", 'a"', "fe80::1%eth0", "A" * 254],
)
def test_no_names(name: str) -> None:
    """Text that cannot be the name of a host, or would be ambiguous in a label or an argument, is
    not a name.
    """
    assert not is_name(name)


RANGES = st.tuples(st.integers(0, 1200), st.integers(0, 5), st.integers(1, 6))
ITEMS = st.lists(
    st.tuples(
        st.sampled_from(["gpu", "rack-", "n", "x."]), st.lists(RANGES, min_size=1, max_size=3)
    ),
    min_size=1,
    max_size=3,
)


@given(ITEMS)
def test_round_trip(parts: list[tuple[str, list[tuple[int, int, int]]]]) -> None:
    """Numbers written as ranges expand to the same numbers, in order."""
    text = "".join(f"{prefix}[{','.join(_range(*r) for r in ranges)}]" for prefix, ranges in parts)
    axes = [
        [prefix + number for r in ranges for number in _numbers(*r)] for prefix, ranges in parts
    ]
    names = ["".join(choice) for choice in itertools.product(*axes)]
    if len(set(names)) == len(names):
        assert expand(text) == tuple(names)
    else:
        with pytest.raises(HostlistError, match="is a duplicate"):
            expand(text)


def _range(low: int, more: int, width: int) -> str:
    return f"{low:0{width}}-{low + more:0{width}}"


def _numbers(low: int, more: int, width: int) -> list[str]:
    return [str(number).zfill(width) for number in range(low, low + more + 1)]


@given(st.text(alphabet="gn019[]-, \t\n.:é/", max_size=40) | st.text(max_size=40))
def test_garbage(text: str) -> None:
    """Any text gives names or HostlistError, never another exception, and all names are usable."""
    try:
        names = expand(text)
    except HostlistError:
        return
    assert names
    assert all(map(is_name, names))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("x" * 60, f'"{"x" * 60}"'),
        ("x" * 61, f'"{"x" * 57}..."'),
        ("a\x1b[2J\u202e", '"a\\x1b[2J\\u202e"'),
    ],
)
def test_what_is_quoted(text: str, shown: str) -> None:
    """A long text is cut, and nothing of it moves the cursor of a terminal."""
    assert quote(text) == shown
