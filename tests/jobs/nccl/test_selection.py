"""NCCL's own rule for lists of interfaces and adapters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshealthd.jobs.nccl.settings import parse_selection

INTERFACES = ("lo", "eth0", "eth1", "eth10", "docker0", "ib0")


@pytest.mark.parametrize(("text", "taken"), [
    ("eth", ["eth0", "eth1", "eth10"]),
    ("=eth", []),
    ("eth1", ["eth1", "eth10"]),
    ("=eth1", ["eth1"]),
    ("=eth0,ib0", ["eth0", "ib0"]),
    ("^docker", ["lo", "eth0", "eth1", "eth10", "ib0"]),
    ("^docker,lo,eth", ["ib0"]),
    ("^=eth1", ["lo", "eth0", "eth10", "docker0", "ib0"]),
    ("bond,ib", ["ib0"]),
    ("eth9", []),
    (" eth0", []),
    ("=^eth0", []),
    (",,ib0,", ["ib0"]),
    ("", list(INTERFACES)),
    ("^", []),
    ("eth0:7", ["eth0"]),
])  # fmt: skip
def test_interfaces(text: str, taken: list[str]) -> None:
    """Names are prefixes, or exact behind `=`; `^` excludes; blanks are part of a name."""
    selection = parse_selection(text)
    assert [name for name in INTERFACES if selection.covers(name)] == taken


PORTS = (("mlx5_0", 1), ("mlx5_0", 2), ("mlx5_1", 1), ("mlx5_10", 1))


@pytest.mark.parametrize(("text", "taken"), [
    ("mlx5", list(PORTS)),
    ("mlx5_1", [("mlx5_1", 1), ("mlx5_10", 1)]),
    ("=mlx5_1", [("mlx5_1", 1)]),
    ("mlx5_0:2", [("mlx5_0", 2)]),
    ("=mlx5_0:1,mlx5_1:1", [("mlx5_0", 1), ("mlx5_1", 1)]),
    ("^mlx5_0:2", [("mlx5_0", 1), ("mlx5_1", 1), ("mlx5_10", 1)]),
    ("mlx5_0:", [("mlx5_0", 1), ("mlx5_0", 2)]),
    ("mlx5_0:2:1:0", [("mlx5_0", 2)]),
    ("mlx5_0:x", []),
    ("mlx5_0:-1", [("mlx5_0", 1), ("mlx5_0", 2)]),
])  # fmt: skip
def test_ports(text: str, taken: list[tuple[str, int]]) -> None:
    """A port behind `:` restricts an entry; rail and plane behind it do not."""
    selection = parse_selection(text)
    assert [port for port in PORTS if selection.covers(*port)] == taken


@given(st.text())
def test_any_text_is_a_list(text: str) -> None:
    """Whatever a user writes is a list that takes a device or does not, and one that excludes takes
    what the other leaves.
    """
    selection, opposite = parse_selection(text.lstrip("^")), parse_selection("^" + text.lstrip("^"))
    if selection.entries:
        assert selection.covers("mlx5_0", 1) != opposite.covers("mlx5_0", 1)
