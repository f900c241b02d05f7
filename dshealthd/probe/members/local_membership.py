"""The local membership: the members as this agent knows them, and which of them it is, by its name
and addresses.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

from dshealthd.core import background
from dshealthd.core.collector import Sample, gauge
from dshealthd.core.host import signatures
from dshealthd.probe.members.hostlist import MembershipError, numeric, quote
from dshealthd.probe.members.membership import Membership, load

if TYPE_CHECKING:
    from dshealthd.probe.options import MembershipOptions

log = logging.getLogger(__name__)

MEMBERS = gauge("dshealthd_members", "Nodes in this agent's member list.")
HASH = gauge(
    "dshealthd_members_hash",
    "48-bit hash of the member list with slots and leaves; agents with different hashes run no "
    "rounds with each other.",
)
OK = gauge(
    "dshealthd_members_last_reload_successful",
    "1 if the member list was usable when last read; 0 while the previous list is kept.",
)

DEADLINE = 10.0
"""Timeout in seconds for reading the files or for DNS."""
DNS_INTERVAL = 60.0
"""Seconds between look-ups of a DNS name."""
KEY = "probe.members.name"
_DISCARD = 9
"""A port to connect to, of RFC 863; any would do."""


class LocalMembership:
    """One agent's view of the member list; it reloads when the source changes."""

    def __init__(
        self,
        options: MembershipOptions,
        hostname: Callable[[], str],
        monotonic: Callable[[], float],
    ) -> None:
        self._options = options
        self._hostname = hostname
        self._monotonic = monotonic
        self._files = [file for file in (options.hostfile, options.topology) if file is not None]
        self._seen: object = None
        """The signatures of the files when they were last read; None before."""
        self._read_at = 0.0
        self._membership: Membership | None = None
        self.me = ""
        """This node's name among the members; empty before the first usable list."""
        self.errors: tuple[str, ...] = ()
        """Errors in the list as last read."""

    @property
    def membership(self) -> Membership:
        """The members; LookupError before the first usable list."""
        if self._membership is None:
            raise LookupError("the members are not known yet")
        return self._membership

    @property
    def known(self) -> bool:
        """Whether there has been a usable list of members."""
        return self._membership is not None

    async def refresh(self, *, again: bool = False) -> bool:
        """Read the members if their source has changed, or if `again`; tell whether they differ.
        Waits for a disk or name server that hangs, up to DEADLINE.
        """
        try:
            found = await background.call(
                lambda: self._load(again=again), "members", DEADLINE, MembershipError, OSError
            )
        except TimeoutError:
            self._wrong((f"{self._sources()} could not be read within {DEADLINE:g} s",))
        except MembershipError as error:
            self._wrong(error.errors)
        except OSError as error:
            self._wrong((str(error),))
        else:
            return found is not None and self._adopt(*found)
        return False

    def _sources(self) -> str:
        dns = [self._options.dns] if self._options.dns else []
        return ", ".join([*map(str, self._files), *dns]) or "the members"

    def _adopt(self, membership: Membership, me: str) -> bool:
        """Apply what was read; tell whether it differs from what was known."""
        self.errors = ()
        if (
            self._membership is not None
            and membership.digest == self._membership.digest
            and me == self.me
        ):
            return False
        self._membership, self.me = membership, me
        log.info(
            "probe: %d members from %s, hash %s; this node is %s",
            len(membership.names),
            membership.source,
            membership.digest,
            me,
        )
        return True

    def samples(self) -> Iterator[Sample]:
        """Yield the metrics of the members."""
        if self._membership is not None:
            yield MEMBERS(float(len(self._membership.members)))
            yield HASH(float(self._membership.digest_number))
        yield OK(float(not self.errors))

    def _load(self, *, again: bool) -> tuple[Membership, str] | None:
        """Return the members and this node's name, or None if nothing has changed. Blocks."""
        # Before they are read: the next call sees a change between the two.
        now, seen = self._monotonic(), signatures(self._files)
        due = bool(self._options.dns) and now - self._read_at >= DNS_INTERVAL
        # Always reread after an error: it may have been a name server's, which changes no file.
        if seen == self._seen and not (due or again or self.errors):
            return None
        self._read_at, self._seen = now, seen
        membership = load(self._options)
        return membership, own_name(membership.names, self._hostname(), self._options.name)

    def _wrong(self, errors: tuple[str, ...]) -> None:
        if errors != self.errors:
            log.error(
                "probe: members not usable%s:\n%s",
                ", keeping the previous ones" if self.known else "",
                "\n".join(errors),
            )
        self.errors = errors


def hostname() -> str:
    """Return this machine's host name, by which it finds itself among the members."""
    return socket.gethostname()


def is_local(address: str) -> bool:
    """Return whether an address is one of this machine's: what it sends there comes from there. No
    packet is sent. Loopback and multicast addresses are those of any machine, and do not count.
    """
    parsed = numeric(address)
    if parsed is None or parsed.is_loopback or parsed.is_multicast or parsed.is_unspecified:
        return False
    family = socket.AF_INET6 if isinstance(parsed, ipaddress.IPv6Address) else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, _DISCARD))
            return numeric(probe.getsockname()[0]) == parsed
    except OSError:
        return False


def own_name(
    names: Collection[str],
    hostname: str,
    name: str = "",
    is_local: Callable[[str], bool] = is_local,
) -> str:
    """Return the member that this machine is.

    Raises MembershipError if it is none of them, or more than one.

    The first of these that matches decides: `name`, if set; the member with exactly the host name;
    members that equal the host name or its first label, or whose first label is the host name,
    ignoring case; members that are an address of this machine. No name is looked up: a lookup
    may take seconds, and its answer may belong to another network.
    """
    if name:
        if name in names:
            return name
        raise MembershipError([f"{KEY}: {quote(name)} is not one of the {len(names)} members"])
    if hostname in names:
        return hostname
    called = [member for member in names if _same_host(member, hostname)]
    found = called or [member for member in names if is_local(member)]
    if len(found) == 1:
        return found[0]
    if found:
        several = ", ".join(map(quote, sorted(found)[:3]))
        message = (
            f"{KEY}: this node matches more than one member ({several}); set it to the right one"
        )
        raise MembershipError([message])
    message = (
        f"{KEY}: host {quote(hostname)} matches none of the {len(names)} members by name "
        "or address; set it to the right one"
    )
    raise MembershipError([message])


def _same_host(member: str, hostname: str) -> bool:
    """Return whether two names are equal, or one is the other's first label."""
    if numeric(member) is not None:
        return False
    one, other = member.lower().rstrip("."), hostname.lower().rstrip(".")
    return bool(one) and (
        one == other or (one == other.split(".")[0]) or (other == one.split(".")[0])
    )
