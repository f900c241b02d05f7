"""Open files, locked memory and limits: of the system, and of the processes closest to them."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from dshealthd.core.collector import (
    Collector,
    CollectorOptions,
    Context,
    Fault,
    Reason,
    Sample,
    Worker,
    gauge,
)
from dshealthd.core.host import read_bytes
from dshealthd.core.options import Duration, constant, option
from dshealthd.core.result import fault_of, one_of_many, read_parsed
from dshealthd.jobs import shares
from dshealthd.jobs.processes import ProcessTable, TrainingProcess
from dshealthd.linux.process_limits import Descriptors, ProcessLimits, Usage, parse_locked

OPEN = gauge(
    "dshealthd_open_files",
    "Open files of the system (scope system: fs.file-nr), or of the process closest to its own "
    "limit among all processes (scope process) or among a training job's (scope job).",
    *("scope", "training_job"),
)
LIMIT = gauge(
    "dshealthd_open_files_limit",
    "Limit of open files: fs.file-max (scope system), or the soft RLIMIT_NOFILE of the process "
    "that dshealthd_open_files shows.",
    *("scope", "training_job"),
)
LOCKED = gauge(
    "dshealthd_job_locked_memory_bytes",
    "Memory locked by mlock(2) (type locked: VmLck) and pinned for devices such as InfiniBand "
    "adapters (type pinned: VmPin) in the job's process closest to its limit; at most a minute "
    "old.",
    *("training_job", "type"),
)
LOCKED_LIMIT = gauge(
    "dshealthd_job_locked_memory_limit_bytes",
    "Soft RLIMIT_MEMLOCK of the process that dshealthd_job_locked_memory_bytes shows; +Inf if "
    "unlimited, or exceeded, which takes CAP_IPC_LOCK.",
    "training_job",
)
UNSEEN = gauge(
    "dshealthd_processes_unseen",
    "Processes whose environment could not be read, by reason; they may or may not belong to a "
    "training job.",
    "reason",
)


@dataclass(frozen=True, slots=True)
class _Slow:
    limits: ProcessLimits
    locked: int
    pinned: int
    descriptors: int | None
    """None if they can be counted at each sweep."""


def parse_file_nr(text: str) -> tuple[int, int]:
    """Return open files and their maximum, of `/proc/sys/fs/file-nr`. ValueError if malformed."""
    allocated, _free, most = text.split()
    return int(allocated), int(most)


@dataclass(frozen=True, kw_only=True)
class OpenFilesOptions(CollectorOptions):
    """Options of open files."""

    interval: Duration = option("15s", "Time from one sample to the next.", minimum="100ms")
    full_interval: Duration = constant("1m")
    """Time between scans of all processes for their limits: a read of each."""


class OpenFiles(Collector):
    """Reads `/proc`, in a worker: reading a process's environment takes its memory lock, which a
    process hung in a driver may hold.

    Besides the process of each job, the one closest to its limit of all processes is watched: this
    needs no privileges, so it works where jobs cannot be recognized, and it is just as often a
    daemon of the node that runs out. It is chosen once per full interval, and counted each time.
    """

    worker = Worker.STORAGE

    Options = OpenFilesOptions

    def __init__(self, options: OpenFilesOptions, context: Context) -> None:
        super().__init__(options, context)
        self._slow: dict[tuple[int, int], _Slow] = {}
        self._worst_pid: str | None = None
        self._full_at = -math.inf
        """When limits are read again, and the worst of all processes is chosen again."""

    @functools.cached_property
    def _descriptors(self) -> Descriptors:
        return Descriptors(self.host)

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield the open files of the system, of the worst process of each job and of all.

        A job's process that may not be read is a fault, never 0.
        """
        allocated, most = read_parsed(self.host.proc("sys/fs/file-nr"), parse_file_nr)
        yield OPEN(allocated, "system", "")
        yield LIMIT(most, "system", "")
        table = self.context.shared(ProcessTable)
        processes = table.refresh()
        for reason, count in table.unseen.items():
            yield UNSEEN(count, reason)
        if table.hidden:
            yield Fault(
                "processes",
                Reason.PERMISSION_DENIED,
                "hidepid: /proc does not show other users' processes",
            )
        direct, now = self._descriptors.direct, self.context.monotonic()
        remembered, self._slow = self._slow, {}
        if now >= self._full_at:
            self._full_at = now + self.options.full_interval
            remembered, self._worst_pid = {}, None
        for job, members in shares.jobs_with_places(processes).items():
            read = functools.partial(self._job, job, members, remembered)
            yield from one_of_many(f"job {job}", read)
        if direct:
            yield from self._all(table.pids)

    def _job(
        self,
        job: str,
        members: Iterable[TrainingProcess],
        remembered: Mapping[tuple[int, int], _Slow],
    ) -> Iterator[Sample | Fault]:
        files: list[Usage] = []
        memory: list[tuple[Usage, _Slow]] = []
        faults: dict[Reason, Fault] = {}
        for process in members:
            key = (process.pid, process.start)
            try:
                slow = remembered.get(key) or self._read(process.pid)
                count = slow.descriptors
                if count is None:
                    count = self._descriptors.open_descriptors(process.pid)
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended
            except (OSError, ValueError, ArithmeticError) as error:
                fault = fault_of(f"job {job}", error)
                faults[fault.reason] = fault._replace(detail=f"process {process.pid}: {error}")
                continue
            self._slow[key] = slow
            files.append(Usage(count, slow.limits.files))
            memory.append((Usage(max(slow.locked, slow.pinned), slow.limits.locked), slow))
        yield from faults.values()
        if files:
            usage = max(files, key=lambda usage: usage.order)
            yield OPEN(usage.value, "job", job)
            yield LIMIT(usage.limit, "job", job)
            usage, slow = max(memory, key=lambda entry: entry[0].order)
            yield LOCKED(slow.locked, job, "locked")
            yield LOCKED(slow.pinned, job, "pinned")
            yield LOCKED_LIMIT(usage.limit, job)

    def _read(self, pid: int) -> _Slow:
        locked, pinned = parse_locked(read_bytes(self.host.proc(f"{pid}/status")))
        limits = self._descriptors.limits(pid)
        # The kernel counts each against the limit, and refuses what exceeds it, but to
        # CAP_IPC_LOCK: a pod that has it for its RDMA has a limit of 64 KiB. What /proc says of its
        # capabilities may hold in its own user namespace alone, where they do not lift the limit.
        if max(locked, pinned) > limits.locked:
            limits = limits._replace(locked=math.inf)
        direct = self._descriptors.direct
        count = None if direct else self._descriptors.open_descriptors(pid)
        return _Slow(limits, locked, pinned, count)

    def _all(self, pids: Iterable[str]) -> Iterator[Sample]:
        worst = None
        if self._worst_pid is not None:
            worst = self._descriptors.worst([self._worst_pid])
        if worst is None:  # it is time to choose again, or the chosen one has ended
            worst = self._descriptors.worst(pids)
        if worst is not None:
            self._worst_pid, usage = worst
            yield OPEN(usage.value, "process", "")
            yield LIMIT(usage.limit, "process", "")
