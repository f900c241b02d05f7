"""A network namespace of the test's own, with its loopback up, and sockets in it."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import socket
import struct
import subprocess
from collections import Counter
from collections.abc import Iterator

from tests.waiting import until

_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1
V4, V6 = "127.0.0.1", "::1"
_SS_STATES = {"estab": "established"}


@contextlib.contextmanager
def network_namespace(*, loopback: bool = True) -> Iterator[None]:
    """Put this process into a new network namespace; skip where that is not permitted."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        if libc.unshare(_CLONE_NEWNET) != 0:
            import pytest  # not needed by the demonstration, which has none

            pytest.skip(
                f"a network namespace is not permitted here: {os.strerror(ctypes.get_errno())}"
            )
        try:
            if loopback:
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
                    fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
            yield
        finally:
            if libc.setns(before, _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "cannot go back to the first network namespace")
    finally:
        os.close(before)


def listener(address: str, port: int = 0, backlog: int = 64) -> socket.socket:
    """Return a listening socket."""
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind((address, port))
    made.listen(backlog)
    return made


def connection(to: socket.socket) -> tuple[socket.socket, socket.socket]:
    """Return both ends of a new connection to a listener: the client's and the server's."""
    client = socket.socket(to.family, socket.SOCK_STREAM)
    client.connect(to.getsockname()[:2])
    return client, to.accept()[0]


def leave_time_wait(to: socket.socket, number: int, *, server: bool, counted: bool = True) -> None:
    """Leave connections in TIME_WAIT, at the end that closes first, once the kernel has them so.

    Unless they are `counted`, as thousands that others may use again meanwhile, do not wait for it.
    """
    expected = _in_time_wait(to) + number if counted else 0
    for _ in range(number):
        client, accepted = connection(to)
        first, second = (accepted, client) if server else (client, accepted)
        first.close()
        second.close()
    # `close` returns before the kernel has handled the FIN of the other end.
    until(lambda: not counted or _in_time_wait(to) >= expected, lambda: _in_time_wait(to))


def _in_time_wait(listening: socket.socket) -> int:
    """Return how many sockets in TIME_WAIT have this listener's port at either end."""
    port = listening.getsockname()[1]
    return ss(f"sport = :{port} or dport = :{port}")["time_wait"]


def ss(*arguments: str) -> Counter[str]:
    """Return what `ss` counts in each state, by our names."""
    output = subprocess.run(
        ["ss", "-tanH", *arguments], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    states = (line.split(maxsplit=1)[0].lower() for line in output.splitlines())
    return Counter(
        _SS_STATES.get(state, re.sub(r"fin_wait_", "fin_wait", state.replace("-", "_")))
        for state in states
    )
