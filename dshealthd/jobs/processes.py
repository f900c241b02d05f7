"""Training processes of this machine, found in `/proc` by their launcher's variables.

`/proc` is listed once per sweep, and an environment is read once in the life of a program. `stat`
is cheaper to read, and shows that a pid was reused (start time) or runs another program (address of
its environment, which exec changes).
"""

from __future__ import annotations

import enum
import itertools
import math
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from dshealthd.core import documents
from dshealthd.core.collector import Context, Reason, SourceError, process_part
from dshealthd.core.host import Host, read, read_bytes
from dshealthd.core.result import os_reason
from dshealthd.jobs import ownership
from dshealthd.jobs.environment import Launch, job_name, launch, nccl_variables, parse_environ
from dshealthd.linux.credentials import parse_real_user
from dshealthd.linux.process import TICKS, Stat, parse_stat, uptime

ENVIRON_LIMIT = 2 << 20
"""Bytes that are read of one environment.

A process with a longer one, and no launcher's variables in these bytes, counts as unseen.
"""
SWEEP_LIMIT = 32 << 20
"""Bytes of environments that are read in one sweep, which takes some 20 ms.

The rest waits for the next sweep, so that no user can stall the agent.
"""
ENTRY = 64
"""Extra bytes of that budget for each variable, whose parsing takes as much time."""
YOUNG = 2.0
"""Age in seconds below which a process may not have called exec yet; it is read again in the next
sweep.
"""
ROTATION = 16
"""Sweeps in which every known process is checked for having been replaced.

Each sweep checks at least 8 and at most 256.
"""

Key = tuple[int, int]
"""Pid and start time of a process."""
_KERNEL_THREAD = 0x00200000  # PF_KTHREAD
_DEAD = "ZX"
UNINTERRUPTIBLE = "D"


class Unseen(enum.StrEnum):
    """Why it is unknown whether a process trains."""

    PERMISSION_DENIED = "permission_denied"
    """Environments of other users need CAP_SYS_PTRACE."""
    BLOCKED = "blocked"
    """It is in uninterruptible sleep, so reading its environment may hang."""
    DEFERRED = "deferred"
    """There was too much to read in one sweep; a later one reads it."""
    UNREADABLE = "unreadable"
    """Its environment is too long, or the kernel's answer is not understood."""


@dataclass(frozen=True, slots=True)
class TrainingProcess:
    """A process that a launcher started for a job, or a child that inherited its environment, such
    as a data loader.
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

    Its user's id is appended if another user owns the name (`dshealthd.jobs.ownership`).
    """
    launch: Launch
    environment: Mapping[str, str]
    """The allowed variables, and no others."""
    nccl: frozenset[str] = frozenset()
    """Names, without values, of all variables that are set for NCCL."""
    user: int | None = None
    """Its real uid; None if unknown."""
    confirmed: bool = False
    """Whether the scheduler's cgroup names the claimed job too."""
    network: str = ""
    """Its network namespace; empty if that is the agent's own, or unknown."""
    terminal: bool = False
    """Whether it had a terminal when it was found, as in an interactive session."""

    @property
    def key(self) -> Key:
        """Pid and start, which identify a process uniquely."""
        return self.pid, self.start

    @property
    def started(self) -> float:
        """Start time in seconds since boot."""
        return self.start / TICKS

    @property
    def launcher(self) -> tuple[int, str] | None:
        """The pid of the launcher that starts the ranks anew when one fails, and its run's id; None
        if it has ended, or does not do so.

        torchrun gives each start another port, and so the job another name if no scheduler has one.
        """
        run = self.environment.get("TORCHELASTIC_RUN_ID")
        return (self.parent, run) if run and self.parent > 1 else None

    @property
    def part(self) -> str:
        """The name under which collectors enter it."""
        return process_part(self.pid, self.user)

    @property
    def claimed(self) -> str:
        """The job's name in the process's environment, whoever owns the job."""
        return ownership.claimed_name(self.job)


def with_owners(processes: Iterable[TrainingProcess]) -> list[TrainingProcess]:
    """Return training processes with the jobs that they belong to, given all claims among them."""
    processes = list(processes)
    owners = ownership.owners(processes)
    return [
        process
        if (job := ownership.name(process, owners)) == process.job
        else replace(process, job=job)
        for process in processes
    ]


