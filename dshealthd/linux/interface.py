"""The network interface that has an address, for NCCL's bootstrap."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from typing import TYPE_CHECKING

from dshealthd.core.host import read

if TYPE_CHECKING:
    from dshealthd.core.host import Host

_SIOCGIFADDR = 0x8915
_ADDRESS = 20
"""Offset of the IPv4 address in the kernel's struct ifreq."""
LOOPBACK = "lo"


def interface_of(address: str, host: Host) -> str:
    """Return this host's network interface that has `address`; `lo` if none has.

    Raises ValueError if `address` is not an IP address.
    """
    wanted = ipaddress.ip_address(address)
    if isinstance(wanted, ipaddress.IPv6Address):
        return _of_ipv6(wanted, host)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as control:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(control, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no IPv4 address
                continue
            if answer[_ADDRESS : _ADDRESS + 4] == wanted.packed:
                return name
    return LOOPBACK


def _of_ipv6(wanted: ipaddress.IPv6Address, host: Host) -> str:
    try:
        lines = read(host.proc("net/if_inet6")).splitlines()
    except OSError:  # a kernel without IPv6
        return LOOPBACK
    rows = (line.split() for line in lines)
    return next((row[-1] for row in rows if row and row[0] == wanted.packed.hex()), LOOPBACK)
