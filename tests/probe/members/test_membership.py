"""Who takes part in probes."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from dshealthd.probe.members.hostlist import MembershipError
from dshealthd.probe.members.membership import Member, Membership, load, parse_hostfile, parse_nodes
from dshealthd.probe.options import MembershipOptions

HOSTFILE = """\
# the training pool
worker-2 slots=8

worker-10   slots=8   # the old one
  worker-1\tslots=4 max_slots=8
"""


def answers(*addresses: str) -> Any:
    """Return a resolver that knows these addresses, in the format of `socket.getaddrinfo`."""

    def resolve(name: str, port: None, *, type: int) -> list[tuple[Any, ...]]:  # noqa: ARG001
        families = {True: socket.AF_INET6, False: socket.AF_INET}
        return [(families[":" in address], type, 6, "", (address, 0)) for address in addresses]

    return resolve


def test_hostfile() -> None:
    """A hostfile is read like DeepSpeed does. That includes comments, blank lines, any space, and
    anything after the number of slots.
    """
    assert parse_hostfile(HOSTFILE, "hostfile") == (
        Member("worker-2", 8),
        Member("worker-10", 8),
        Member("worker-1", 4),
    )
    assert parse_hostfile("a slots=0\r\nb slots=07x\rc slots=123456", "f") == (
        Member("a", 0),
        Member("b", 7),
        Member("c", 123_456),
    )


def test_every_bad_line_of_a_hostfile_is_named() -> None:
    """All errors are reported at once, with file and line."""
    text = (
        "a slots=8\nb\na slots=8\nc slot=8\nd/e slots=8\nf slots=1234567\nslots=8\n# g\ng "
        "slots = 8\n"
    )
    with pytest.raises(MembershipError) as error:
        parse_hostfile(text, "/job/hostfile")
    assert error.value.errors == (
        '/job/hostfile:2: "b" is not "NAME slots=COUNT"',
        '/job/hostfile:3: "a" is a duplicate of line 1',
        '/job/hostfile:4: "c slot=8" is not "NAME slots=COUNT"',
        '/job/hostfile:5: "d/e" is not a valid node name',
        '/job/hostfile:6: "f slots=1234567" is not "NAME slots=COUNT"',
        '/job/hostfile:7: "slots=8" is not "NAME slots=COUNT"',
        '/job/hostfile:9: "g slots = 8" is not "NAME slots=COUNT"',
    )
    assert str(error.value) == "\n".join(error.value.errors)


def test_empty_hostfile() -> None:
    """A hostfile without a host is an error, as it is for DeepSpeed."""
    with pytest.raises(MembershipError, match=r"^f: names no host$"):
        parse_hostfile("\n# nobody\n", "f")


def test_load_hostfile_and_topology(tmp_path: Path) -> None:
    """Members are sorted by name whatever their order in the file, each with its slots and leaf."""
    (tmp_path / "hostfile").write_text(HOSTFILE)
    (tmp_path / "topology.conf").write_text("SwitchName=leaf1 Nodes=worker-[1-9]\n")
    membership = load(
        MembershipOptions(hostfile=tmp_path / "hostfile", topology=tmp_path / "topology.conf")
    )
    assert membership.names == ("worker-1", "worker-10", "worker-2")
    assert [member.slots for member in membership.members] == [4, 8, 8]
    assert membership.leaves == {"worker-1": "leaf1", "worker-10": "", "worker-2": "leaf1"}
    assert membership.source == f"hostfile {tmp_path}/hostfile"


def test_load_list_and_slurm() -> None:
    """A list and a Slurm expression of the same nodes give the same members, without slots."""
    listed = load(MembershipOptions(nodes=("login1", "gpu01", "gpu02")))
    assert listed.members == (Member("gpu01"), Member("gpu02"), Member("login1"))
    assert listed.leaves == {"gpu01": "", "gpu02": "", "login1": ""}
    assert listed.digest == load(MembershipOptions(slurm="login1,gpu[01-02]")).digest


def test_load_dns() -> None:
    """The addresses of a DNS name are members; a node with both kinds counts once."""
    options = MembershipOptions(dns="probes.example.org")
    assert load(options, answers("10.0.0.2", "10.0.0.10", "10.0.0.2", "fd00::2")).names == (
        "10.0.0.10",
        "10.0.0.2",
    )
    assert load(options, answers("fd00::2", "fe80::2%eth0", "fd00:0::1")).names == (
        "fd00::1",
        "fd00::2",
    )


def test_dns_that_does_not_answer() -> None:
    """A name without addresses, or a failing name server, is an error and not an empty list."""

    def fail(*_: object, **__: object) -> list[tuple[Any, ...]]:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    options = MembershipOptions(dns="probes.example.org")
    with pytest.raises(
        MembershipError,
        match=r'^probe.members.dns: "probes.example.org" cannot be resolved: \[Errno -3',
    ):
        load(options, fail)
    with pytest.raises(
        MembershipError, match=r'^probe.members.dns: "probes.example.org" has no address$'
    ):
        load(options, answers())
    with pytest.raises(MembershipError, match=r'^probe.members.dns: "a..b" cannot be resolved: '):
        load(MembershipOptions(dns="a..b"))


def test_errors_of_both_files_are_told_at_once(tmp_path: Path) -> None:
    """A bad hostfile does not hide errors in the topology."""
    hosts, tree = tmp_path / "h", tmp_path / "t"
    hosts.write_text("a slots=8\nb\n")
    tree.write_bytes(b"SwitchName=s Nodes=a\n\xff\n")
    with pytest.raises(MembershipError) as error:
        load(MembershipOptions(hostfile=hosts, topology=tree))
    assert error.value.errors == (
        f'{hosts}:2: "b" is not "NAME slots=COUNT"',
        f"{tree}:2: is not UTF-8: invalid start byte",
    )
    tree.write_text("SwitchName=s Nodes=a[\n")
    with pytest.raises(MembershipError) as error:
        load(MembershipOptions(hostfile=hosts, topology=tree))
    assert error.value.errors[1:] == (f'{tree}:1: "a[" has nested brackets or an unmatched one',)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file, a directory, a pipe without a writer and an endless file are errors, and none
    of them blocks.
    """
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "long").open("wb") as file:
        file.truncate(1 << 24)
    for name, reason in {
        "missing": "cannot be read: No such file or directory",
        ".": "cannot be read: not a regular file",
        "pipe": "cannot be read: not a regular file",
        "long": "cannot be read: longer than 8388608 bytes",
    }.items():
        with pytest.raises(MembershipError) as error:
            load(MembershipOptions(hostfile=tmp_path / name))
        assert error.value.errors == (f"{tmp_path / name}: {reason}",)