def confirmed_owner(place: str, job: str) -> tuple[int | None, bool]:
    """Return the user of a training process, and whether the scheduler confirms its job.

    `place` is its directory in `/proc`. None and False if unknown.
    """
    try:
        user = parse_real_user(read_bytes(f"{place}/status"))
    except (OSError, ValueError, ArithmeticError):
        return None, False
    try:
        return user, ownership.scheduled_in(read_bytes(f"{place}/cgroup")) == job
    except OSError:
        return user, False


def part_of(host: Host, pid: int) -> str:
    """Return the name under which collectors enter a process that is not known yet."""
    try:
        user = parse_real_user(read_bytes(host.proc(f"{pid}/status")))
    except (OSError, ValueError, ArithmeticError):
        user = None
    return process_part(pid, user)


def namespace(host: Host, pid: int) -> str:
    """Return the network namespace of a process; empty if it is the agent's own or unknown.

    It distinguishes jobs: two pods that meet on `localhost`, on equal ports, are two jobs.
    """
    try:
        theirs = os.readlink(host.proc(f"{pid}/ns/net"))
        return "" if theirs == os.readlink(host.proc("self/ns/net")) else theirs
    except OSError:
        return ""


def training_process(
    host: Host,
    pid: int,
    stat: Stat,
    environment: Mapping[str, str],
    machine: str,
    nccl: frozenset[str] = frozenset(),
) -> TrainingProcess | None:
    """Return the training process with this environment and the job it claims; None if it is none.

    What is read belongs to it only if its `stat` is still the same afterwards.
    """
    place = launch(environment)
    if place is None:
        return None
    network = namespace(host, pid)
    name = job_name(environment, machine + network)
    user, confirmed = confirmed_owner(host.proc(str(pid)), name)
    terminal = stat.terminal != 0
    return TrainingProcess(
        pid, stat.start, stat.parent, name, place, environment, nccl, user, confirmed, network,
        terminal,
    )  # fmt: skip


def read_stat(host: Host, pid: int) -> Stat:
    """Return what the kernel tells of a process; OSError, ValueError. Does not block."""
    return parse_stat(read_bytes(host.proc(f"{pid}/stat")))


def read_process(host: Host, pid: int, stat: Stat, machine: str) -> TrainingProcess | None:
    """Return the training process of this `stat`; None if it is none.

    Raises OSError. Blocks while the process hangs in a driver.
    """
    environment = parse_environ(read_bytes(host.proc(f"{pid}/environ"), ENVIRON_LIMIT))
    return training_process(host, pid, stat, environment, machine)


def boot_id(host: Host) -> str:
    """Return the id of this machine's boot, to name jobs; empty if unknown."""
    try:
        return read(host.proc("sys/kernel/random/boot_id")).strip()
    except OSError:
        return ""


