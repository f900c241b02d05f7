"""The limits of TCP: on a fixture, and against this kernel's sysctls and `ss`."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

from dshealthd.core.collector import Reason
from dshealthd.core.result import CollectionOutcome
from dshealthd.linux.local_network import parse_range, parse_reserved
from dshealthd.linux.tcp_sockets import FEW
from tests.collectors.bench import Bench, copied, named, write
from tests.netns import V4, V6, connection, leave_time_wait, listener, network_namespace


def ports_of_ss() -> set[int]:
    """Return all local ports that `ss` lists."""
    lines = subprocess.run(
        ["ss", "-tanH"], check=True, capture_output=True, text=True, timeout=60
    ).stdout.splitlines()
    return {int(line.split()[3].rpartition(":")[2]) for line in lines}


def test_reserved_ports_are_not_in_use(tmp_path: Path) -> None:
    """A socket on a reserved port takes none that the kernel gives out."""
    base = copied("tcp", tmp_path)
    before = named(Bench("tcp_limits", base).collect(), "tcp_")
    # 0x8d60, an established client of the fixture
    write(base, {"proc/sys/net/ipv4/ip_local_reserved_ports": "36192"})
    after = named(Bench("tcp_limits", base).collect(), "tcp_")
    assert after["ephemeral_ports_used",] == before["ephemeral_ports_used",] - 1
    assert after["ephemeral_ports",] == 60999 - 32768


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
        ours, truth = named(Bench("tcp_limits").collect(), "tcp_"), ports_of_ss()
        for end in ends:
            end.close()
        limit = int(Path("/proc/sys/net/ipv4/tcp_max_tw_buckets").read_text())
    assert ours["ephemeral_ports_used",] == len([port for port in truth if 32768 <= port <= 60999])
    assert ours["ephemeral_ports_used",] > (FEW / 2 if many else 5)
    assert ours["time_wait_limit",] == limit


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
    net = tmp_path / "proc/sys/net"
    write(net, {"ipv4/tcp_max_tw_buckets": "4096"})
    assert named(Bench("tcp_limits", tmp_path).collect()) == {("tcp_time_wait_limit",): 4096}
    write(net / "netfilter", {"nf_conntrack_count": "260000", "nf_conntrack_max": "262144"})
    assert named(Bench("tcp_limits", tmp_path).collect()) == {
        ("tcp_time_wait_limit",): 4096,
        ("conntrack_entries",): 260000,
        ("conntrack_entries_limit",): 262144,
    }


def test_no_setting_can_be_read(tmp_path: Path) -> None:
    """A machine on which every setting that there is fails is an error, not one without them."""
    write(tmp_path, {"proc/sys/net/ipv4/tcp_max_tw_buckets": ""})
    result = Bench("tcp_limits", tmp_path).collect()
    assert (result.outcome, result.reason) == (CollectionOutcome.ERROR, Reason.MALFORMED)
