"""The memory page that holds a heartbeat's last message and is handed to the agent."""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import socket
import struct

from dshealthd.training.message import (
    HELLO,
    PAGE,
    POSITION,
    POSITION_AT,
    PROCESS_AT,
    ROOM,
    SLOT,
    WAIT_AT,
)

log = logging.getLogger("dshealthd.training")

DEFAULT_PATH = "/run/dshealthd/heartbeat.sock"
RETRY = 1.0
"""Seconds between two checks that the agent has the page."""

_NOEXEC_SEAL = 8
"""MFD_NOEXEC_SEAL: without it Linux 6.3 and newer warn or refuse; older kernels do not know it."""


class Page:
    """A page and a connection to the agent.

    A forked child has to close its parent's, and to make its own: it is a separate process.
    """

    def __init__(self, path: str, *, warns: bool = True) -> None:
        """Create nothing yet.

        A path on a hung file system would make the first message hang; `/run` is not one.
        """
        self._path = path
        self._memory: mmap.mmap | None = None
        self._file = -1
        self._socket: socket.socket | None = None
        self._offset = 0
        self._due = 0.0
        # only one rank of a node warns
        self._warned = not warns or os.environ.get("LOCAL_RANK", "0") != "0"
        self._map(bytearray(PAGE))

    def _map(self, memory: bytearray | mmap.mmap) -> None:
        """Write the words of a page there."""
        view = memoryview(memory)
        position = view[POSITION_AT : POSITION_AT + POSITION.size]
        self.position = position.cast("Q"), position.cast("d")
        """The words of the position, and the same as times."""
        self._words = view.cast("I")

    def write(self, data: bytes, now: float) -> None:
        """Write a message to the heartbeat's page; `now` is monotonic time in seconds."""
        memory, offset = self._memory, self._offset
        if memory is None:  # another thread closed it just now
            return
        # Two slots in turn: a reader finds one whole while the other is being written.
        self._offset = offset ^ SLOT
        memory[offset : offset + len(data)] = data
        if now >= self._due:
            self._due = now + RETRY
            self._show()

    def note(self, data: bytes) -> None:
        """Write the page's note beside the messages; do nothing before this process's first one."""
        memory = self._memory
        if memory is None:
            return
        for number, start in enumerate(range(SLOT - ROOM, PAGE, SLOT)):
            memory[start : start + ROOM] = data[number * ROOM : (number + 1) * ROOM]

    def wait(self, collective: int, number: int) -> None:
        """Write the word of a wait."""
        self._words[WAIT_AT // 4] = collective | number << 16

    def describe(self, thread: int, timeout: int) -> None:
        """Write the words of the process."""
        self._words[PROCESS_AT // 4], self._words[PROCESS_AT // 4 + 1] = thread, timeout

    def close(self) -> None:
        """Close the heartbeat's page and the connection.

        The memory is unmapped with its last view, which another thread may be writing to.
        """
        self._due = 0.0
        self._disconnect()
        self._memory = None
        self._map(bytearray(PAGE))
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    @property
    def is_open(self) -> bool:
        """Whether there is a page."""
        return self._memory is not None

    def open(self) -> None:
        """Make a page, with the words so far; OSError if none can be made."""
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        try:
            self._file = os.memfd_create("dshealthd-heartbeat", flags | _NOEXEC_SEAL)
        except OSError:
            self._file = os.memfd_create("dshealthd-heartbeat", flags)
        os.ftruncate(self._file, PAGE)
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        memory = mmap.mmap(self._file, PAGE)
        memory[:] = self._words.tobytes()
        self._map(memory)
        self._memory = memory

    def _show(self) -> None:
        """Hand the heartbeat's page to the agent, if one runs that does not have it."""
        if self._socket is not None:
            try:
                if self._socket.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK):
                    return
            except BlockingIOError:  # connected; the agent never sends anything
                return
            except OSError:
                pass
            self._disconnect()
        connection = socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        try:
            connection.connect(self._path)
            # Before Python 3.12 socket.send_fds drops its flags, and SIGPIPE may be set to kill
            # the job.
            page = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", self._file))
            connection.sendmsg([HELLO], [page], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError as error:  # no socket, no listener, or a full backlog
            connection.close()
            if error.errno == errno.ENOENT and not self._warned:
                self._warned = True
                path = self._path.encode(errors="backslashreplace").decode()  # safe for any handler
                log.warning("no agent listens at %s: heartbeats are lost until one does", path)
            return
        self._socket = connection

    def _disconnect(self) -> None:
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()

    def __del__(self) -> None:
        """Close without the warning for an unclosed socket; a job need not close its heartbeat."""
        self.close()
