"""Where the RAS of a job listens, by its processes' environment, and whether that is this node.

NCCL binds what `NCCL_RAS_ADDR` says, `localhost:28028` by default. Names are not looked up: a name
server that hangs would stop the queries of all jobs. What is neither loopback nor an address of
this node is never connected to, whatever a job writes there.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

PORT = 28028
MAX_PORT = 65535
_LOOPBACK = ("127.0.0.1", "::1")
_Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
_ANYWHERE = 9
"""A port; nothing is sent to it."""


class Endpoint(NamedTuple):
    """An address of this node, and a port."""

    host: str
    port: int


def enabled(environment: Mapping[str, str]) -> bool:
    """Tell whether NCCL starts RAS: 1, the default, is what it compares with, and what it cannot
    read counts as the default.
    """
    text = environment.get("NCCL_RAS_ENABLE", "").strip()
    try:
        return not text or int(text, 0) == 1
    except ValueError:
        return True


def parse_address(text: str) -> tuple[tuple[str, ...], int]:
    """Return the addresses that `NCCL_RAS_ADDR` may mean, in the order in which to try them, and
    the port.

    ValueError if it is none that can be connected to: a name other than localhost, or no port.
    """
    addresses, port = _parse(text)
    loopback = {4: "127.0.0.1", 6: "::1"}
    hosts = (
        loopback[address.version] if address.is_unspecified else str(address)
        for address in addresses
    )
    return tuple(hosts), port


def _parse(text: str) -> tuple[tuple[_Address, ...], int]:
    if text.startswith("["):
        host, _, port = text[1:].partition("]:")
    else:
        host, _, port = text.partition(":")
        port = port.partition(":")[0]
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) <= MAX_PORT):  # noqa: PLR2004 - digits of the largest
        message = f"NCCL_RAS_ADDR={text[:100]!r} names no port"
        raise ValueError(message)
    if host.lower() == "localhost":
        return tuple(map(ipaddress.ip_address, _LOOPBACK)), int(port)
    try:
        address = ipaddress.ip_address(host)
    except ValueError as error:
        message = f"NCCL_RAS_ADDR={text[:100]!r} is a name, and only localhost and addresses are understood"
        raise ValueError(message) from error
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return (address,), int(port)


def exposed(environment: Mapping[str, str]) -> bool:
    """Tell whether NCCL listens for RAS where other hosts can reach it.

    False as well where `NCCL_RAS_ADDR` is a name, which is not looked up.
    """
    text = environment.get("NCCL_RAS_ADDR")
    if text is None or not enabled(environment):
        return False
    try:
        addresses, _ = _parse(text)
    except ValueError:
        return False
    return not all(address.is_loopback for address in addresses)


def own(host: str) -> bool:
    """Tell whether an address of RAS is this network namespace's, by the kernel's own routing.

    It sends from there what is for there.

    Secondary addresses of an interface may be missed. Nothing is sent.
    """
    address = ipaddress.ip_address(host)
    if address.is_loopback:
        return True
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6  # noqa: PLR2004 - the protocol
    with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
        try:
            probe.connect((host, _ANYWHERE))
        except OSError:  # no way leads there
            return False
        return ipaddress.ip_address(probe.getsockname()[0]) == address


def endpoints(environment: Mapping[str, str]) -> tuple[Endpoint, ...]:
    """Return where to ask for a process's RAS, in order.

    ValueError if that is nowhere on this node.
    """
    text = environment.get("NCCL_RAS_ADDR")
    hosts, port = (_LOOPBACK, PORT) if text is None else parse_address(text)
    if not all(own(host) for host in hosts):
        message = f"NCCL_RAS_ADDR={(text or '')[:100]!r} is no address of this node"
        raise ValueError(message)
    return tuple(Endpoint(host, port) for host in hosts)