class ProcessTable:
    """The processes of the machine; an agent or worker has one, `context.shared(ProcessTable)`."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._proc = str(context.host.procfs)
        self._sweep: int | None = None
        self._machine: str | None = None
        self._known: dict[str, tuple[int, int]] = {}
        """The image of every known process, least recently checked first."""
        self._training: dict[str, TrainingProcess] = {}
        """Training processes with the jobs that they claim."""
        self._shown: list[TrainingProcess] = []
        """Training processes with the jobs that they belong to."""
        self._unseen: dict[str, Unseen] = {}
        self._again: set[str] = set()
        self._budget = 0
        self.pids: Collection[str] = ()
        """The names of all processes' directories in the last sweep."""
        self.hidden = False
        """Whether `/proc` hides processes (hidepid): even pid 1 is missing."""

    @property
    def unseen(self) -> Mapping[Unseen, int]:
        """Number of processes whose environment could not be read, by reason."""
        counts = Counter(self._unseen.values())
        return {reason: counts[reason] for reason in Unseen}

    def refresh(self) -> list[TrainingProcess]:
        """Update the table, once per sweep, and return the training processes, oldest first.

        Raises OSError if `/proc` cannot be listed. A process that cannot be read is `unseen`; one
        that vanishes is dropped.
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
        for pid in (self._known.keys() | self._unseen.keys()) - current:
            self._forget(pid)
        self.pids, self.hidden = current, "1" not in current
        new = current - self._known.keys()
        again, self._again = self._again & current, set()
        self._budget = SWEEP_LIMIT
        young = self._now() - YOUNG * TICKS
        for pid in (*self._turn(len(current)), *self._by_user(new)):
            self._examine(pid, young)
        # After the new ones, which have never been read.
        for pid in again - new:
            self._examine(pid, young, again=True)

    def _turn(self, processes: int) -> Iterable[str]:
        """Return the share of the known processes that was checked longest ago."""
        turn = list(itertools.islice(self._known, min(256, max(8, processes // ROTATION))))
        for pid in turn:
            self._known[pid] = self._known.pop(pid)  # to the end
        return turn

    def _by_user(self, pids: Iterable[str]) -> list[str]:
        """Return processes in an order in which users take turns, as one may start any number whose
        environments take long to read.
        """
        before: Counter[int] = Counter()
        turns = []
        for pid in pids:
            user = self._user(pid)
            turns.append((before[user], pid))
            before[user] += 1
        return [pid for _, pid in sorted(turns)]

    def _user(self, pid: str) -> int:
        """Return whose a process is, as far as its directory tells; -1 once it has ended."""
        try:
            return os.stat(f"{self._proc}/{pid}").st_uid
        except OSError:
            return -1

    def _examine(self, pid: str, young: float, *, again: bool = False) -> None:
        """Find out whether a process trains; if that fails, the next sweep tries again."""
        try:
            stat = read_stat(self._context.host, int(pid))
            # Not by the pid alone, which another process may have got since the last sweep.
            if self._known.get(pid) == stat.image and (not again or pid in self._training):
                return
            self._forget(pid)
            if stat.flags & _KERNEL_THREAD or stat.state in _DEAD:
                self._known[pid] = stat.image
            elif (unseen := self._postponed(pid, stat)) is not None:
                self._unseen[pid] = unseen
            else:
                self._read(pid, stat)
                # Between fork and exec a launcher's child has the launcher's environment, which
                # has no rank.
                if stat.start > young and pid not in self._training:
                    self._again.add(pid)
        except (FileNotFoundError, ProcessLookupError):
            self._forget(pid)  # it vanished
        except OSError as error:
            self._forget(pid)
            refused = os_reason(error) is Reason.PERMISSION_DENIED
            self._unseen[pid] = Unseen.PERMISSION_DENIED if refused else Unseen.UNREADABLE
        except documents.MISSHAPEN:
            self._forget(pid)
            self._unseen[pid] = Unseen.UNREADABLE

    def _postponed(self, pid: str, stat: Stat) -> Unseen | None:
        """Return why the environment of a process should not be read now; None if it may be.

        Reading takes the lock of the address space, which a process that waits in a driver may hold
        forever.
        """
        if stat.state == UNINTERRUPTIBLE:
            return Unseen.BLOCKED
        if self._context.entering(part_of(self._context.host, int(pid))) is not None:
            return Unseen.BLOCKED
        return Unseen.DEFERRED if self._budget <= 0 else None

    def _read(self, pid: str, stat: Stat) -> None:
        try:
            data = read_bytes(f"{self._proc}/{pid}/environ", ENVIRON_LIMIT)
        except PermissionError:
            self._known[pid], self._unseen[pid] = stat.image, Unseen.PERMISSION_DENIED
            return
        # Counted after the read, because the length is unknown before; the next process waits.
        self._budget -= len(data) + ENTRY * data.count(b"\0")
        cut = len(data) >= ENVIRON_LIMIT
        environment = parse_environ(data[: data.rfind(b"\0") + 1] if cut else data)
        found = training_process(
            self._context.host, int(pid), stat, environment, self.machine, nccl_variables(data)
        )
        if found is not None:
            if read_stat(self._context.host, int(pid)).image != stat.image:
                return  # it was replaced while it was read: the next sweep reads its successor
            self._training[pid] = found
        elif cut:
            self._unseen[pid] = Unseen.UNREADABLE
        self._known[pid] = stat.image

    def _forget(self, pid: str) -> None:
        self._known.pop(pid, None)
        self._training.pop(pid, None)
        self._unseen.pop(pid, None)

    def _now(self) -> float:
        """Return the clock ticks since boot; infinity, so that nothing is young, if unknown."""
        try:
            return uptime(self._context.host) * TICKS
        except (OSError, SourceError):
            return math.inf

    @property
    def machine(self) -> str:
        """An id of this machine and boot, to name jobs; empty if unknown."""
        if self._machine is None:
            self._machine = boot_id(self._context.host)
        return self._machine
