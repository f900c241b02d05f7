"""The members as one agent knows them, and which of them it is."""

from __future__ import annotations

import ipaddress
import logging
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from dshealthd.core import background
from dshealthd.probe.members import local_membership
from dshealthd.probe.members.hostlist import MembershipError
from dshealthd.probe.members.local_membership import (
    HASH,
    MEMBERS,
    OK,
    LocalMembership,
    is_local,
    own_name,
)
from dshealthd.probe.members.membership import Member, Membership, load
from dshealthd.probe.options import MembershipOptions
from tests.netns import network_namespace
from tests.probe.peering import Time, may_block

NONE = "by name or address; set it to the right one"
KEY = "probe.members.name:"
TWO = f"{KEY} this node matches more than one member"
WHICH = "set it to the right one"


@may_block
async def test_members_that_change(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A list is new if its members differ, or who of them this node is. One that cannot be used is
    said once, and the one before stays.
    """
    caplog.set_level(logging.INFO)
    file, host = tmp_path / "hostfile", ["a"]
    known = LocalMembership(MembershipOptions(hostfile=file), lambda: host[0], Time())
    with pytest.raises(LookupError):
        assert known.membership
    differs = []
    for text, name in (
        (None, "a"),
        ("a slots=8\nb slots=8\n", "a"),
        ("# the same\nb slots=8\na slots=8\n", "a"),
        ("a slots=8\nb slots=8\n", "b"),
        ("a slots=8\nb slots=4\n", "b"),
        ("a slots=?\n", "b"),
        ("a slots=?\n", "b"),
        ("a slots=8\nb slots=4\n", "b"),
    ):
        host[0] = name
        if text is not None:
            file.write_text(text, encoding="ascii")
        differs.append((await known.refresh(again=True), bool(known.errors)))
    assert differs == [
        *((False, True), (True, False), (False, False), (True, False), (True, False)),
        *((False, True), (False, True), (False, False)),
    ]
    assert (known.known, known.me, known.membership.names) == (True, "b", ("a", "b"))
    assert sum("not usable, keeping" in one.message for one in caplog.records) == 1
    found = {sample.metric: sample.value for sample in known.samples()}
    assert found == {MEMBERS: 2.0, HASH: float(known.membership.digest_number), OK: 1.0}


@may_block
async def test_members_are_read_when_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that are as they were are not read again, unless they were no good or that is asked."""
    hosts, tree, new = (tmp_path / name for name in ("hosts", "tree", "new"))
    hosts.write_text("a slots=8\nb slots=8\n", encoding="ascii")
    tree.write_text("SwitchName=s Nodes=a\n", encoding="ascii")
    options = MembershipOptions(hostfile=hosts, topology=tree)
    known, reads = LocalMembership(options, lambda: "a", Time()), list[MembershipOptions]()

    def counted(given: MembershipOptions) -> Membership:
        reads.append(given)
        return load(given)

    monkeypatch.setattr(local_membership, "load", counted)

    async def is_read(*, again: bool = False) -> bool:
        reads.clear()
        await known.refresh(again=again)
        return bool(reads)

    assert [await is_read() for _ in range(2)] == [True, False]
    tree.write_text("SwitchName=s Nodes=a,b\n", encoding="ascii")
    assert [await is_read() for _ in range(2)] == [True, False]
    new.write_text("a slots=8\nc slots=8\n", encoding="ascii")
    new.rename(hosts)
    assert [await is_read() for _ in range(2)] == [True, False]
    assert [await is_read(again=again) for again in (True, False)] == [True, False]
    known.errors = ("a name server did not answer",)
    assert [await is_read() for _ in range(2)] == [True, False]
    hosts.unlink()
    assert [await is_read() for _ in range(2)] == [True, True]


@may_block
async def test_a_dns_name_is_looked_up_every_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not before."""
    clock, reads = Time(), list[float]()

    def resolved(_options: MembershipOptions) -> Membership:
        reads.append(clock.now)
        return Membership((Member("a"),), {}, "dns")

    monkeypatch.setattr(local_membership, "load", resolved)
    known = LocalMembership(MembershipOptions(dns="all.gpu"), lambda: "a", clock)
    begun = clock.now
    for seconds in (0.0, 59.0, 60.0, 61.0, 119.0, 120.5):
        clock.now = begun + seconds
        await known.refresh()
    assert [at - begun for at in reads] == [0.0, 60.0, 120.5]


async def test_a_source_that_hangs_is_waited_for_ten_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then the members are those that were known."""

    async def call(*given: object) -> None:
        assert given[1:3] == ("members", 10.0)
        raise TimeoutError

    monkeypatch.setattr(background, "call", call)
    known = LocalMembership(MembershipOptions(dns="all.gpu"), lambda: "a", Time())
    assert not await known.refresh()
    assert known.errors == ("all.gpu could not be read within 10 s",)


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
        (["a", "b"], "a", [], "c", f'{KEY} "c" is not one of the 2 members'),
        (
            ["worker-1", "worker-2"],
            "ip-10-0-0-2",
            ["10.0.0.2"],
            "",
            f'{KEY} host "ip-10-0-0-2" matches none of the 2 members {NONE}',
        ),
        (["gpu1.a", "gpu1.b"], "gpu1", [], "", f'{TWO} ("gpu1.a", "gpu1.b"); {WHICH}'),
        (["10.0.0.1", "fd00::1"], "x", ["10.0.0.1", "fd00::1"], "", (f'{TWO} ("10.0.0.1", '
                                                                     f'"fd00::1"); {WHICH}')),
        (["gpu1.a"], "gpu1.b", [], "", f'{KEY} host "gpu1.b" matches none of the 1 members {NONE}'),
        (["10.0.0.1"], "10", [], "", f'{KEY} host "10" matches none of the 1 members {NONE}'),
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


def test_an_address_that_only_may_be_bound() -> None:
    """A node that takes over a virtual address is allowed to bind any: it has not all of them."""
    with network_namespace():
        subprocess.run(
            ["ip", "link", "add", "e0", "type", "veth", "peer", "name", "e1"], check=True
        )
        for address in (["192.0.2.2/24"], ["2001:db8::2/64", "nodad"]):
            subprocess.run(["ip", "address", "add", *address, "dev", "e0"], check=True)
        for end in ("e0", "e1"):
            subprocess.run(["ip", "link", "set", end, "up"], check=True)
        for family in ("ipv4", "ipv6"):
            subprocess.run(["sysctl", "-qw", f"net.{family}.ip_nonlocal_bind=1"], check=True)
        assert is_local("192.0.2.2")
        assert is_local("2001:db8::2")
        assert not is_local("192.0.2.1")
        assert not is_local("2001:db8::1")
