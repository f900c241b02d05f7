"""A TCP port for a rendezvous: free, not in TIME_WAIT, and not one that the kernel assigns.

A port that was only tested may be taken a moment later, so it is bound, and stays bound for as long
as the caller wants.
"""

from __future__ import annotations

import errno
import random
import socket
from typing import TYPE_CHECKING

from dshealthd.linux.local_network import local_ports

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dshealthd.core.host import Host

SERVED = frozenset((10061, 10062, 28028))
"""Ports of dshealthd's agent and of NCCL RAS, which may be free now but needed later."""


class NoPort(Exception):
    """No port is available; the message says why and what helps."""


class Held:
    """A port that no other process can bind, on IPv4 or IPv6, until it is released."""

    def __init__(self, port: int) -> None:
        """Bind it; OSError (EADDRINUSE) if any socket uses it, even one in TIME_WAIT."""
        self.port = port
        self.sockets: list[socket.socket] = []
        try:
            for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "")):
                self._bind(family, address)
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        """Release the port."""
        for one in self.sockets:
            one.close()
        self.sockets.clear()

    def _bind(self, family: int, address: str) -> None:
        try:
            made = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            if family == socket.AF_INET6 and error.errno == errno.EAFNOSUPPORT:
                return  # a kernel without IPv6: no conflict is possible there
            raise
        self.sockets.append(made)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            # Without SO_REUSEADDR, it fails for sockets in TIME_WAIT, as a launcher's bind would.
            made.bind((address, self.port))
        except OSError as error:
            if family == socket.AF_INET6 and error.errno == errno.EADDRNOTAVAIL:
                self.sockets.remove(made)
                made.close()  # IPv6 is disabled in this namespace
                return
            raise


def candidates(host: Host, first: int, last: int) -> list[int]:
    """Return a range's ports that the kernel does not assign by itself, in random order.

    NoPort if there is none. The kernel does not assign ports that the administrator has reserved.
    The order is random so that two callers at once do not try the same ports in the same order.
    """
    assigned = local_ports(host)
    found = [port for port in range(first, last + 1) if port not in SERVED and port not in assigned]
    if not found:
        message = (
            f"all of {first}-{last} is inside the ephemeral range {assigned}: reserve it "
            f"({assigned.reserving(first, last)}) or choose another range with --range"
        )
        raise NoPort(message)
    random.shuffle(found)
    return found


def hold(ports: Sequence[int]) -> Held:
    """Bind the first port that can be bound and return it; NoPort if none can."""
    for port in ports:
        try:
            return Held(port)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    message = (
        f"none of {len(ports)} ports from {min(ports)} to {max(ports)} is free: "
        f"`ss -tanp '( sport >= {min(ports)} and sport <= {max(ports)} )'` shows who uses them"
    )
    raise NoPort(message)
