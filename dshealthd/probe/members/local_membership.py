"""The local membership: the members as this agent knows them, and which of them it is, by its name
and addresses.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from typing import TYPE_CHECKING

from dshealthd.core import background
from dshealthd.core.collector import gauge
from dshealthd.core.host import Host, read
from dshealthd.probe.members.hostlist import MembershipError, quote
from dshealthd.probe.members.membership import Membership, Watcher, load
from dshealthd.probe.members.schedule import Timetable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from dshealthd.core.collector import Sample
    from dshealthd.probe.options import MembershipOptions

_IF_INET6_FIELDS = 6


def own_name(
    names: Collection[str], hostname: str, addresses: Iterable[str], name: str = ""
) -> str:
    """Return the member that this machine is.

    Raises MembershipError if it is none of them, or more than one.

    The first of these that matches decides: `name`, if set; the member with exactly the host name;
    members that equal the host name or its first label, or whose first label is the host name,
    ignoring case; members among `addresses`, those of the machine's interfaces. No name is
    looked up: a lookup may take seconds, and its answer may belong to another network.
    """
    if name:
        if name in names:
            return name
        raise MembershipError([f"name: {quote(name)} is not one of the {len(names)} members"])
    if hostname in names:
        return hostname
    own = {address for address in map(_address, addresses) if address is not None}
    called = [member for member in names if _same_host(member, hostname)]
    found = called or [member for member in names if own and _address(member) in own]
    if len(found) == 1:
        return found[0]
    if found:
        several = ", ".join(map(quote, sorted(found)[:3]))
        message = (
            f"name: this node matches more than one member ({several}); set name to the right one"
        )
        raise MembershipError([message])
    message = (
        f"name: host {quote(hostname)} matches none of the {len(names)} members by name "
        "or address; set name to the right one"
    )
    raise MembershipError([message])


def _same_host(member: str, hostname: str) -> bool:
    """Return whether two names are equal, or one is the other's first label."""
    if _address(member) is not None:
        return False
    one, other = member.lower().rstrip("."), hostname.lower().rstrip(".")
    return bool(one) and (
        one == other or (one == other.split(".")[0]) or (other == one.split(".")[0])
    )


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except (ValueError, ArithmeticError):
        return None


def local_addresses(host: Host) -> tuple[str, ...]:
    """Return the addresses of this machine's interfaces, except loopback. Empty if the kernel does
    not provide them. Source: `/proc/net/fib_trie` and `/proc/net/if_inet6` of this network
    namespace.
    """
    found: list[str] = []
    for file, parse in (("net/fib_trie", parse_fib_trie), ("net/if_inet6", parse_if_inet6)):
        try:
            found += parse(read(host.proc(file), 1 << 24))
        except OSError:  # IPv6 is off, or the kernel lacks it: there are no such addresses
            continue
    return tuple(
        address for address in dict.fromkeys(found) if not ipaddress.ip_address(address).is_loopback
    )


def parse_fib_trie(text: str) -> list[str]:
    """Return this machine's IPv4 addresses: the routing trie's leaves with `/32 host LOCAL`."""
    found, leaf = [], ""
    for line in text.splitlines():
        words = line.split()
        if words[:1] == ["|--"] and len(words) > 1:
            leaf = words[1]
        elif words[:3] == ["/32", "host", "LOCAL"] and _address(leaf) is not None:
            found.append(leaf)
    return list(dict.fromkeys(found))


def parse_if_inet6(text: str) -> list[str]:
    """Return the interfaces' IPv6 addresses, but not link-local ones, which need an interface."""
    found = []
    for line in text.splitlines():
        words = line.split()
        # hexadecimal digits of an address
        if len(words) != _IF_INET6_FIELDS or len(words[0]) != 32:  # noqa: PLR2004
            continue
        try:
            address = ipaddress.IPv6Address(bytes.fromhex(words[0]))
        except (ValueError, ArithmeticError):
            continue
        if not address.is_link_local:
            found.append(str(address))
    return found


log = logging.getLogger(__name__)

