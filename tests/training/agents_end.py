"""The agent's end of the heartbeat socket, for tests of the sender: takes messages when asked."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from dshealthd.training.message import MAX_SIZE, Message, decode

if TYPE_CHECKING:
    from pathlib import Path


class AgentsEnd:
    """Listens; what senders send waits until `messages` takes it."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(self.path)
        self._listener.listen(16)
        self.connections: list[socket.socket] = []

    def messages(self) -> list[Message]:
        """Return what has arrived since the last call, by connection and in order."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                break
            connection.setblocking(False)  # noqa: FBT003 - positional only
            self.connections.append(connection)
        found = []
        for connection in self.connections:
            while True:
                try:
                    data = connection.recv(MAX_SIZE)
                except BlockingIOError:
                    break
                if not data:
                    break
                found.append(decode(data))
        return found

    def close(self) -> None:
        """End; senders see a connection that is gone."""
        for connection in [*self.connections, self._listener]:
            connection.close()
        self.connections.clear()
