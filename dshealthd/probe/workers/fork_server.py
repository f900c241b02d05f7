"""The agent's end of the fork server, a process that has imported torch and forks workers.

Starts it, has it fork and reap workers, and ends it. It is the *parent* in metrics and reasons.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any

from dshealthd.core import documents
from dshealthd.core.child import StartError, channel, how_ended, spawn
from dshealthd.core.host import read_bytes
from dshealthd.core.timing import happens, time_limit
from dshealthd.linux.process import parse_stat
from dshealthd.probe.workers import launch, worker

log = logging.getLogger(__name__)

MEMORY = 16 << 30
"""Bytes of private memory that the fork server and each worker may have; torch with a CUDA context
on a GPU takes some 4 GiB.
"""
PROGRAM = worker.__file__
PARENT, DEADLINE = "parent", "deadline"
"""Slugs: the fork server itself failed; it took too long to start."""
FORK_DEADLINE = 3.0
"""Seconds for the fork server to answer a request; it does nothing else."""
BOARD = 64 << 10
"""Bytes of a status page; a worker's output beyond that is lost."""
PRINTED = worker.COUNTERS.size
"""Offset of the printed text on a page, after the counters."""
TAIL = 600
"""Last bytes of the printed text that are reported."""
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/nonexistent",
    "LC_ALL": "C.UTF-8",
    # No thread pools in a process that forks.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    # An MPS daemon at its usual place would have a job's next process wait until root's are done.
    "CUDA_MPS_PIPE_DIRECTORY": "/nonexistent",
}
"""Base environment of the interpreter; it inherits nothing from the agent's own."""


