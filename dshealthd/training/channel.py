"""The way to the agent: messages over a Unix socket, sent at once or not at all.

SOCK_SEQPACKET and not SOCK_DGRAM: both keep messages apart and neither waits, but all senders of a datagram socket share one queue, of
`net.unix.max_dgram_qlen` = 10 messages by default. Sixteen ranks that step together would lose theirs, and any user could fill it for
all. Here each sender has a queue of its own, of some 250 messages.
"""

from __future__ import annotations

import os
import socket

DEFAULT_PATH = "/run/dshealthd/heartbeat.sock"
RETRY = 1.0
"""Seconds from one attempt to connect to the next; in between a message that cannot be sent costs nothing."""

_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class Channel:
    """A connection that is made when it can be, and made again by a child of fork, which is another sender."""

    def __init__(self, path: str) -> None:
        """Connect at the first message. A path on a file system that hangs would make that hang: `/run` is none."""
        self._path = path
        self._socket: socket.socket | None = None
        self._pid = 0
        self._retry = 0.0

    def send(self, data: bytes, now: float) -> bool:
        """Send a message if that can be done at once, and tell whether it was; `now` is monotonic time in seconds."""
        if (self._socket is None or self._pid != os.getpid()) and not self._connect(now):
            return False
        connection = self._socket
        if connection is None:  # another thread closed it just now
            return False
        try:
            connection.send(data, _FLAGS)
        except BlockingIOError:  # the agent is slow, or stopped
            return False
        except OSError:  # it has gone
            self.close()
            return False
        return True

    def _connect(self, now: float) -> bool:
        pid = os.getpid()
        if now < self._retry and self._pid == pid:
            return False
        self.close()
        self._pid, self._retry = pid, now + RETRY
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            connection.connect(self._path)
        except OSError:  # not there, nobody listens, or too many wait
            connection.close()
            return False
        self._socket = connection
        return True

    def close(self) -> None:
        """Close the connection; the next message makes another."""
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()

    def __del__(self) -> None:
        """Close without the warning that a forgotten socket gives: a training need not close its heartbeat."""
        self.close()
