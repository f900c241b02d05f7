"""The heartbeats' listening socket in the file system.

Made where none is, taken over from an agent that has ended, removed at the end.
"""

from __future__ import annotations

import os
import socket

from dshealthd.core.unix_socket import clear

BACKLOG = 128
"""Connections that wait to be taken."""


def listen(path: str) -> socket.socket:
    """Return a socket that listens for heartbeats on `path`, open to every user.

    OSError if it cannot be had: EADDRINUSE if another agent has it.
    """
    clear(path, socket.SOCK_SEQPACKET)
    listener = socket.socket(
        socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    )
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        listener.bind(path)
        os.chmod(path, 0o666)  # noqa: S103 - trainings run as any user
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def place(path: str) -> tuple[int, int] | None:
    """Return what tells the heartbeats' socket at a path from another that takes its place.

    None if there is none.
    """
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
