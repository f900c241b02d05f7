"""Training processes of this machine, found in `/proc` by what their launcher gave them.

`/proc` is listed once a sweep, and an environment is read once in the life of a program: `stat`
tells, for less, that a pid was reused (start time) or runs another program (place of its
environment, which exec changes).
"""

from __future__ import annotations

import enum
import itertools
import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dshealthd.core.collector import Reason
from dshealthd.core.host import read, read_bytes
from dshealthd.core.result import os_reason
from dshealthd.jobs import ownership
from dshealthd.jobs.environment import Launch, job, launch, nccl_variables, parse_environ
from dshealthd.linux.credentials import parse_real_user
from dshealthd.linux.process_stat import Stat, parse_stat

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from dshealthd.core.collector import Context
    from dshealthd.core.host import Host

ENVIRON_LIMIT = 2 << 20
"""Bytes of one environment that are read.

A process that has more, and nothing of a launcher in these, counts as unseen.
"""
SWEEP_LIMIT = 32 << 20
"""Bytes of environments that are read in one sweep, some 20 ms.

What is left waits for the next, so that nobody can stall the agent.
"""
ENTRY = 64
"""How many of these bytes each variable counts for, as it costs as much time."""
YOUNG = 2.0
"""Seconds.

Below this age a process may not have called exec yet, and is looked at again in the next sweep.
"""
ROTATION = 16
"""In so many sweeps every known process is checked for having been replaced.

At least 8 and at most 256 in each.
"""

_KERNEL_THREAD = 0x00200000  # PF_KTHREAD
_DEAD = "ZX"
_UNINTERRUPTIBLE = "D"
_TICKS = os.sysconf("SC_CLK_TCK")


class Unseen(enum.StrEnum):
    """Why it is not known whether a process trains."""

    PERMISSION_DENIED = "permission_denied"
    """Environments of other users take CAP_SYS_PTRACE."""
    BLOCKED = "blocked"
    """It waits in the kernel and cannot be interrupted, so that reading it may hang."""
    DEFERRED = "deferred"
    """There was too much to read in one sweep; its turn comes."""
    UNREADABLE = "unreadable"
    """Its environment is longer than what is read, or the kernel's answer is not understood."""


@dataclass(frozen=True, slots=True)
class TrainingProcess:
    """A process that a launcher started for a job, or a child that inherited its environment (a
    data loader, say).
    """

    pid: int
    start: int
    """Clock ticks from boot to its start."""
    parent: int
    """Pid of its parent when it was found.

    A rank's own process is the one whose parent is not of the same rank.
    """
    job: str
    """Equal on all nodes of the job; see `dshealthd.jobs.environment.job`.

    With its user's id behind it where the name is another user's (`dshealthd.jobs.ownership`).
    """
    launch: Launch
    environment: Mapping[str, str]
    """The allowed variables, and no others."""
    nccl: frozenset[str] = frozenset()
    """Names, without values, of all that is set for NCCL."""
    user: int | None = None
    """Its real uid; None where the kernel does not tell."""
    confirmed: bool = False
    """Whether the scheduler's cgroup says that it is of the job which it names."""
    network: str = ""
    """Its network namespace; empty where that is the agent's own, or unknown."""

    @property
    def started(self) -> float:
        """When the training process started, in seconds since boot."""
        return self.start / _TICKS

    @property
    def claimed(self) -> str:
        """The job as the training process's environment names it, whoever's that is."""
        return ownership.claimed(self.job)


def with_owners(processes: Iterable[TrainingProcess]) -> list[TrainingProcess]:
    """Return training processes with the jobs that they are of, among each other."""
    processes = list(processes)
    owners = ownership.owners(processes)
    return [
        process
        if (job := ownership.name(process, owners)) == process.job
        else replace(process, job=job)
        for process in processes
    ]


def standing(place: str, job: str) -> tuple[int | None, bool]:
    """Return the user of a training process, and whether the scheduler says that it is of a job.

    `place` is its directory in `/proc`. None and False where the kernel does not tell.
    """
    try:
        user = parse_real_user(read_bytes(f"{place}/status", 1 << 16))
    except (OSError, ValueError):
        return None, False
    try:
        return user, ownership.scheduled_in(read_bytes(f"{place}/cgroup", 1 << 16)) == job
    except OSError:
        return user, False


def namespace(host: Host, pid: int) -> str:
    """Return the network namespace of a training process.

    Empty where it is the agent's own, or the kernel does not tell: two pods that meet on
    `localhost`, on equal ports, are two jobs.
    """
    try:
        theirs = os.readlink(host.proc(f"{pid}/ns/net"))
        return "" if theirs == os.readlink(host.proc("self/ns/net")) else theirs
    except OSError:
        return ""


