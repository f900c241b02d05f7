"""What the processes of training jobs write to files, from `/proc/<pid>/io`.

A job that writes is at work, whatever its ranks do not report: it saves a checkpoint.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from dshealthd.core.collector import Collector, CollectorOptions, Worker, gauge
from dshealthd.core.host import read_bytes
from dshealthd.core.result import fault_of, one_of_many
from dshealthd.jobs import shares
from dshealthd.jobs.processes import ProcessTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from dshealthd.core.collector import Context, Fault, Sample
    from dshealthd.jobs.processes import TrainingProcess

WRITES = gauge(
    "dshealthd_job_write_bytes_per_second",
    "Rate at which the job's processes on this node wrote to files since the sample before; absent "
    "until there is one. write_bytes of /proc/<pid>/io, which counts the pages that a process makes "
    "dirty.",
    "training_job",
)

MAX_JOBS = 16


def parse_io(data: bytes) -> int:
    """Return the bytes written, from a `/proc/<pid>/io`; ValueError if it does not tell them."""
    for line in data.split(b"\n"):
        name, _, value = line.partition(b":")
        if name == b"write_bytes":
            return int(value)
    message = "no write_bytes"
    raise ValueError(message)


class JobWrites(Collector):
    """Reads `/proc` for the processes of jobs, in the worker that holds the process table.

    The kernel makes a reader wait while the process executes another program.
    """

    worker = Worker.STORAGE

    def __init__(self, options: CollectorOptions, context: Context) -> None:
        super().__init__(options, context)
        self._before: dict[tuple[int, int], tuple[float, int]] = {}
        """Time and bytes at the sample before, by pid and start."""

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield each job's rate; a process that cannot be read is a fault, never 0."""
        jobs, _ = shares.jobs(self.context.shared(ProcessTable).refresh(), MAX_JOBS)
        before, self._before = self._before, {}
        for job, members in jobs.items():
            yield from one_of_many(f"job {job}", functools.partial(self._job, job, members, before))

    def _job(
        self,
        job: str,
        members: Iterable[TrainingProcess],
        before: Mapping[tuple[int, int], tuple[float, int]],
    ) -> Iterator[Sample | Fault]:
        rates = []
        for process in members:
            part = f"process {process.pid}"
            if (fault := self.context.entering(part)) is not None:
                yield fault
                continue
            try:
                written = parse_io(read_bytes(self.host.proc(f"{process.pid}/io"), 4096))
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended
            except (OSError, ValueError, ArithmeticError) as error:
                yield fault_of(part, error)
                continue
            now, key = self.context.monotonic(), (process.pid, process.start)
            self._before[key] = now, written
            at, count = before.get(key, (now, written))
            if now > at:
                rates.append((written - count) / (now - at))
        if rates:
            yield WRITES(sum(rates), job)