class StatusPage:
    """A small memory file of fixed size that a process writes to; the agent can read it after the
    process has hung or died.
    """

    def __init__(self) -> None:
        """Create the memory file of a worker's page."""
        self.descriptor = os.memfd_create("dshealthd-board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, BOARD)
        # A library that prints in a loop cannot grow the page, and nothing can cut off the
        # counters.
        fcntl.fcntl(
            self.descriptor,
            fcntl.F_ADD_SEALS,
            fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL,
        )
        # The worker's copies of this descriptor share its offset, so its output starts here.
        os.lseek(self.descriptor, PRINTED, os.SEEK_SET)

    def counters(self) -> tuple[int, int]:
        """Return how many collectives the worker's page says were entered and left."""
        entered, left = worker.COUNTERS.unpack(os.pread(self.descriptor, PRINTED, 0))
        return entered, left

    def printed(self) -> str:
        """Return the end of the worker's printed output on one line."""
        text = (
            os.pread(self.descriptor, BOARD - PRINTED, PRINTED)
            .rstrip(b"\0")[-TAIL:]
            .decode(errors="replace")
        )
        return "".join(character if character.isprintable() else " " for character in text).strip()

    def close(self) -> None:
        """Close the file of the worker's page."""
        os.close(self.descriptor)


class ForkServerError(Exception):
    """The fork server cannot start workers. `reason` is a slug of `RankResult.reason`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class ForkedWorker:
    """One forked worker: the agent can kill it, notices its end, and has it reaped."""

    def __init__(self, parent: ForkServer, pid: int, pidfd: int) -> None:
        """Watch a process, whose pid stays its own until the parent is asked to reap it."""
        self.pid = pid
        self.ended = asyncio.Event()
        self.status: int | None = None
        """Wait status, once the parent has reaped it."""
        self._parent = parent
        self._pidfd = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._end)

    def kill(self) -> None:
        """Kill the forked worker and whatever it started."""
        if self._pidfd >= 0:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            self._kill_group()

    async def gone(self, seconds: float) -> bool:
        """Wait for the forked worker's end; False if it is still there after `seconds`."""
        return await happens(self.ended, seconds)

    def state(self) -> str:
        """Return the process state. T: stopped. D: uninterruptible wait. Empty: gone."""
        try:
            return parse_stat(read_bytes(f"/proc/{self.pid}/stat", 4096)).state
        except (OSError, ValueError, ArithmeticError):
            return ""

    def _kill_group(self) -> None:
        """Kill the forked worker's session. Only while the parent has not reaped it: a reaped pid
        may belong to another process.
        """
        if not self._parent.ended.is_set():
            # A worker that has not created its session yet has no group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        # Kill the group before reaping: as long as the zombie keeps its pid, no other process can
        # have that group.
        self._pidfd = -1
        self._kill_group()
        self._parent.reap(self)


class ForkServer:
    """A running fork server."""

    def __init__(self, python: str, program: str, environment: Mapping[str, str]) -> None:
        """Start the process; `ready` waits until it can fork. It first checks the interpreter,
        which may be on a dead mount. Raises StartError.
        """
        flags = ("-I", "-S", "-B", "-W", "ignore")
        command = [sys.executable, *flags, launch.__file__, str(os.getpid())]
        what = "the workers' fork server"
        # Packets keep descriptors together with their message.
        with channel(what, socket.SOCK_SEQPACKET) as (ours, theirs):
            try:
                self.board = StatusPage()
            except OSError as error:
                raise StartError(what, error) from error
            try:
                self._child = spawn(
                    what,
                    [*command, str(theirs.fileno()), python, program],
                    descriptors=[theirs.fileno()],
                    env={**ENVIRONMENT, **environment},
                    output=self.board.descriptor,
                    cwd="/",
                    memory=MEMORY,
                )
            except StartError:
                self.board.close()
                raise
        self.ended = self._child.ended
        self.usable = True
        """False once it has ended or has been killed."""
        self.about: dict[str, Any] = {}
        """Versions `torch`, `cuda`, `python`; `gpus`, how many GPUs torch can use, and `no_gpus`,
        why none; `threads`, the threads left by the import.
        """
        self._socket = ours
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._forks: dict[int, asyncio.Future[ForkedWorker]] = {}
        self._reaps: dict[int, ForkedWorker] = {}
        self._count = 0
        self._child.when_ended(self._end)
        self._loop.add_reader(ours, self._receive)

    @property
    def pid(self) -> int:
        """The fork server's process id."""
        return self._child.pid

    async def ready(self, deadline: float) -> None:
        """Wait until the fork server has imported torch; raise ForkServerError if it fails, and
        kill it if it misses the deadline.
        """
        try:
            # Shielded, as `_receive` or `_end` still settle it after nobody waits for it.
            async with time_limit(deadline):
                self.about = await asyncio.shield(self._ready)
        except TimeoutError as error:
            self.kill()
            detail = f"importing torch took longer than {deadline:g} s"
            raise ForkServerError(DEADLINE, detail) from error

    async def fork(self, channel: int, board: int) -> ForkedWorker:
        """Have a worker started on two descriptors; ForkServerError, with the parent killed."""
        self._count += 1
        number = self._count
        future: asyncio.Future[ForkedWorker]
        future = self._forks[number] = self._loop.create_future()
        try:
            self._send({"fork": number}, channel, board)
            async with time_limit(FORK_DEADLINE):
                return await future
        except (TimeoutError, BlockingIOError) as error:
            self.kill()
            detail = f"the workers' fork server did not answer within {FORK_DEADLINE:g} s"
            raise ForkServerError(PARENT, detail) from error
        except OSError as error:
            raise ForkServerError(PARENT, f"the workers' fork server is gone: {error}") from error
        finally:
            self._forks.pop(number, None)

    def reap(self, child: ForkedWorker) -> None:
        """Have a dead worker reaped; its `ended` is set even without an exit status."""
        self._reaps[child.pid] = child
        try:
            self._send({"reap": child.pid})
        except OSError:
            self._reaped(child.pid, None)

    def kill(self) -> None:
        """Kill the fork server; the kernel kills its workers with it."""
        self.usable = False
        self._close()
        if not self.ended.is_set():
            self._child.kill()

    def _close(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()

    def _send(self, message: dict[str, Any], *descriptors: int) -> None:
        if self.ended.is_set() or self._socket.fileno() < 0:
            raise BrokenPipeError(errno.EPIPE, "it has ended")
        socket.send_fds(self._socket, [documents.dumps(message).encode()], descriptors)

    def _receive(self) -> None:
        try:
            packet, descriptors, _flags, _address = socket.recv_fds(
                self._socket, worker.PACKET, 1, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError as error:
            log.warning("probe: the workers' fork server closed its channel: %s", error)
            packet, descriptors = b"", []
        if not packet:
            self._loop.remove_reader(self._socket)
            return
        try:
            self._process(json.loads(packet), descriptors)
        except documents.MISSHAPEN:  # it runs what others have installed
            log.exception("probe: the workers' fork server sent an invalid message; it is killed")
            self._child.kill()

    def _process(self, message: Any, descriptors: list[int]) -> None:
        match message:
            case {"ready": _}:
                self._settle(message)
            case {"failed": reason, "detail": detail}:
                self._settle(ForkServerError(str(reason), str(detail)))
            case {"forked": number, "pid": pid}:
                child, future = ForkedWorker(self, pid, descriptors[0]), self._forks.get(number)
                if future is None or future.done():
                    child.kill()  # its requester is gone
                else:
                    future.set_result(child)
            case {"reaped": pid, "status": status}:
                self._reaped(pid, status)

    def _settle(self, found: dict[str, Any] | ForkServerError) -> None:
        if self._ready.done():
            return
        if isinstance(found, dict):
            self._ready.set_result(found)
        else:
            self._ready.set_exception(found)
            self._ready.exception()  # mark it as retrieved, in case nobody waits for it

    def _reaped(self, pid: int, status: int | None) -> None:
        child = self._reaps.pop(pid, None)
        if child is not None:
            child.status = status
            child.ended.set()

    def _end(self) -> None:
        if self._socket.fileno() >= 0:
            self._receive()  # its last message, such as why it failed
            self._close()
        self.usable = False
        code = self._child.code
        how = "has ended" if code is None else how_ended(code)
        error = ForkServerError(PARENT, f"the workers' fork server {how}: {self.board.printed()}")
        self.board.close()
        self._settle(error)
        for future in self._forks.values():
            if not future.done():
                future.set_exception(error)
        for pid in list(self._reaps):
            self._reaped(pid, None)
