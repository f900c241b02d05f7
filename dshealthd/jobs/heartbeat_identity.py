"""Who sends heartbeats: the job and rank of a process, read from `/proc` and never taken from what it says.

A process's environment is read under the lock of its memory, which one that hangs in a driver may hold, so that it is read in a thread that
nobody waits for. That lock is given up at the agent's own end, which a thread does not delay.
"""

from __future__ import annotations

import enum
import threading
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from dshealthd.host import read, read_bytes
from dshealthd.jobs.environment import job, launch, parse_environ
from dshealthd.jobs.processes import ENVIRON_LIMIT, TrainingProcess, parse_stat

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from dshealthd.host import Host

THREADS = 8
"""Processes that are looked at at a time."""
THREADS_PER_USER = 2
"""The same of one user, whose processes may hang."""


class Unidentified(enum.StrEnum):
    """Why it is not known which job and rank a sender is of."""

    PENDING = "pending"
    """It is being looked at. One that stays so hangs, and whoever reads its environment."""
    NO_LAUNCHER = "no_launcher"
    """It has no launcher's variables in the environment that it was started with."""
    PERMISSION_DENIED = "permission_denied"
    """Environments of other users take CAP_SYS_PTRACE."""
    OTHER_USER = "other_user"
    """Its environment names a job that another user's process, which is older, belongs to."""
    GONE = "gone"
    """It has ended, and its pid may be another's."""
    UNREADABLE = "unreadable"
    """What the kernel says of it is not understood."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A process whose place in a job is known."""

    process: TrainingProcess
    image: tuple[int, int]
    """Changes if another program takes the process's place."""


Answer: TypeAlias = "Identity | Unidentified"


def parse_user(status: bytes) -> int:
    """Return the real user of `/proc/<pid>/status`; ValueError if it is not there."""
    fields = status.partition(b"\nUid:")[2].split(None, 1)
    if not fields:
        message = "no user in the process status"
        raise ValueError(message)
    return int(fields[0])


def identify(host: Host, pid: int, user: int) -> Answer:
    """Return who the process is, if it is one of `user`. Blocks where the process hangs."""
    place = host.proc(str(pid))
    try:
        stat = parse_stat(read_bytes(f"{place}/stat", 4096))
        if parse_user(read_bytes(f"{place}/status", 8192)) != user:
            return Unidentified.GONE  # the pid is another's by now
        environment = parse_environ(read_bytes(f"{place}/environ", ENVIRON_LIMIT))
        if parse_stat(read_bytes(f"{place}/stat", 4096)).image != stat.image:
            return Unidentified.GONE
        machine = _boot(host)
    except (FileNotFoundError, ProcessLookupError):
        return Unidentified.GONE
    except PermissionError:
        return Unidentified.PERMISSION_DENIED
    except (OSError, ValueError):
        return Unidentified.UNREADABLE
    place_in_job = launch(environment)
    if place_in_job is None:
        return Unidentified.NO_LAUNCHER
    process = TrainingProcess(pid, stat.start, stat.parent, job(environment, machine), place_in_job, environment)
    return Identity(process, stat.image)


def same(host: Host, identity: Identity) -> bool:
    """Tell whether the process is still the one that was identified. Does not block."""
    try:
        return parse_stat(read_bytes(host.proc(f"{identity.process.pid}/stat"), 4096)).image == identity.image
    except (OSError, ValueError):
        return False


def _boot(host: Host) -> str:
    """Return what only this machine has; empty where the kernel does not tell. `ProcessTable` names jobs by the same."""
    try:
        return read(host.proc("sys/kernel/random/boot_id")).strip()
    except OSError:
        return ""


class Enquiries:
    """Has processes identified, a bounded number at a time; the rest wait for their turn."""

    def __init__(self, look: Callable[[int, int], Answer], loop: asyncio.AbstractEventLoop) -> None:
        """`look` is given a pid and its user, in a thread; answers are given in `loop`."""
        self._look = look
        self._loop = loop
        self._waiting: deque[tuple[int, int, Callable[[Answer], None]]] = deque()
        self._running: Counter[int] = Counter()

    def ask(self, pid: int, user: int, answer: Callable[[Answer], None]) -> None:
        """Have `answer` be called with what the process is, some time."""
        self._waiting.append((pid, user, answer))
        self._start()

    def _start(self) -> None:
        """Start what may be started: those of a user who has too many already are passed over."""
        for _ in range(len(self._waiting)):
            if self._running.total() >= THREADS:
                return
            enquiry = self._waiting.popleft()
            if self._running[enquiry[1]] >= THREADS_PER_USER:
                self._waiting.append(enquiry)
                continue
            self._running[enquiry[1]] += 1
            threading.Thread(target=self._run, args=enquiry, name="heartbeat sender", daemon=True).start()

    def _run(self, pid: int, user: int, answer: Callable[[Answer], None]) -> None:
        found = self._look(pid, user)

        def deliver() -> None:
            self._running[user] -= 1
            if not self._running[user]:
                del self._running[user]
            answer(found)
            self._start()

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(deliver)
