"""Addresses and sockets: where to listen, what a failed name lookup means, how to close a
connection.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import stat
import struct

MAX_PORT = 65535
_RESET = struct.pack("ii", 1, 0)
_NO_SUCH_NAME = frozenset((socket.EAI_NONAME, socket.EAI_NODATA))


def name_is_unknown(error: socket.gaierror) -> bool:
    """Return whether a lookup failed because the name does not exist.

    Any other failure (mostly EAI_AGAIN: no name server answered) says nothing about the name.
    """
    return error.errno in _NO_SUCH_NAME


def listen_address(text: str) -> tuple[str | None, int]:
    """Return host (None for all addresses) and port of a listen address.

    Raise ValueError with the reason if it is invalid.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > MAX_PORT:
        raise ValueError(f'"{text}" is not "HOST:PORT" or ":PORT" with a port from 0 to {MAX_PORT}')
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except (ValueError, ArithmeticError) as error:
            raise ValueError(f'"{host}" is not an IPv6 address') from error
    elif ":" in host:
        raise ValueError(f'"{text}": an IPv6 address is written in brackets')
    return host or None, int(port)


def clear(path: str, kind: socket.SocketKind) -> None:
    """Remove the Unix socket of a process that has ended.

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


def reset_on_close(connection: socket.socket) -> None:
    """Make a socket reset its connection when it is closed.

    After an orderly close, one of its ends would stay in TIME_WAIT on this machine for a minute,
    and the kernel would keep unsent data for a client that reads nothing.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
