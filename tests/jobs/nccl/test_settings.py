"""What NCCL makes of the values of its settings, lists of interfaces and adapters among them."""

from __future__ import annotations

import ctypes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshealthd.jobs.nccl.settings import (
    Misfit,
    number,
    parse_configuration,
    parse_selection,
    value_problem,
)


@given(st.text(st.sampled_from(" \t+-0123456789abcdefxX.,true"), min_size=1, max_size=25))
def test_numbers_are_those_of_strtoll(text: str) -> None:
    """NCCL reads numbers with strtoll(3) and base 0, and takes its default where that fails."""
    library = ctypes.CDLL(None, use_errno=True)
    library.strtoll.restype = ctypes.c_longlong
    ctypes.set_errno(0)
    value = library.strtoll(text.encode(), None, 0)
    assert number(text) == (None if ctypes.get_errno() else value)


@pytest.mark.parametrize(("name", "value", "wrong"), [
    ("NCCL_IB_TIMEOUT", "0x16", None),
    ("NCCL_IB_TIMEOUT", "", None),
    ("NCCL_IB_TIMEOUT", "99999999999999999999", Misfit.OUT_OF_RANGE),
    ("NCCL_IB_TIMEOUT", "22s", Misfit.NO_NUMBER),
    ("NCCL_P2P_DISABLE", "1 ", None),
    ("NCCL_P2P_DISABLE", "true", Misfit.NO_NUMBER),
    ("NCCL_NET_GDR_LEVEL", "PHB", None),
    ("NCCL_NET_GDR_LEVEL", "4", None),
    ("NCCL_NET_GDR_LEVEL", "phb", Misfit.OUT_OF_RANGE),
    ("NCCL_P2P_LEVEL", "NVLINK", Misfit.OUT_OF_RANGE),
    ("NCCL_NTHREADS", "300", Misfit.OUT_OF_RANGE),
    ("NCCL_SOCKET_FAMILY", "inet", Misfit.OUT_OF_RANGE),
    ("NCCL_ALGO", "Ring", None),
    ("NCCL_ALGO", "ring,collnetdirect;allreduce:tree,collnetdirect;broadcast:ring", None),
    ("NCCL_ALGO", "^NVLS", None),
    ("NCCL_ALGO", "rings", Misfit.OUT_OF_RANGE),
    ("NCCL_ALGO", "ring;tree", Misfit.OUT_OF_RANGE),
    ("NCCL_ALGO", "gather:ring", Misfit.OUT_OF_RANGE),
    ("NCCL_PROTO", "LL,Simple;allreduce:^LL", None),
    ("NCCL_PROTO", "LL256", Misfit.OUT_OF_RANGE),
    ("NCCL_NET", "anything", None),
    ("NCCL_SOCKET_IFNAME", "99", None),
])  # fmt: skip
def test_values(name: str, value: str, wrong: Misfit | None) -> None:
    """Values that NCCL refuses, or reads as something else, are reported as that."""
    assert value_problem(name, value) == wrong


RANGES = {
    "NCCL_IB_TIMEOUT": (1, 31),
    "NCCL_IB_RETRY_CNT": (0, 7),
    "NCCL_IB_SL": (0, 15),
    "NCCL_IB_TC": (0, 255),
    "NCCL_IB_QPS_PER_CONNECTION": (1, 128),
    "NCCL_SOCKET_NTHREADS": (1, 16),
    "NCCL_NSOCKS_PERTHREAD": (1, 64),
    "NCCL_MIN_CTAS": (1, 64),
    "NCCL_MAX_CTAS": (1, 64),
    "NCCL_IB_DISABLE": (0, 1),
    "NCCL_P2P_DISABLE": (0, 1),
    "NCCL_SHM_DISABLE": (0, 1),
    "NCCL_BUFFSIZE": (1, (1 << 63) - 1),
    "NCCL_COLLNET_ENABLE": (-(1 << 63), (1 << 63) - 1),
}


@pytest.mark.parametrize("name", RANGES)
def test_ranges(name: str) -> None:
    """The least and the greatest value are right, and those beyond them are not."""
    least, most = RANGES[name]
    assert {value_problem(name, str(value)) for value in (least, most)} == {None}
    beyond = {value_problem(name, str(value)) for value in (least - 1, most + 1)}
    assert beyond == {Misfit.OUT_OF_RANGE}


@given(
    st.sampled_from(["NCCL_IB_TIMEOUT", "NCCL_ALGO", "NCCL_P2P_LEVEL", "NCCL_NTHREADS"]),
    st.text(max_size=4096),
)
def test_any_value_is_judged(name: str, value: str) -> None:
    """Whatever a user writes is judged, and raises nothing."""
    assert value_problem(name, value) in {None, *Misfit}


def test_configuration_file() -> None:
    """Lines with `=` set variables; comments do not; the first of two counts."""
    data = (
        b"# NCCL_ALGO=Tree\nNCCL_IB_HCA=mlx5_0\r\nNCCL_IB_HCA=mlx5_1\nSECRET=x\nno "
        b"line\nNCCL_DEBUG=INFO\n NCCL_PROTO=LL\nNCCL_ALGO=a=b"
    )
    settings, lines = parse_configuration(data)
    assert settings == {"NCCL_IB_HCA": "mlx5_0", "NCCL_ALGO": "a=b"}
    assert [line.partition(b"=")[0] for line in lines.split(b"\0")].count(b"NCCL_DEBUG") == 1


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
