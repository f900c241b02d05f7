"""Which of the members this node is, by its name and its addresses."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from dshealthd.core.host import Host, read
from dshealthd.probe.members.hostlist import MembershipError, quote

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


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