class ProcessTable:
    """All processes of the machine; one in an agent or worker, `context.shared(ProcessTable)`."""

    def __init__(self, context: Context) -> None:
        """Read nothing yet."""
        self._context = context
        self._proc = str(context.host.procfs)
        self._sweep: int | None = None
        self._machine: str | None = None
        self._known: dict[str, tuple[int, int]] = {}
        """The image of every process that was looked at, the one that was checked the longest ago
        first.
        """
        self._training: dict[str, TrainingProcess] = {}
        """With the jobs that they name."""
        self._shown: list[TrainingProcess] = []
        """With the jobs that they are of."""
        self._unseen: dict[str, Unseen] = {}
        self._again: set[str] = set()
        self._budget = 0
        self.pids: Collection[str] = ()
        """The directories of all processes, as the last sweep found them."""
        self.hidden = False
        """Whether `/proc` shows some processes only (hidepid): not even the first one is there."""

    @property
    def unseen(self) -> Mapping[Unseen, int]:
        """How many processes may or may not train, by why their environment could not be read."""
        counts = Counter(self._unseen.values())
        return {reason: counts[reason] for reason in Unseen}

    def refresh(self) -> list[TrainingProcess]:
        """Return the training processes, oldest first, after bringing the table up to date once in
        a sweep.

        Raises OSError if `/proc` cannot be listed. A process that cannot be looked at is `unseen`;
        one that vanishes is gone.
        """
        if self._sweep != self._context.sweep:
            self._update()
            self._sweep = self._context.sweep
            found = sorted(
                self._training.values(), key=lambda process: (process.start, process.pid)
            )
            self._shown = with_owners(found)
        return list(self._shown)

    def _update(self) -> None:
        current = {name for name in os.listdir(self._proc) if name.isdecimal()}
        for pid in self._known.keys() - current:
            self._forget(pid)
        for pid in self._unseen.keys() - current:
            del self._unseen[pid]
        self.pids, self.hidden = current, "1" not in current
        new = current - self._known.keys()
        again, self._again = self._again & current, set()
        self._budget = SWEEP_LIMIT
        young = self._now() - YOUNG * _TICKS
        for pid in self._turn(len(current)):
            self._look(pid, young)
        for pid in new:
            self._look(pid, young)
        # After the new ones, which have never been looked at.
        for pid in again - new:
            self._look(pid, young, again=True)

    def _turn(self, processes: int) -> Iterable[str]:
        """Return the share of the known training processes that was checked the longest ago."""
        turn = list(itertools.islice(self._known, min(256, max(8, processes // ROTATION))))
        for pid in turn:
            self._known[pid] = self._known.pop(pid)  # to the end
        return turn

    def _look(self, pid: str, young: float, *, again: bool = False) -> None:
        """Find out whether a process trains.

        One that cannot be told yet stays unknown, and is looked at in the next sweep.
        """
        try:
            stat = parse_stat(read_bytes(f"{self._proc}/{pid}/stat", 4096))
            # Not by the pid alone, which may be another process's since the last sweep.
            if self._known.get(pid) == stat.image and (not again or pid in self._training):
                return
            self._forget(pid)
            if stat.flags & _KERNEL_THREAD or stat.state in _DEAD:
                self._known[pid] = stat.image
            elif (unseen := self._postponed(pid, stat)) is not None:
                self._unseen[pid] = unseen
            else:
                self._read(pid, stat)
                # Between fork and exec a launcher's child has the launcher's environment, without a
                # rank.
                if stat.start > young and pid not in self._training:
                    self._again.add(pid)
        except (FileNotFoundError, ProcessLookupError):
            self._forget(pid)  # it vanished
        except OSError as error:
            self._forget(pid)
            self._unseen[pid] = _unseen(error)
        except ValueError:
            self._forget(pid)
            self._unseen[pid] = Unseen.UNREADABLE

    def _postponed(self, pid: str, stat: Stat) -> Unseen | None:
        """Say why the environment of a process should not be read now.

        The kernel takes the lock of the address space to read it, and a process that waits in a
        driver may hold that lock for ever.
        """
        if stat.state == _UNINTERRUPTIBLE or self._context.entering(f"process {pid}") is not None:
            return Unseen.BLOCKED
        return Unseen.DEFERRED if self._budget <= 0 else None

    def _read(self, pid: str, stat: Stat) -> None:
        """Read the environment of a process, and note whether it trains."""
        try:
            data = read_bytes(f"{self._proc}/{pid}/environ", ENVIRON_LIMIT)
        except PermissionError:
            self._known[pid], self._unseen[pid] = stat.image, Unseen.PERMISSION_DENIED
            return
        # Counted after the read, as nobody knows before how long it is; the next process waits.
        self._budget -= len(data) + ENTRY * data.count(b"\0")
        cut = len(data) >= ENVIRON_LIMIT
        environment = parse_environ(data[: data.rfind(b"\0") + 1] if cut else data)
        place = launch(environment)
        if place is not None:
            network = namespace(self._context.host, int(pid))
            name = job(environment, self.machine + network)
            user, confirmed = standing(f"{self._proc}/{pid}", name)
            if parse_stat(read_bytes(f"{self._proc}/{pid}/stat", 4096)).image != stat.image:
                return  # it was replaced while it was read: the next sweep looks at its successor
            self._training[pid] = TrainingProcess(
                int(pid),
                stat.start,
                stat.parent,
                name,
                place,
                environment,
                nccl_variables(data),
                user,
                confirmed,
                network,
            )
        elif cut:
            self._unseen[pid] = Unseen.UNREADABLE
        self._known[pid] = stat.image

    def _forget(self, pid: str) -> None:
        self._known.pop(pid, None)
        self._training.pop(pid, None)
        self._unseen.pop(pid, None)

    def _now(self) -> float:
        """Return the clock ticks since boot, for the age of processes.

        Infinity, by which nothing is young, where they cannot be read.
        """
        try:
            return float(read(f"{self._proc}/uptime").split()[0]) * _TICKS
        except (OSError, IndexError, ValueError):
            return math.inf

    @property
    def machine(self) -> str:
        """Return what only this machine has, to name jobs; empty where it is not known."""
        if self._machine is None:
            try:
                self._machine = read(f"{self._proc}/sys/kernel/random/boot_id").strip()
            except OSError:
                self._machine = ""
        return self._machine


def _unseen(error: OSError) -> Unseen:
    return (
        Unseen.PERMISSION_DENIED
        if os_reason(error) is Reason.PERMISSION_DENIED
        else Unseen.UNREADABLE
    )
