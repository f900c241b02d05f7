"""The page of memory in which a heartbeat's last message stands, and which the agent is handed.

A message costs no system call but getpid, needs nobody to take it, and is never lost. What a
process did last is known also where it does nothing any more, which a message that was held back
could not tell.

The page is handed to the agent once, as a descriptor over a Unix socket, by which the kernel
vouches for who hands it over. Its size is sealed.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import socket
import struct

from dshealthd.training.message import HELLO, PAGE, ROOM, SLOT

log = logging.getLogger("dshealthd.training")

DEFAULT_PATH = "/run/dshealthd/heartbeat.sock"
RETRY = 1.0
"""Seconds from one look for the agent to the next."""

_NOEXEC_SEAL = 8
"""MFD_NOEXEC_SEAL: without it Linux 6.3 and newer complain, or refuse.

Older ones do not know it.
"""


class Page:
    """A page and a connection to the agent, made again by a child of fork, which is another process
    to tell of.
    """

    def __init__(self, path: str) -> None:
        """Make nothing yet.

        A path on a file system that hangs would make the first message hang: `/run` is none.
        """
        self._path = path
        self._pid = 0
        self._memory: mmap.mmap | None = None
        self._file = -1
        self._socket: socket.socket | None = None
        self._offset = 0
        self._due = 0.0
        self._warned = os.environ.get("LOCAL_RANK", "0") != "0"  # one rank of a node says it

    def write(self, data: bytes, now: float) -> None:
        """Put a message in the heartbeat's page; `now` is monotonic time in seconds.

        OSError if there can be no page.
        """
        # A forked child has the parent's page and connection: it would overwrite what its parent
        # says.
        if self._pid != os.getpid():
            self.close()
            self._make()
        memory, offset = self._memory, self._offset
        if memory is None:  # another thread closed it just now
            return
        # Two slots in turn: who reads while one is being written finds the other whole.
        self._offset = offset ^ SLOT
        memory[offset : offset + len(data)] = data
        if now >= self._due:
            self._due = now + RETRY
            self._show()

    def note(self, data: bytes) -> None:
        """Put down the page's note beside messages; nothing before this process wrote one."""
        memory = self._memory
        if memory is None or self._pid != os.getpid():
            return
        for number, start in enumerate(range(SLOT - ROOM, PAGE, SLOT)):
            memory[start : start + ROOM] = data[number * ROOM : (number + 1) * ROOM]

    def close(self) -> None:
        """Let go of the heartbeat's page and the connection; the next message makes others."""
        self._pid, self._due = 0, 0.0
        self._disconnect()
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _make(self) -> None:
        """Make the heartbeat's page of shared memory, of zeros."""
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        try:
            self._file = os.memfd_create("dshealthd-heartbeat", flags | _NOEXEC_SEAL)
        except OSError:
            self._file = os.memfd_create("dshealthd-heartbeat", flags)
        os.ftruncate(self._file, PAGE)
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._memory = mmap.mmap(self._file, PAGE)
        self._pid = os.getpid()

    def _show(self) -> None:
        """Hand the heartbeat's page to the agent, if there is one that does not have it."""
        if self._socket is not None:
            try:
                if self._socket.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK):
                    return
            except BlockingIOError:  # it is there, and says nothing, as ever
                return
            except OSError:
                pass
            self._disconnect()
        connection = socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        try:
            connection.connect(self._path)
            # socket.send_fds drops its flags before Python 3.12, and a training may have SIGPIPE
            # end it.
            page = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", self._file))
            connection.sendmsg([HELLO], [page], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError as error:  # not there, nobody listens, or too many wait
            connection.close()
            if error.errno == errno.ENOENT and not self._warned:
                self._warned = True
                path = self._path.encode(errors="backslashreplace").decode()  # any handler's text
                log.warning("no agent listens at %s: heartbeats are lost until one does", path)
            return
        self._socket = connection

    def _disconnect(self) -> None:
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()

    def __del__(self) -> None:
        """Close without the warning that a forgotten socket gives.

        A training need not close its heartbeat.
        """
        self.close()
