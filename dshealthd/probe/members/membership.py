"""The members of probes, loaded from a hostfile, a list, a DNS name or a Slurm node list."""

from __future__ import annotations

import functools
import hashlib
import ipaddress
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dshealthd.core import documents
from dshealthd.core.host import read_named
from dshealthd.probe.members import topology
from dshealthd.probe.members.hostlist import (
    MAX_NAMES,
    HostlistError,
    MembershipError,
    expand,
    is_name,
    quote,
)

if TYPE_CHECKING:
    from pathlib import Path

    from dshealthd.probe.options import MembershipOptions

_MAX_BYTES = 1 << 23
_MAX_SLOTS_DIGITS = 6

# DeepSpeed's own pattern (launcher/runner.py, _parse_hostfile): it ignores whatever follows the
# digits.
_HOSTFILE_LINE = re.compile(r"(\S+)\s+slots=(\d+)")


@dataclass(frozen=True, slots=True)
class Member:
    """One node."""

    name: str
    slots: int | None = None
    """GPUs that training may use there, if the source says so."""


@dataclass(frozen=True)
class Membership:
    """All members, as one agent knows them."""

    members: tuple[Member, ...]
    """Sorted by name."""
    leaves: Mapping[str, str]
    """The leaf switch of each member, "" where unknown."""
    source: str
    """Source of the list, in words for people."""

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The members' names, sorted."""
        return tuple(member.name for member in self.members)

    @functools.cached_property
    def digest(self) -> str:
        """12 hexadecimal digits of a hash of names, slots and leaves. The source does not count."""
        rows = [
            [member.name, member.slots, self.leaves.get(member.name, "")] for member in self.members
        ]
        return hashlib.blake2b(documents.dumps(rows).encode(), digest_size=6).hexdigest()

    @property
    def digest_number(self) -> int:
        """The membership's digest as a number below 2^48, which a sample's float holds exactly."""
        return int(self.digest, 16)


def load(
    options: MembershipOptions,
    resolve: Callable[..., Iterable[tuple[Any, ...]]] = socket.getaddrinfo,
) -> Membership:
    """Return the members listed by the configured source, with their leaves. Raises MembershipError
    with all errors. `resolve` is called like `socket.getaddrinfo`, for a DNS name only. Reads files
    and may wait for DNS: do not call it in an event loop.
    """
    if len(options.sources) != 1:
        count = "only one" if options.sources else "one"
        raise MembershipError([f"probe.members: set {count} of hostfile, nodes, dns, slurm"])
    errors: list[str] = []
    members: tuple[Member, ...] = ()
    switches: Mapping[str, list[str]] = {}
    try:
        members, source = _members(options, resolve)
    except MembershipError as error:
        errors += error.errors
    if options.topology is not None:
        try:
            switches = topology.parse(_text(options.topology), str(options.topology))
        except MembershipError as error:
            errors += error.errors
    if errors:
        raise MembershipError(errors)
    members = tuple(sorted(members, key=lambda member: member.name))
    return Membership(
        members, topology.leaves(switches, (member.name for member in members)), source
    )


def _members(
    options: MembershipOptions, resolve: Callable[..., Iterable[tuple[Any, ...]]]
) -> tuple[tuple[Member, ...], str]:
    """Return the members in the order of their source, and the source in words."""
    if options.hostfile is not None:
        return parse_hostfile(
            _text(options.hostfile), str(options.hostfile)
        ), f"hostfile {options.hostfile}"
    if options.nodes:
        return parse_nodes(options.nodes), "list"
    if options.slurm:
        try:
            return tuple(map(Member, expand(options.slurm))), "slurm"
        except HostlistError as error:
            raise MembershipError([f"probe.members.slurm: {error}"]) from error
    return tuple(map(Member, _addresses(options.dns, resolve))), f"dns {options.dns}"


