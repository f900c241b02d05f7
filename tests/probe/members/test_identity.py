"""Which member this machine is."""

from __future__ import annotations

import ipaddress
import subprocess
from collections.abc import Callable, Iterable

import pytest

from dshealthd.probe.members.hostlist import MembershipError
from dshealthd.probe.members.own_name import is_local, own_name

NONE = "by name or address; set name to the right one"
TWO = "name: this node matches more than one member"
WHICH = "set name to the right one"


def among(addresses: Iterable[str]) -> Callable[[str], bool]:
    """Return whether an address is one of these, however it is written."""
    own = {*map(ipaddress.ip_address, addresses)}

    def is_one(address: str) -> bool:
        try:
            return ipaddress.ip_address(address) in own
        except ValueError:
            return False

    return is_one


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
    assert own_name(names, hostname, name, among(addresses)) == expected


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
        own_name(names, hostname, name, among(addresses))
    assert error.value.errors == (reason,)


@pytest.mark.parametrize(
    "address", ["192.0.2.1", "2001:db8::1", "127.0.0.1", "::1", "0.0.0.0", "224.0.0.1", "gpu1", ""]
)
def test_addresses_of_others(address: str) -> None:
    """Addresses of other machines, or of any, and names are not this machine's."""
    assert not is_local(address)


def test_addresses_of_this_machine() -> None:
    """They are those that ip(8) lists."""
    try:
        listing = subprocess.run(
            ["ip", "-o", "address", "show", "scope", "global"],
            capture_output=True,
            text=True,
            check=True,
        )
    except FileNotFoundError:
        pytest.skip("no ip(8)")
    mine = [line.split()[3].split("/")[0] for line in listing.stdout.splitlines()]
    assert all(map(is_local, mine))
