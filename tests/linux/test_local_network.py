"""Ports, routes and bridges of a node, from its kernel's files."""

from __future__ import annotations

import subprocess
import sys
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from dshealthd.core.host import Host
from dshealthd.linux.local_network import container_networks, local_ports, parse_reserved
from tests.collectors.bench import write


def assigning(procfs: Path, ports: str, reserved: str = "") -> Host:
    """Return a host whose kernel assigns these ports, but for those that are reserved."""
    settings = {"ip_local_port_range": ports, "ip_local_reserved_ports": reserved}
    write(procfs / "sys/net/ipv4", settings)
    return Host(procfs=procfs)


def test_reserved_ports_are_not_assigned(tmp_path: Path) -> None:
    """The kernel assigns the ephemeral range without what is reserved."""
    ports = local_ports(assigning(tmp_path, "32768\t60999", "8080,40000-40002"))
    assert [port in ports for port in (32767, 32768, 39999, 40001, 60999, 61000)] == [
        *(False, True, True, False, True, False)
    ]
    assert str(ports) == "32768-60999"
    with pytest.raises(ValueError, match="not a range"):
        local_ports(assigning(tmp_path, "60999\t32768"))


@pytest.mark.parametrize(("reserved", "after"), [
    ("", "29500-29600"),
    ("8080,9000-9010", "8080,9000-9010,29500-29600"),
    ("29400-29550,29700", "29400-29600,29700"),
    ("29601", "29500-29601"),
])  # fmt: skip
def test_reserving_keeps_what_is_reserved(reserved: str, after: str, tmp_path: Path) -> None:
    """The command that reserves ports leaves those in place that the administrator has reserved."""
    command = local_ports(assigning(tmp_path, "20000\t60999", reserved)).reserving(29500, 29600)
    assert command == f"sysctl -w net.ipv4.ip_local_reserved_ports={after}"
    assert parse_reserved(reserved) <= parse_reserved(after)


def test_container_networks(tmp_path: Path) -> None:
    """A bridge of docker or docker-compose leads to containers; another does not."""
    lines = [
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT",
        "eth0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0",
        "docker0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0",
        "br-0123456789ab\t000012AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0",
        "br0\t0000000A\t00000000\t0001\t0\t0\t0\t000000FF\t0\t0\t0",
    ]
    write(tmp_path, {"net/route": "\n".join(lines)})
    assert container_networks(Host(procfs=tmp_path)) == [
        IPv4Network("172.17.0.0/16"),
        IPv4Network("172.18.0.0/16"),
    ]


ADDRESSES = """
ip link add d0 type veth peer name d1 && ip link set lo up && ip link set d0 up || exit 77
ip address add 10.9.9.1/24 dev d0 && ip address add 10.9.9.2/24 dev d0
ip address add 10.9.8.1/32 dev d0 label d0:vip && ip address add fd00::1/64 dev d0
exec "$@"
"""
ASK = """
import sys
from dshealthd.core.host import Host
from dshealthd.linux.local_network import interface_of
print(*(interface_of(address, Host()) for address in sys.argv[1:]))
"""


def test_interface_with_several_addresses() -> None:
    """Each address is of its interface, not only the first: a worker that got the loopback
    interface would meet no other node.
    """
    addresses = ["10.9.9.1", "10.9.9.2", "10.9.8.1", "fd00::1", "127.0.0.1", "10.9.7.1"]
    command = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", ADDRESSES, "sh"]
    command += [sys.executable, "-c", ASK, *addresses]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 77 or done.stderr.startswith("unshare:"):
        pytest.skip("network namespaces are not permitted here")
    assert done.stdout.split() == ["d0", "d0", "d0", "d0", "lo", "lo"], done.stderr