def parse_hostfile(text: str, place: str) -> tuple[Member, ...]:
    """Return the members of a DeepSpeed hostfile, in its order.

    Raises MembershipError; `place` is the name of the file in its lines.

    Parsed like DeepSpeed's runner does: `NAME slots=COUNT`, anything after it ignored; blank lines
    and lines that begin with `#` are skipped; a duplicate host is an error, and so is a file
    without any host. In addition, each name must be valid for a host.
    """
    errors: list[str] = []
    lines: dict[str, int] = {}
    members: list[Member] = []
    for number, raw in enumerate(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        match = _HOSTFILE_LINE.match(line)
        if match is None or len(match[2]) > _MAX_SLOTS_DIGITS:
            errors.append(f'{place}:{number}: {quote(line)} is not "NAME slots=COUNT"')
        elif not is_name(match[1]):
            errors.append(f"{place}:{number}: {quote(match[1])} is not a valid node name")
        elif match[1] in lines:
            errors.append(
                f"{place}:{number}: {quote(match[1])} is a duplicate of line {lines[match[1]]}"
            )
        else:
            lines[match[1]] = number
            members.append(Member(match[1], int(match[2])))
    if not members and not errors:
        errors.append(f"{place}: names no host")
    if len(members) > MAX_NAMES:
        errors.append(f"{place}: has {len(members)} hosts; the maximum is {MAX_NAMES}")
    if errors:
        raise MembershipError(errors)
    return tuple(members)


def parse_nodes(names: Iterable[str]) -> tuple[Member, ...]:
    """Return the members of a list; MembershipError for an invalid or duplicate name."""
    key, errors = "probe.members.nodes", list[str]()
    seen: dict[str, None] = {}
    for position, name in enumerate(names, 1):
        if not is_name(name):
            errors.append(f"{key}: entry {position}, {quote(name)}, is not a valid node name")
        elif name in seen:
            errors.append(f"{key}: entry {position}, {quote(name)}, is a duplicate")
        seen[name] = None
    if len(seen) > MAX_NAMES:
        errors.append(f"{key}: has {len(seen)} entries; the maximum is {MAX_NAMES}")
    if errors:
        raise MembershipError(errors)
    return tuple(map(Member, seen))


def _addresses(name: str, resolve: Callable[..., Iterable[tuple[Any, ...]]]) -> tuple[str, ...]:
    """Return the addresses of a DNS name, each of which is a member. They are of one family, so
    that a node with both is one member. There is no reverse lookup: a resolver without the reverse
    zone takes seconds for each address, and its answer need not be the node's own name.
    """
    try:
        answers = list(resolve(name, None, type=socket.SOCK_STREAM))
    except (
        OSError,
        UnicodeError,
    ) as error:  # UnicodeError: from the IDNA codec, for an empty or overlong label
        raise MembershipError(
            [f"probe.members.dns: {quote(name)} cannot be resolved: {error}"]
        ) from error
    found = [
        ipaddress.ip_address(answer[4][0])
        for answer in answers
        if answer[0] in (socket.AF_INET, socket.AF_INET6)
    ]
    # A link-local address means nothing without the name of an interface, which differs between
    # nodes.
    usable = [
        address
        for address in found
        if not (isinstance(address, ipaddress.IPv6Address) and address.is_link_local)
    ]
    chosen = [address for address in usable if isinstance(address, ipaddress.IPv4Address)] or usable
    if not chosen:
        raise MembershipError([f"probe.members.dns: {quote(name)} has no address"])
    return tuple(dict.fromkeys(str(address) for address in chosen))


def _text(file: Path) -> str:
    """Return the text of a file; raises MembershipError, with the line that is not UTF-8."""
    try:
        content = read_named(file, _MAX_BYTES)
    except OSError as error:
        raise MembershipError([f"{file}: cannot be read: {error.strerror}"]) from error
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise MembershipError([f"{file}:{line}: is not UTF-8: {error.reason}"]) from error
