"""The newest checkpoint of each training job: is it complete, and is there room for the next one?

A training job that sends heartbeats reports where it saves. The agent looks there with the rights
of the rank's user, once after each save and never during one. It checks the names, sizes and last
bytes of the files in the checkpoint that DeepSpeed's `latest` names, and unpickles nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from dshealthd.core.collector import (
    Collector,
    CollectorOptions,
    Context,
    Fault,
    Sample,
    Worker,
    every,
    gauge,
)
from dshealthd.core.result import fault_of, one_of_many
from dshealthd.jobs import shares
from dshealthd.jobs.checkpoint_watch import CheckpointWatch
from dshealthd.jobs.heartbeats.page import find_page
from dshealthd.jobs.processes import Key, ProcessTable, TrainingProcess
from dshealthd.linux.process_root import Root
from dshealthd.training.message import PAGE, Phase, newest_message
from dshealthd.training.saved import Saved, decode

FREE = gauge(
    "dshealthd_job_checkpoint_free_bytes",
    "Space available to users other than root where the job saves its checkpoints, at the last "
    "check between saves; a quota may leave less.",
    "training_job",
)
NEXT = gauge(
    "dshealthd_job_checkpoint_next_bytes",
    "Expected size of the job's next checkpoint: the largest of its last three. Absent if the "
    "next save needs no extra space: each save overwrites the last one, or an earlier save "
    "fitted into less.",
    "training_job",
)
PROBLEMS = gauge(
    "dshealthd_job_checkpoint_problems",
    "Files with this problem in the newest DeepSpeed checkpoint: missing (a rank's file), "
    "empty, or cut_off (truncated); no_directory is 1 if the checkpoint's directory does not "
    "exist. Checked once after each save. missing is absent if each node saves to its own disk.",
    *("training_job", "problem"),
)

BUDGET = 0.5
"""Seconds per collection for the files of all jobs, as other collectors wait for the worker."""
CANDIDATES = 4
"""Processes of rank 0 to search for a heartbeat page: data loaders inherit its environment."""


class JobCheckpoint(Collector):
    """Reads files that users name and that may be on a network file system."""

    worker = Worker.STORAGE

    Options = every("30s", within="5s")  # as long as a path of `filesystem` may take

    def __init__(self, options: CollectorOptions, context: Context) -> None:
        super().__init__(options, context)
        self._watches: dict[Key, CheckpointWatch] = {}
        self._turn = 0

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield what is known of each job's checkpoints; nothing for a job that reports none."""
        until = self.context.monotonic() + BUDGET
        processes = self.context.shared(ProcessTable).refresh()
        first = [process for process in processes if process.launch.rank == 0]
        keys = {process.key for process in first}
        self._watches = {key: watch for key, watch in self._watches.items() if key in keys}
        jobs = list(shares.jobs_with_places(first).items())
        # Another one first each time: its files may take all of it.
        self._turn = (self._turn + 1) % max(len(jobs), 1)
        for job, members in jobs[self._turn :] + jobs[: self._turn]:
            part = f"checkpoints of {job}"
            if (fault := self.context.entering(part)) is not None:
                yield fault
                continue
            yield from one_of_many(part, functools.partial(self._job, job, members, until))

    def _job(
        self, job: str, members: list[TrainingProcess], until: float
    ) -> Iterator[Sample | Fault]:
        if (found := self._reporter(members)) is None:
            return
        process, page = found
        clock, key = self.context.monotonic, process.key
        watch = self._watches.setdefault(key, CheckpointWatch())
        try:
            if (saved := _last_save(page)) is not None:
                with Root.of_process(self.host, process.pid) as root:
                    watch.check(root, saved, clock(), lambda: clock() < until)
        except (FileNotFoundError, NotADirectoryError, ProcessLookupError):
            del self._watches[key]  # it has ended, or its directory was removed
        except (OSError, ValueError, ArithmeticError) as error:
            del self._watches[key]
            yield fault_of(f"checkpoints of {job}", error)
        else:
            yield from _show(job, watch)

    def _reporter(self, members: list[TrainingProcess]) -> tuple[TrainingProcess, bytes] | None:
        """Return the process that reports a job's checkpoints, with its page: the rank 0 that
        started last.

        An older one is left over from an earlier run. Its children started later, but have no page
        of their own.
        """
        for process in _own(members)[-CANDIDATES:][::-1]:
            try:
                page = find_page(self.host, process.pid)
            except OSError:  # it has ended, or access is denied, which open_files reports
                continue
            if page is not None:
                with open(page[0], "rb") as file:
                    return process, file.read(PAGE)
        return None


def _own(members: list[TrainingProcess]) -> list[TrainingProcess]:
    """Return the processes of a job that its launcher started, without their children."""
    pids = {process.pid for process in members}
    return [process for process in members if process.parent not in pids]


def _last_save(page: bytes) -> Saved | None:
    """Return where a training job saved its last checkpoint; None during a save or if it never did.

    Also None for a page that was read while it was written: the next look reads it again. The
    reader of heartbeats counts pages that never hold a complete message.
    """
    try:
        return None if newest_message(page).phase == Phase.CHECKPOINT else decode(page)
    except (ValueError, ArithmeticError):
        return None


def _show(job: str, watch: CheckpointWatch) -> Iterator[Sample]:
    for metric, value in ((FREE, watch.free), (NEXT, watch.next_size)):
        if value is not None:
            yield metric(value, job)
    for problem, count in (watch.problems or {}).items():
        yield PROBLEMS(count, job, problem)
