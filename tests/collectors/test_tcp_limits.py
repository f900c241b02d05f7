"""The limits of TCP: on a fixture, and against this kernel's sysctls and `ss`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dshealthd.collectors.tcp_limits import TcpLimits
from dshealthd.core.collector import Context, Reason
from dshealthd.core.host import Host
from dshealthd.core.result import CollectionOutcome, Result, attempt
from dshealthd.linux.local_network import parse_range, parse_reserved
from dshealthd.linux.sockets import FEW
from tests.netns import V4, V6, connection, leave_time_wait, listener, network_namespace

if TYPE_CHECKING:
    import socket

FIXTURES = Path(__file__).parent / "fixtures"
PREFIX = "dshealthd_tcp_"


def collect(procfs: Path = Path("/proc")) -> Result:
    """Collect once from a `/proc`."""
    context = Context(host=Host(procfs=procfs))
    return attempt(TcpLimits(TcpLimits.Options(), context))


def values(result: Result) -> dict[str, float]:
    """Return the values by what follows the prefix of their names."""
    return {metric.name.removeprefix(PREFIX): value for metric, _, value in result.samples}


def ports_of_ss() -> set[int]:
    """Return all local ports that `ss` lists."""
    lines = subprocess.run(
        ["ss", "-tanH"], check=True, capture_output=True, text=True, timeout=60
    ).stdout.splitlines()
    return {int(line.split()[3].rpartition(":")[2]) for line in lines}


def test_reserved_ports_are_not_in_use(tmp_path: Path) -> None:
    """A socket on a reserved port takes nothing from what the kernel gives out, so that in use
    never exceeds the total.
    """
    shutil.copytree(FIXTURES / "tcp/proc", tmp_path, dirs_exist_ok=True)
    before = values(collect(tmp_path))
    (tmp_path / "sys/net/ipv4/ip_local_reserved_ports").write_text(
        "36192\n"
    )  # 0x8d60, an established client of the fixture
    after = values(collect(tmp_path))
    assert after["ephemeral_ports_used"] == before["ephemeral_ports_used"] - 1
    assert after["ephemeral_ports"] == 60999 - 32768


@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
def test_ports_in_use_agree_with_ss(*, many: bool) -> None:
    """Distinct local ports inside the range, TIME_WAIT too, are what `ss` lists."""
    with network_namespace():
        ends: list[socket.socket] = []
        for address in (V4, V6):
            port = listener(address, 29500)
            ends += [port, *connection(port)]
            leave_time_wait(port, FEW // 2 + 10 if many else 5, server=False)
            leave_time_wait(port, 5, server=True)
        ours, truth = values(collect()), ports_of_ss()
        for end in ends:
            end.close()
        limit = int(Path("/proc/sys/net/ipv4/tcp_max_tw_buckets").read_text())
    first, last = int(ours["ephemeral_port_first"]), int(ours["ephemeral_port_last"])
    assert (first, last) == (32768, 60999)
    assert ours["ephemeral_ports_used"] == len([port for port in truth if first <= port <= last])
    assert ours["ephemeral_ports_used"] > (FEW / 2 if many else 5)
    assert ours["time_wait_limit"] == limit


def test_one_unreadable_setting_leaves_the_others(tmp_path: Path) -> None:
    """A malformed sysctl is a fault of its own; a missing one is left out, without a fault."""
    shutil.copytree(FIXTURES / "tcp/proc", tmp_path, dirs_exist_ok=True)
    (tmp_path / "sys/net/ipv4/tcp_max_tw_buckets").write_text("many\n")
    (tmp_path / "sys/net/netfilter/nf_conntrack_max").unlink(missing_ok=True)
    result = collect(tmp_path)
    assert result.outcome is CollectionOutcome.OK
    assert [(fault.part, fault.reason) for fault in result.faults] == [
        ("net/ipv4/tcp_max_tw_buckets", Reason.MALFORMED)
    ]
    assert values(result).keys() == {
        *("ephemeral_port_first", "ephemeral_port_last"),
        *("ephemeral_ports", "ephemeral_ports_used"),
    }


def test_nothing_is_not_available(tmp_path: Path) -> None:
    """A machine without these sysctls is an ordinary machine; one where none can be read is not."""
    assert collect(tmp_path).outcome is CollectionOutcome.NOT_AVAILABLE
    (tmp_path / "sys/net/ipv4").mkdir(parents=True)
    (tmp_path / "sys/net/ipv4/tcp_max_tw_buckets").write_text("")
    result = collect(tmp_path)
    assert (result.outcome, result.reason, len(result.faults)) == (
        CollectionOutcome.ERROR,
        Reason.MALFORMED,
        1,
    )


def test_ranges() -> None:
    """Ports are parsed as the kernel writes them; a range that ends before it begins is refused."""
    assert parse_range("32768\t60999\n") == range(32768, 61000)
    assert parse_reserved("8080,9000-9002\n") == {8080, 9000, 9001, 9002}
    assert parse_reserved("\n") == set()
    for malformed in ("", "1", "2 1", "a b"):
        with pytest.raises(ValueError, match=r".+"):
            parse_range(malformed)


def test_connections_of_the_firewall(tmp_path: Path) -> None:
    """A kernel that follows connections tells how many and of how many; another tells neither."""
    place = tmp_path / "sys/net/netfilter"
    place.mkdir(parents=True)
    (tmp_path / "sys/net/ipv4").mkdir()
    (tmp_path / "sys/net/ipv4/tcp_max_tw_buckets").write_text("4096\n")

    def told() -> dict[str, float]:
        found = {sample.metric.name: sample.value for sample in collect(tmp_path).samples}
        return {name: value for name, value in found.items() if "conntrack" in name}

    assert told() == {}
    (place / "nf_conntrack_count").write_text("260000\n")
    (place / "nf_conntrack_max").write_text("262144\n")
    assert told() == {
        "dshealthd_conntrack_entries": 260000,
        "dshealthd_conntrack_entries_limit": 262144,
    }
