"""The agent's end of the heartbeats, for tests of the sender.

Takes pages and reads them when asked.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from dshealthd.training.message import HELLO, PAGE, Message, newest
from dshealthd.training.saved import Saved
from dshealthd.training.saved import decode as decode_saved


class AgentsEnd:
    """Listens; who connects waits until it is asked what was told."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(self.path)
        self._listener.listen(16)
        self.connections: list[socket.socket] = []
        self.pages: list[int] = []

    def messages(self) -> list[Message]:
        """Return what stands in the page of each process that has ever connected, in order."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                break
            hello, files, _, _ = socket.recv_fds(connection, len(HELLO) + 1, 1)
            assert hello == HELLO
            self.connections.append(connection)
            self.pages += files
        return [newest(os.pread(page, PAGE, 0)) for page in self.pages]

    def message(self) -> Message:
        """Return what stands in the only page."""
        (message,) = self.messages()
        return message

    def saved(self) -> Saved | None:
        """Return what the only page says of checkpoints."""
        self.message()
        (page,) = self.pages
        return decode_saved(os.pread(page, PAGE, 0))

    def close(self) -> None:
        """End; senders see a connection that is gone."""
        for connection in [*self.connections, self._listener]:
            connection.close()
        for page in self.pages:
            os.close(page)
        self.connections.clear()
        self.pages.clear()
