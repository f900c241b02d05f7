"""Which of the members this node is, by its name and its addresses."""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING

from dshealthd.probe.members.hostlist import MembershipError, numeric, quote

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


_DISCARD = 9
"""A port to connect to, of RFC 863; any would do."""
KEY = "probe.members.name"


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
