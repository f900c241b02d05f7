"""The newest checkpoint of each training job: is it complete, and is there room for the next one?

A training that reports heartbeats says where it has saved. The agent looks there with the rights of
the rank's user, once after each save and never during one. What DeepSpeed's `latest` names is
judged by names, sizes and the last bytes of files; nothing is unpickled.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dshealthd.core.collector import (
    Collector,
    CollectorOptions,
    Fault,
    Reason,
    Sample,
    Worker,
    gauge,
)
from dshealthd.core.options import Duration, option
from dshealthd.core.result import os_reason
from dshealthd.jobs import shares
from dshealthd.jobs.checkpoint_watch import CheckpointWatch
from dshealthd.jobs.heartbeats.adoption import find_page
from dshealthd.jobs.processes import ProcessTable
from dshealthd.linux.process_files import Root
from dshealthd.training.message import PAGE, Phase, newest
from dshealthd.training.saved import decode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.core.collector import Context
    from dshealthd.jobs.processes import TrainingProcess
    from dshealthd.training.saved import Saved

FREE = gauge(
    "dshealthd_job_checkpoint_free_bytes",
    "Space that users other than root can still fill where the job saves its checkpoints, as of the "
    "last look while it did not save; a quota may leave less.",
    "job",
)
SIZE = gauge(
    "dshealthd_job_checkpoint_size_bytes",
    "Size of the files of the checkpoint that DeepSpeed's latest names; without directories in it, "
    "such as tensors of NVMe offload.",
    "job",
)
NEXT = gauge(
    "dshealthd_job_checkpoint_next_bytes",
    "Space that the job's next checkpoint takes: the largest of its last three. Absent where it "
    "makes room for it by itself: each save overwrites the last one, or it has saved before with "
    "less room than that.",
    "job",
)
SAVED = gauge(
    "dshealthd_job_checkpoint_timestamp_seconds",
    "Unix time at which the checkpoint that DeepSpeed's latest names was completed.",
    "job",
)
PROBLEMS = gauge(
    "dshealthd_job_checkpoint_problems",
    "Files of the checkpoint that DeepSpeed's latest names with this problem: missing (of a rank, "
    "by the names of the others and by how many the training was to write), empty, cut_off (it ends "
    "before its table of contents); no_directory: 1 if what latest names is not there. As of the "
    "look after the save. Missing is absent where each node saves on a disk of its own.",
    "job",
    "problem",
)
JOBS_LEFT_OUT = gauge(
    "dshealthd_job_checkpoint_jobs_left_out",
    "Training jobs on this node whose checkpoints are not looked at, as there are more than "
    "max_jobs.",
)

BUDGET = 0.5
"""Seconds for the files of all jobs in one collection, beside which others wait for the worker."""
CANDIDATES = 4
"""Processes of rank 0 that are asked for a heartbeat: data loaders inherit its environment."""


@dataclass(frozen=True, kw_only=True)
class JobCheckpointOptions(CollectorOptions):
    """Options of the jobs' checkpoints."""

    interval: Duration = option("30s", "Time from one look to the next.", minimum="100ms")
    deadline: Duration = option(
        "5s", "How long one look at a job's checkpoints may take.", minimum="10ms"
    )
    max_jobs: int = option(
        8,
        "Training jobs whose checkpoints are looked at: users take turns, the oldest first.",
        minimum=0,
        maximum=100,
    )


class _Followed:
    """The rank 0 of a job, its page, and what is known of its checkpoints."""

    def __init__(self, page: int) -> None:
        """Take over the descriptor of a page."""
        self.page = page
        self.watch = CheckpointWatch()


class JobCheckpoint(Collector):
    """Reads files that users name and that may lie on a network file system."""

    worker = Worker.STORAGE

    Options = JobCheckpointOptions

    def __init__(self, options: JobCheckpointOptions, context: Context) -> None:
        """Look at nothing yet."""
        super().__init__(options, context)
        self._followed: dict[tuple[int, int], _Followed] = {}

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield what is known of each job's checkpoints; a job that says nothing has none."""
        until = self.context.monotonic() + BUDGET
        processes = self.context.shared(ProcessTable).refresh()
        jobs, left_out = shares.jobs(
            (process for process in processes if process.launch.rank == 0), self.options.max_jobs
        )
        gone = dict(self._followed)
        for job, members in jobs.items():
            part = f"checkpoints of {job}"
            if (fault := self.context.entering(part)) is not None:
                for process in members:
                    gone.pop((process.pid, process.start), None)
                yield fault
                continue
            found = self._follow(members)
            if found is None:
                continue
            process, followed = found
            gone.pop((process.pid, process.start), None)
            fault = self._look(part, process, followed, until)
            if fault is not None:
                yield fault
            yield from _show(job, followed.watch)
        for key, followed in gone.items():
            del self._followed[key]
            os.close(followed.page)
        yield JOBS_LEFT_OUT(left_out)

    def close(self) -> None:
        """Let go of the pages by which the trainings tell of their checkpoints."""
        for followed in self._followed.values():
            os.close(followed.page)
        self._followed.clear()

    def _follow(self, members: list[TrainingProcess]) -> tuple[TrainingProcess, _Followed] | None:
        """Return the process that reports a job's checkpoints: the rank 0 that started last.

        An older one is left over from an earlier run; its children started later, and have no page
        of their own.
        """
        own = _own(members)
        for process in own[-CANDIDATES:][::-1]:
            key = process.pid, process.start
            if key in self._followed:
                return process, self._followed[key]
            try:
                page = find_page(self.host, process.pid)
            except OSError:  # it has ended, or may not be looked at, which open_files tells
                continue
            if page is not None:
                self._followed[key] = _Followed(page)
                return process, self._followed[key]
        return None

    def _look(
        self, part: str, process: TrainingProcess, followed: _Followed, until: float
    ) -> Fault | None:
        """Look at a job's newest checkpoint unless it saves now, and return why that failed."""
        clock = self.context.monotonic
        try:
            saved = _last_save(followed.page)
            if saved is None:
                return None
            with Root.of_process(self.host, process.pid) as root:
                followed.watch.look(root, saved, clock(), lambda: clock() < until)
        except (FileNotFoundError, NotADirectoryError, ProcessLookupError):
            followed.watch = CheckpointWatch()  # it has ended, or its directory was removed
        except OSError as error:
            followed.watch = CheckpointWatch()
            return Fault(part, os_reason(error), str(error))
        except ValueError as error:
            followed.watch = CheckpointWatch()
            return Fault(part, Reason.MALFORMED, str(error))
        return None


def _own(members: list[TrainingProcess]) -> list[TrainingProcess]:
    """Return the processes of a job that a launcher started, without their children."""
    pids = {process.pid for process in members}
    return [process for process in members if process.parent not in pids]


def _last_save(page: int) -> Saved | None:
    """Return where a training saved its last checkpoint; None while it saves, or never did.

    None as well for a page that is being written just now: it is read again at the next look. One
    that never holds anything whole is counted by the receiver of heartbeats.
    """
    data = os.pread(page, PAGE, 0)
    try:
        return None if newest(data).phase == Phase.CHECKPOINT else decode(data)
    except ValueError:
        return None


def _show(job: str, watch: CheckpointWatch) -> Iterator[Sample]:
    for metric, value in (
        (FREE, watch.free),
        (SIZE, watch.size),
        (NEXT, watch.next_size),
        (SAVED, watch.saved_at),
    ):
        if value is not None:
            yield metric(value, job)
    for problem, count in (watch.problems or {}).items():
        yield PROBLEMS(count, job, problem)