MEMBERS = gauge("dshealthd_members", "Nodes that take part in probes, in this agent's member list.")
HASH = gauge(
    "dshealthd_members_hash",
    "Hash, below 2^48, of the member list with slots and leaves; agents with different hashes "
    "run no rounds with each other.",
)
OK = gauge(
    "dshealthd_members_last_reload_successful",
    "1 if the member list was usable when last read; 0 while the previous list is kept.",
)

DEADLINE = 10.0
"""Timeout in seconds for reading the files or for DNS."""
PATIENCE = 0.5
"""Seconds that `refresh` waits for them, once for each reading. So a hung file system or name
server delays few epochs, and those hardly.
"""


class LocalMembership:
    """One agent's view of the member list; it reloads when the source changes."""

    def __init__(
        self,
        options: MembershipOptions,
        host: Host,
        hostname: Callable[[], str],
        monotonic: Callable[[], float],
    ) -> None:
        self._options = options
        self._host = host
        self._hostname = hostname
        self._monotonic = monotonic
        self._watcher: Watcher | None = None
        self._reading: asyncio.Task[tuple[Membership, str] | None] | None = None
        """The reading in progress, or one whose result was not taken yet."""
        self._overdue = False
        """Whether a call has waited for it in vain."""
        self._again = False
        """Whether a reading was demanded meanwhile."""
        self._membership: Membership | None = None
        self.me = ""
        """This node's name among the members; empty before the first usable list."""
        self.timetable = Timetable((), {})
        self.errors: tuple[str, ...] = ()
        """Errors in the list as last read."""

    @property
    def membership(self) -> Membership:
        """The members; LookupError before the first usable list."""
        if self._membership is None:
            message = "the members are not known yet"
            raise LookupError(message)
        return self._membership

    @property
    def known(self) -> bool:
        """Whether there has been a usable list of members."""
        return self._membership is not None

    async def refresh(self, *, again: bool = False) -> bool:
        """Read the members if their source has changed, or if `again`; tell whether they differ.
        There is one reading at a time. If it takes longer than PATIENCE while members are known, it
        goes on, and a later call takes its result.
        """
        self._again |= again
        patience = PATIENCE if self.known else None
        if self._reading is None:
            again, self._again = self._again, False
            self._reading = asyncio.create_task(self._read(again=again), name="members")
        elif self._overdue:
            patience = 0.0
        await asyncio.wait({self._reading}, timeout=patience)
        self._overdue = not self._reading.done()
        if self._overdue:
            return False
        found, self._reading = self._reading.result(), None
        return found is not None and self._take(*found)

    async def close(self) -> None:
        """Give up a reading that is in progress; its thread ends on its own."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
            self._reading = None

    def _sources(self) -> str:
        options = self._options
        files = [str(file) for file in (options.hostfile, options.topology) if file is not None]
        return ", ".join([*files, options.dns] if options.dns else files) or "the members"

    async def _read(self, *, again: bool) -> tuple[Membership, str] | None:
        """Return what `_load` does; None if it failed or hangs."""
        try:
            return await background.call(
                lambda: self._load(again=again), "members", DEADLINE, MembershipError, OSError
            )
        except TimeoutError:
            self._wrong((f"{self._sources()} could not be read within {DEADLINE:g} s",))
        except MembershipError as error:
            self._wrong(error.errors)
        except OSError as error:
            self._wrong((str(error),))
        return None

    def _take(self, membership: Membership, me: str) -> bool:
        """Apply what was read; tell whether it differs from what was known."""
        self.errors = ()
        if (
            self._membership is not None
            and membership.digest == self._membership.digest
            and me == self.me
        ):
            return False
        self._membership, self.me = membership, me
        self.timetable = Timetable(membership.names, membership.leaves)
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
        if self._watcher is None:
            self._watcher = Watcher(self._options, self._monotonic)
        # Always reread after an error: it may have been a name server's, which changes no file.
        elif not self._watcher.changed() and not again and not self.errors:
            return None
        membership = load(self._options)
        return membership, own_name(
            membership.names, self._hostname(), local_addresses(self._host), self._options.name
        )

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
