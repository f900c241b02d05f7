"""The heartbeats' socket in the file system: made where none is, taken over from an agent that has ended, removed at the end."""

from __future__ import annotations

import errno
import os
import socket
import stat

BACKLOG = 128
"""Connections that wait to be taken."""


def listen(path: str) -> socket.socket:
    """Return a socket that listens on `path`, open to every user. OSError if it cannot be had: EADDRINUSE if another agent has it."""
    _clear(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
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
    """Return what tells the socket at a path from another that takes its place; None if there is none."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _clear(path: str) -> None:
    """Remove the socket of an agent that has ended. OSError if it has not, or if something else is there."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(errno.EEXIST, "something that is no socket is there", path)
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as visitor:
        try:
            visitor.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:
            pass  # so many wait there that somebody listens
    raise OSError(errno.EADDRINUSE, "another agent listens there", path)
