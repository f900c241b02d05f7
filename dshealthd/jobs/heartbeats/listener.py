"""The heartbeats' listening socket in the file system.

It is created, or taken over from an agent that has ended, and removed at shutdown.
"""

from __future__ import annotations

import os
import socket

from dshealthd.core.sockets import clear

BACKLOG = 128
"""Most connections that wait to be accepted."""


def listen(path: str) -> socket.socket:
    """Return a socket that listens for heartbeats on `path`, open to every user.

    OSError if that fails: EADDRINUSE if another agent listens there.
    """
    clear(path, socket.SOCK_SEQPACKET)
    listener = socket.socket(
        socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    )
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        listener.bind(path)
        os.chmod(path, 0o666)  # noqa: S103 - training jobs run as any user
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def place(path: str) -> tuple[int, int] | None:
    """Return the identity of the socket at a path, which a successor does not share; None if there
    is none.
    """
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
