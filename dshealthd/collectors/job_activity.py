"""What the processes of training jobs do besides their steps: bytes that they read, write, send and
receive, and the CPU time of their child processes.

A job that moves bytes is at work, whatever its ranks do not report: it saves a checkpoint, uploads
one, or loads data. So is one whose compilers or data loaders compute.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from typing import TYPE_CHECKING

from dshealthd.core.collector import Collector, CollectorOptions, Worker, gauge
from dshealthd.core.host import read_bytes
from dshealthd.core.result import fault_of
from dshealthd.jobs import shares
from dshealthd.jobs.processes import ProcessTable
from dshealthd.linux import sock_diag
from dshealthd.linux.process import TICKS, open_files, parse_stat
from dshealthd.linux.sock_diag import TcpState
from dshealthd.linux.socket_owners import parse_inode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dshealthd.core.collector import Context, Fault, Sample
    from dshealthd.jobs.processes import TrainingProcess

FILES = gauge(
    "dshealthd_job_file_bytes_per_second",
    "Rate at which the job's processes on this node read and wrote since the sample before; absent "
    "until there is one. The larger of read_bytes + write_bytes of /proc/<pid>/io, which count pages, and "
    "rchar + wchar, which count what goes through read and write.",
    "training_job",
)
SOCKETS = gauge(
    "dshealthd_job_socket_bytes_per_second",
    "Rate at which TCP connections of the job's processes on this node sent and received since the "
    "sample before, as their other ends have acknowledged it; in a network namespace of its own, that "
    "of all its interfaces but lo. Absent where no connection of theirs is seen.",
    "training_job",
)
CHILDREN = gauge(
    "dshealthd_job_children_cpu_cores",
    "CPU cores that child processes of the job's ranks on this node, such as compilers and data "
    "loaders, took since the sample before.",
    "training_job",
)

MAX_JOBS = 16
MAX_DESCRIPTORS = 32_768
"""Most descriptors looked at in a sample, about 0.1 s; a user can have millions."""
BUDGET = 0.1
"""Seconds of CPU time that the dump of sockets may take."""


def parse_io(data: bytes) -> int:
    """Return the bytes read and written, from a `/proc/<pid>/io`; ValueError if it lacks them."""
    found = {}
    for line in data.splitlines():
        name, _, value = line.partition(b":")
        if name in {b"rchar", b"wchar", b"read_bytes", b"write_bytes"}:
            found[name] = int(value)
    try:
        return max(found[b"rchar"] + found[b"wchar"], found[b"read_bytes"] + found[b"write_bytes"])
    except KeyError as error:
        message = f"no {error.args[0].decode()}"
        raise ValueError(message) from error


def parse_interfaces(data: bytes) -> int:
    """Return the bytes that the interfaces of a `/proc/<pid>/net/dev` received and sent, but for lo;
    ValueError if malformed.
    """
    total = 0
    for line in data.splitlines()[2:]:
        name, _, values = line.partition(b":")
        numbers = values.split()
        if len(numbers) < 9:  # noqa: PLR2004 - eight of receiving come before those of sending
            message = f"not an interface: {line[:80]!r}"
            raise ValueError(message)
        if name.strip() != b"lo":
            total += int(numbers[0]) + int(numbers[8])
    return total


class JobActivity(Collector):
    """Reads `/proc` for the processes of jobs, in the worker that holds the process table.

    The kernel makes a reader wait while the process executes another program.
    """

    worker = Worker.STORAGE

    def __init__(self, options: CollectorOptions, context: Context) -> None:
        super().__init__(options, context)
        self._at: float | None = None
        """When the sample before was taken."""
        self._before: Mapping[object, float] = {}
        """The counters at the sample before, by what is counted and where."""

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield each job's rates; a process that cannot be read is a fault, never 0."""
        jobs, _ = shares.jobs(self.context.shared(ProcessTable).refresh(), MAX_JOBS)
        now, before = self.context.monotonic(), self._before
        elapsed = None if self._at is None else now - self._at
        counted: dict[object, float] = {}
        sockets = self._sockets(jobs)
        for job, members in jobs.items():
            rises: defaultdict[object, list[float]] = defaultdict(list)
            children = _children(members)
            for process in members:
                part = f"process {process.pid}"
                if (fault := self.context.entering(part)) is not None:
                    yield fault
                    continue
                key = process.pid, process.start
                place = self.host.proc(str(process.pid))
                try:
                    moved = parse_io(read_bytes(f"{place}/io", 4096))
                    stat = parse_stat(read_bytes(f"{place}/stat", 4096))
                except (FileNotFoundError, ProcessLookupError):
                    continue  # it has ended
                except (OSError, ValueError) as error:
                    yield fault_of(part, error)
                    continue
                ticks = stat.children_ticks + (stat.cpu_ticks if process.pid in children else 0)
                for metric, count in ((FILES, float(moved)), (CHILDREN, ticks / TICKS)):
                    counted[metric, key] = count
                    if (metric, key) in before:
                        rises[metric].append(count - before[metric, key])
            for key, count in sockets.get(job, {}).items():
                counted[SOCKETS, key] = count
                # A connection that is new has moved all of it since.
                rises[SOCKETS].append(count - before.get((SOCKETS, key), 0 if before else count))
            if elapsed:
                for metric in (FILES, SOCKETS, CHILDREN):
                    if rises[metric]:
                        yield metric(max(sum(rises[metric]), 0.0) / elapsed, job)
        self._at, self._before = now, counted

    def _sockets(self, jobs: Mapping[str, list[TrainingProcess]]) -> dict[str, dict[object, float]]:
        """Return the bytes that each job's connections, or network namespaces, have moved so far."""
        found: defaultdict[str, dict[object, float]] = defaultdict(dict)
        owners: dict[int, str] = {}
        left = MAX_DESCRIPTORS
        for job, members in jobs.items():
            for process in members:
                with contextlib.suppress(OSError, ValueError):  # it has ended, or access is denied
                    if process.network:
                        if process.network not in found[job]:
                            place = self.host.proc(f"{process.pid}/net/dev")
                            found[job][process.network] = parse_interfaces(read_bytes(place))
                        continue
                    for link in open_files(self.host, process.pid):
                        left -= 1
                        if left < 0:
                            break
                        if (inode := parse_inode(link)) is not None:
                            owners[inode] = job
        if owners:
            with contextlib.suppress(OSError, sock_diag.Interrupted, sock_diag.MalformedReply):
                for inode, moved in sock_diag.moved(TcpState.ESTABLISHED.mask, BUDGET).items():
                    if inode in owners:
                        found[owners[inode]][inode] = moved
        return found


def _children(members: list[TrainingProcess]) -> set[int]:
    """Return the pids of those processes whose parent is of the same rank."""
    ranks = {process.pid: process.launch.rank for process in members}
    return {
        process.pid
        for process in members
        if ranks.get(process.parent) == process.launch.rank and process.parent != process.pid
    }
