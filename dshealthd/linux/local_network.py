"""The network of this node as its kernel sees it: ports that it assigns, routes, bridges."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import re
import socket
import struct
from dataclasses import dataclass

from dshealthd.core.host import Host, lines_of, read

RANGE, RESERVED = "net/ipv4/ip_local_port_range", "net/ipv4/ip_local_reserved_ports"
"""The settings below `/proc/sys`."""
_OF_CONTAINERS = re.compile(
    r"docker\d+|docker_gwbridge|br-[0-9a-f]{12}|virbr\d+|podman\d+|cni\d+|cni-podman\d+"
    r"|lxcbr\d+"
    r"|lxdbr\d+"
)
_SIOCGIFCONF = 0x8912
"""`SIOCGIFCONF` of linux/sockios.h: all IPv4 addresses, each with its interface."""
_IFREQ = struct.Struct("16s4x4s16x")
"""The kernel's struct ifreq, with an IPv4 address."""
LOOPBACK = "lo"


@dataclass(frozen=True, slots=True)
class LocalPorts:
    """The ports that the kernel assigns by itself, to connections for example."""

    ephemeral: range
    """ip_local_port_range."""
    reserved: frozenset[int]
    """ip_local_reserved_ports, which the kernel never assigns."""

    def __contains__(self, port: int) -> bool:
        return port in self.ephemeral and port not in self.reserved

    def __str__(self) -> str:
        return f"{self.ephemeral[0]}-{self.ephemeral[-1]}"

    def reserving(self, first: int, last: int) -> str:
        """Return the sysctl command that reserves ports besides those that already are."""
        ports = {*self.reserved, *range(first, last + 1)}
        starts = sorted(port for port in ports if port - 1 not in ports)
        ends = sorted(port for port in ports if port + 1 not in ports)
        text = ",".join(
            str(start) if start == end else f"{start}-{end}"
            for start, end in zip(starts, ends, strict=True)
        )
        return f"sysctl -w net.ipv4.ip_local_reserved_ports={text}"


def parse_range(text: str) -> range:
    """Return the ports of `ip_local_port_range`. ValueError if malformed."""
    first, last = map(int, text.split())
    if first > last:
        raise ValueError(f"not a range of ports: {text.strip()!r}")
    return range(first, last + 1)


def parse_reserved(text: str) -> frozenset[int]:
    """Return the ports of `ip_local_reserved_ports`, such as "8080,9000-9010". ValueError."""
    ports: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            ports.update(range(int(first), int(last or first) + 1))
    return frozenset(ports)


def local_ports(host: Host) -> LocalPorts:
    """Return the ports that the kernel assigns by itself. OSError; ValueError if malformed."""
    return LocalPorts(
        parse_range(read(host.proc(f"sys/{RANGE}"))),
        parse_reserved(read(host.proc(f"sys/{RESERVED}"))),
    )


def is_of_containers(interface: str) -> bool:
    """Return whether an interface is a bridge to containers or virtual machines on this node."""
    return _OF_CONTAINERS.fullmatch(interface) is not None


def parse_routes(text: str) -> list[tuple[str, ipaddress.IPv4Network]]:
    """Return interfaces and networks of `/proc/net/route` but the default route. ValueError."""
    found = []
    for line in lines_of(text)[1:]:
        fields = line.split()
        if len(fields) > 7:  # noqa: PLR2004 - the mask is the eighth
            address, mask = (
                int.from_bytes(bytes.fromhex(fields[number]), "little") for number in (1, 7)
            )
            if mask:
                found.append((fields[0], ipaddress.IPv4Network((address, mask.bit_count()))))
    return found


def container_networks(host: Host) -> list[ipaddress.IPv4Network]:
    """Return the networks of container bridges here. OSError; ValueError if malformed."""
    routes = parse_routes(read(host.proc("net/route")))
    return [network for interface, network in routes if is_of_containers(interface)]


def interface_of(address: str, host: Host) -> str:
    """Return the interface that has `address`, `lo` if none has. ValueError: no IP address."""
    wanted = ipaddress.ip_address(address)
    if isinstance(wanted, ipaddress.IPv6Address):
        return _of_ipv6(wanted, host)
    # An interface may have several, of which SIOCGIFADDR would return the first alone.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as control:
        # Without a buffer, the kernel says how large it must be.
        size, _ = struct.unpack("iP", fcntl.ioctl(control, _SIOCGIFCONF, struct.pack("iP", 0, 0)))
        found = array.array("B", bytes(size))
        request = struct.pack("iP", len(found), found.buffer_info()[0])
        size, _ = struct.unpack("iP", fcntl.ioctl(control, _SIOCGIFCONF, request))
    for name, packed in _IFREQ.iter_unpack(found[:size]):
        if packed == wanted.packed:
            return os.fsdecode(name.rstrip(b"\0")).partition(":")[0]  # an alias, such as eth0:1
    return LOOPBACK


def _of_ipv6(wanted: ipaddress.IPv6Address, host: Host) -> str:
    try:
        lines = lines_of(read(host.proc("net/if_inet6")))
    except OSError:  # a kernel without IPv6
        return LOOPBACK
    rows = (line.split() for line in lines)
    return next((row[-1] for row in rows if row and row[0] == wanted.packed.hex()), LOOPBACK)
