"""Which member this machine is."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

from dshealthd.core.host import Host
from dshealthd.probe.members.hostlist import MembershipError
from dshealthd.probe.members.own_name import (
    local_addresses,
    own_name,
    parse_fib_trie,
    parse_if_inet6,
)

NONE = "by name or address; set name to the right one"
TWO = "name: this node matches more than one member"
WHICH = "set name to the right one"


@pytest.mark.parametrize(("names", "hostname", "addresses", "name", "expected"), [
    (["gpu1", "gpu2"], "gpu1", [], "", "gpu1"),
    (["gpu1", "gpu2"], "gpu1", [], "gpu2", "gpu2"),
    (["gpu1", "gpu2"], "gpu2.example.org", [], "", "gpu2"),
    (["gpu1.example.org", "gpu2.example.org"], "gpu2", [], "", "gpu2.example.org"),
    (["gpu1", "gpu2"], "GPU2.example.org.", [], "", "gpu2"),
    (["gpu1", "gpu1.example.org"], "gpu1.example.org", [], "", "gpu1.example.org"),
    (["10.0.0.1", "10.0.0.2"], "ip-10-0-0-2", ["10.0.0.2", "fd00::2"], "", "10.0.0.2"),
    (["fd00:0::1", "fd00:0::2"], "n", ["10.0.0.2", "fd00::2"], "", "fd00:0::2"),
    (["gpu1", "10.0.0.2"], "gpu1", ["10.0.0.2"], "", "gpu1"),
])  # fmt: skip
def test_own_name(
    names: list[str], hostname: str, addresses: list[str], name: str, expected: str
) -> None:
    """The option, the host name, its first label, and an address decide in this order."""
    assert own_name(names, hostname, addresses, name) == expected


@pytest.mark.parametrize(
    ("names", "hostname", "addresses", "name", "reason"),
    [
        (["a", "b"], "a", [], "c", 'name: "c" is not one of the 2 members'),
        (
            ["worker-1", "worker-2"],
            "ip-10-0-0-2",
            ["10.0.0.2"],
            "",
            f'name: host "ip-10-0-0-2" matches none of the 2 members {NONE}',
        ),
        (["gpu1.a", "gpu1.b"], "gpu1", [], "", f'{TWO} ("gpu1.a", "gpu1.b"); {WHICH}'),
        (["10.0.0.1", "fd00::1"], "x", ["10.0.0.1", "fd00::1"], "", (f'{TWO} ("10.0.0.1", '
                                                                     f'"fd00::1"); {WHICH}')),
        (["gpu1.a"], "gpu1.b", [], "", f'name: host "gpu1.b" matches none of the 1 members {NONE}'),
        (["10.0.0.1"], "10", [], "", f'name: host "10" matches none of the 1 members {NONE}'),
    ],
)  # fmt: skip
def test_no_member(
    names: list[str], hostname: str, addresses: list[str], name: str, reason: str
) -> None:
    """A machine that is no member, or could be two, is told how to identify it."""
    with pytest.raises(MembershipError) as error:
        own_name(names, hostname, addresses, name)
    assert error.value.errors == (reason,)


FIB_TRIE = """\
Main:
  +-- 0.0.0.0/0 3 0 4
     |-- 0.0.0.0
        /0 universe UNICAST
     +-- 10.0.0.0/24 2 0 2
        |-- 10.0.0.0
           /24 link UNICAST
Local:
  +-- 0.0.0.0/0 3 0 4
     +-- 10.0.0.0/24 2 0 2
        |-- 10.0.0.7
           /32 host LOCAL
        |-- 10.0.0.255
           /32 link BROADCAST
     +-- 127.0.0.0/8 2 0 2
        |-- 127.0.0.0
           /8 host LOCAL
        |-- 127.0.0.1
           /32 host LOCAL
"""


def test_addresses_of_the_kernel() -> None:
    """Only own addresses count: no route, no broadcast and no link-local address."""
    assert parse_fib_trie(FIB_TRIE) == ["10.0.0.7", "127.0.0.1"]
    assert parse_if_inet6(
        "fd000000000000000000000000000007 02 40 00 80     eth0\nfe80000000000000021132fffe000007 "
        "02 40 20 80     eth0\n00000000000000000000000000000001 01 80 10 80       "
        "lo\nbroken\nzz000000000000000000000000000007 02 40 00 80     eth0\n"
    ) == ["fd00::7", "::1"]


def test_local_addresses(tmp_path: Path) -> None:
    """Loopback addresses are left out; a kernel without the files has no address."""
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "fib_trie").write_text(FIB_TRIE)
    assert local_addresses(Host(procfs=tmp_path)) == ("10.0.0.7",)
    assert local_addresses(Host(procfs=tmp_path / "nothing")) == ()


def test_local_addresses_of_this_machine() -> None:
    """The addresses are those that ip(8) lists, or can be bound where there is no ip(8)."""
    mine = local_addresses(Host())
    for address in mine:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as probe:
            probe.bind((address, 0))
    try:
        listing = subprocess.run(
            ["ip", "-o", "-4", "address", "show", "scope", "global"],
            capture_output=True,
            text=True,
            check=True,
        )
    except FileNotFoundError:
        return
    assert {a for a in mine if ":" not in a} == {
        line.split()[3].split("/")[0] for line in listing.stdout.splitlines()
    }