def test_one_source() -> None:
    """No source, or several, is an error."""
    for options in (MembershipOptions(), MembershipOptions(nodes=("a",), slurm="b")):
        with pytest.raises(
            MembershipError, match=r"set (only )?one of hostfile, nodes, dns, slurm$"
        ):
            load(options)
    assert MembershipOptions().sources == ()


def test_bad_list() -> None:
    """Every bad entry of a list is reported by its position."""
    with pytest.raises(MembershipError) as error:
        parse_nodes(("a", "a b", "a", ""))
    assert error.value.errors == (
        'probe.members.nodes: entry 2, "a b", is not a valid node name',
        'probe.members.nodes: entry 3, "a", is a duplicate',
        'probe.members.nodes: entry 4, "", is not a valid node name',
    )


def test_digest() -> None:
    """The digest depends on names, slots and leaves but not on their order or source, and a sample
    holds it exactly.
    """
    one = Membership((Member("a", 8), Member("b", 8)), {"a": "s", "b": "s"}, "list")
    assert one.digest == Membership(one.members, {"b": "s", "a": "s"}, "hostfile").digest
    others = [
        Membership((Member("a", 8), Member("c", 8)), {"a": "s", "c": "s"}, "list"),
        Membership((Member("a", 8), Member("b", 4)), {"a": "s", "b": "s"}, "list"),
        Membership((Member("a", 8), Member("b")), {"a": "s", "b": "s"}, "list"),
        Membership((Member("a", 8), Member("b", 8)), {"a": "s", "b": ""}, "list"),
        Membership((Member("a", 8),), {"a": "s"}, "list"),
    ]
    assert len({one.digest, *(other.digest for other in others)}) == 6
    assert len(one.digest) == 12
    assert int(float(one.digest_number)) == int(one.digest, 16)


def test_digest_is_the_same_in_every_version() -> None:
    """Agents of different versions compare digests, so the input of the digest never changes."""
    assert (
        Membership((Member("a", 8), Member("b")), {"a": "s", "b": ""}, "").digest == "10f1cdaba75a"
    )
