"""Paths of Unix sockets in the file system."""

from __future__ import annotations

import errno
import os
import socket
import stat


def clear(path: str, kind: socket.SocketKind) -> None:
    """Remove the socket of a process that has ended.

    Raise OSError if it has not ended (EADDRINUSE), or if the path is something else (EEXIST).
    """
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(errno.EEXIST, "a file that is not a socket exists there", path)
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK) as visitor:
        try:
            visitor.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:
            pass  # a full backlog: somebody listens
    raise OSError(errno.EADDRINUSE, "another agent listens there", path)
