"""Where the RAS of a job listens, from its processes' environment, and whether that is this node.

NCCL binds the address in `NCCL_RAS_ADDR`, `localhost:28028` by default. Names are not resolved: a
hung name server would stop the queries of all jobs. Only loopback and addresses of this node are
ever connected to, whatever a job sets.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

PORT = 28028
MAX_PORT = 65535
_PORT = re.compile(r"[0-9]{1,5}")
_LOOPBACK = ("127.0.0.1", "::1")
_Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


class Endpoint(NamedTuple):
    """An address of this node, and a port."""

    host: str
    port: int


def ras_enabled(environment: Mapping[str, str]) -> bool:
    """Return whether NCCL starts RAS: the value must be 1, the default, which NCCL also takes for
    what it cannot read.
    """
    text = environment.get("NCCL_RAS_ENABLE", "").strip()
    try:
        return not text or int(text, 0) == 1
    except (ValueError, ArithmeticError):
        return True


def parse_address(text: str) -> tuple[tuple[str, ...], int]:
    """Return the addresses that `NCCL_RAS_ADDR` may mean, in the order to try them, and the port.

    ValueError if it cannot be connected to: a name other than localhost, or no port.
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
    if _PORT.fullmatch(port) is None or not 0 < int(port) <= MAX_PORT:
        raise ValueError(f"NCCL_RAS_ADDR={text[:100]!r} has no valid port")
    if host.lower() == "localhost":
        return tuple(map(ipaddress.ip_address, _LOOPBACK)), int(port)
    try:
        address = ipaddress.ip_address(host)
    except (ValueError, ArithmeticError) as error:
        raise ValueError(
            f"NCCL_RAS_ADDR={text[:100]!r} has a host name; only localhost and IP "
            "addresses are supported"
        ) from error
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return (address,), int(port)


def ras_exposed(environment: Mapping[str, str]) -> bool:
    """Return whether NCCL listens for RAS where other hosts can reach it.

    False also if `NCCL_RAS_ADDR` is a name, which is not resolved.
    """
    text = environment.get("NCCL_RAS_ADDR")
    if text is None or not ras_enabled(environment):
        return False
    try:
        addresses, _ = _parse(text)
    except (ValueError, ArithmeticError):
        return False
    return not all(address.is_loopback for address in addresses)


def is_own_address(host: str) -> bool:
    """Return whether an address is this network namespace's, according to the kernel's routing: it
    is the source of packets to itself.

    Secondary addresses of an interface may be missed. Nothing is sent.
    """
    address = ipaddress.ip_address(host)
    if address.is_loopback:
        return True
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
        try:
            probe.connect((host, PORT))
        except OSError:  # no route
            return False
        return ipaddress.ip_address(probe.getsockname()[0]) == address


def endpoints(environment: Mapping[str, str]) -> tuple[Endpoint, ...]:
    """Return the endpoints at which to query a process's RAS, in order.

    ValueError if they are not on this node.
    """
    text = environment.get("NCCL_RAS_ADDR")
    hosts, port = (_LOOPBACK, PORT) if text is None else parse_address(text)
    if not all(is_own_address(host) for host in hosts):
        raise ValueError(f"NCCL_RAS_ADDR={(text or '')[:100]!r} is not an address of this node")
    return tuple(Endpoint(host, port) for host in hosts)
