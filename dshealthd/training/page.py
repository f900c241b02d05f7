"""The memory page that holds a heartbeat's last message, and that the agent finds and reads."""

from __future__ import annotations

import fcntl
import mmap
import os

from dshealthd.training.message import PAGE, POSITION, POSITION_AT, PROCESS_AT, ROOM, SLOT, WAIT_AT

_mapped: set[object] = set()
"""Pages of memory, each of which closes a descriptor as it is freed: only while that is ours."""
# The interpreter lets go of this after it has flushed the program's files, of modules before.
os.register_at_fork(before=_mapped.__len__)

_NOEXEC_SEAL = 8
"""MFD_NOEXEC_SEAL: without it Linux 6.3 and newer warn or refuse; older kernels do not know it."""


class Page:
    """A page, which the agent finds among the descriptors of the process.

    A forked child has to close its parent's, and to make its own: it is a separate process.
    """

    def __init__(self) -> None:
        """Prepare a page of heartbeats; create nothing yet."""
        self._memory: mmap.mmap | None = None
        self._file = -1
        self._status: os.stat_result | None = None
        self._offset = 0
        self._map(bytearray(PAGE))

    def _map(self, memory: bytearray | mmap.mmap) -> None:
        """Write the words of a heartbeat's page there from now on."""
        view = memoryview(memory)
        position = view[POSITION_AT : POSITION_AT + POSITION.size]
        self.position = position.cast("Q"), position.cast("d")
        """The words of the position, and the same as times."""
        self._words = view.cast("I")

    def write(self, data: bytes) -> None:
        """Write a message to the heartbeat's page."""
        memory, offset = self._memory, self._offset
        if memory is None:  # another thread closed it just now
            return
        # Two slots in turn: a reader finds one whole while the other is being written.
        self._offset = offset ^ SLOT
        memory[offset : offset + len(data)] = data

    def write_note(self, data: bytes) -> None:
        """Write the page's note beside the messages; do nothing before this process's first one."""
        memory = self._memory
        if memory is None:
            return
        for number, start in enumerate(range(SLOT - ROOM, PAGE, SLOT)):
            memory[start : start + ROOM] = data[number * ROOM : (number + 1) * ROOM]

    def wait(self, collective: int, number: int) -> None:
        """Write the word of the heartbeat's page that says in which collective the host waits."""
        self._words[WAIT_AT // 4] = collective | number << 16

    def describe(self, thread: int, timeout: int) -> None:
        """Write to the heartbeat's page which thread trains, and when its collectives time out."""
        self._words[PROCESS_AT // 4], self._words[PROCESS_AT // 4 + 1] = thread, timeout

    def close(self) -> None:
        """Close the heartbeat's page.

        The memory is unmapped with its last view, which another thread may be writing to. It has a
        duplicate of the descriptor. Where a program has closed all that it did not know, to become
        a daemon, both numbers may be those of its own files by now, and are left alone.
        """
        memory, self._memory = self._memory, None
        file, self._file = self._file, -1
        if file < 0:
            return
        self._map(bytearray(PAGE))
        if self._is_ours(file):
            os.close(file)
            _mapped.discard(memory)

    def _is_ours(self, file: int) -> bool:
        try:
            return self._status is not None and os.path.samestat(os.fstat(file), self._status)
        except OSError:
            return False

    @property
    def is_open(self) -> bool:
        """Whether the heartbeat has a page of memory."""
        return self._memory is not None

    def open(self) -> None:
        """Make the heartbeat's page, with the words so far; OSError if none can be made."""
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        try:
            self._file = os.memfd_create("dshealthd-heartbeat", flags | _NOEXEC_SEAL)
        except OSError:
            self._file = os.memfd_create("dshealthd-heartbeat", flags)
        self._status = os.fstat(self._file)
        os.ftruncate(self._file, PAGE)
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        memory = mmap.mmap(self._file, PAGE)
        _mapped.add(memory)
        memory[:] = self._words.tobytes()
        self._map(memory)
        self._memory = memory

    def __del__(self) -> None:
        """Close the heartbeat's page; a job need not."""
        self.close()
