"""Why a job failed, according to its own logs: `dshealthd explain`, continuously.

The files are read as the job sees them and with the rights of its user, a bounded amount at a
time. Users control what their logs say, so findings raise tickets and never page.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dshealthd.core.collector import Collector, Context, Fault, Sample, Worker, counter, gauge
from dshealthd.jobs.logs.files import JobLogsOptions, LogFileState
from dshealthd.jobs.processes import ProcessTable
from dshealthd.linux.process import uptime

if TYPE_CHECKING:
    from dshealthd.core.host import Host
    from dshealthd.explain.finding import Finding

FAILURE = gauge(
    "dshealthd_job_failure_info",
    "1 for the cause of the job's failure, from its logs on this node: runbook (slug), culprit "
    "ranks (at most eight; empty if unknown), their node (empty if the logs do not name it), "
    "and a description (cause).",
    *("training_job", "slug", "rank", "node", "cause"),
)
FILES = gauge(
    "dshealthd_job_log_files",
    "Log files of jobs by state: followed; or not followed: ambiguous (two jobs of one user "
    "could have written it), foreign (another user's, older than the job, or not a regular "
    "file), unreadable, left_out (more than 64).",
    "state",
)
SKIPPED = counter(
    "dshealthd_job_log_skipped_bytes_total",
    "Bytes of job logs skipped because they grew faster than the read limit; failures logged "
    "there are missed.",
)

PROCESSES_EVERY = 5.0
"""Seconds between looks at the processes."""
MAX_RANKS = 8
"""Most culprit ranks that are named for one job; if there are more, none is."""
LARGEST_RANK = 10**6 - 1
"""The largest rank that is named: the largest jobs have 10^5 ranks. A log may hold any number."""
_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


class JobLogs(Collector):
    """Follows logs in a worker of its own, so that a hung file system blocks nothing else."""

    worker = Worker.LOGS
    Options = JobLogsOptions

    def __init__(self, options: JobLogsOptions, context: Context) -> None:
        super().__init__(options, context)
        from dshealthd.jobs.logs.watch import LogWatch  # must stay out of the agent

        self._watch = LogWatch(
            options,
            context.host,
            context.entering,
            monotonic=context.monotonic,
            wall=context.wall,
        )
        self._processes_at = -math.inf

    @classmethod
    # as every collector
    def absent(cls, options: JobLogsOptions, host: Host) -> str | None:  # noqa: ARG003
        """Return why the collector is absent if no job logs are configured."""
        if options.paths or options.standard_streams:
            return None
        return "neither collectors.job_logs.paths nor standard_streams is set"

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield why jobs on this node failed, according to their logs."""
        now = self.context.monotonic()
        if now >= self._processes_at:
            self._processes_at = now + PROCESSES_EVERY
            boot = self.context.wall() - uptime(self.host)
            self._watch.update(self.context.shared(ProcessTable).refresh(), boot)
        yield from self._watch.read_new()
        for job, finding, here in self._watch.findings():
            node = _node(finding, here)
            named = [rank for rank in finding.ranks if rank <= LARGEST_RANK]
            ranks = named if len(finding.ranks) <= MAX_RANKS else ()
            for rank in ranks or ("",):
                cause = finding.title or _title(finding.slug)
                yield FAILURE(1, job, finding.slug, str(rank), node, cause)
        states = self._watch.states
        for state in LogFileState:
            yield FILES(states[state], state)
        yield SKIPPED(self._watch.skipped)


@functools.cache
def _title(slug: str) -> str:
    from dshealthd.explain.patterns import heading  # must stay out of the agent

    return heading(slug)[0]


def _node(finding: Finding, here: frozenset[int]) -> str:
    """Return the node of the culprit ranks: this one if they all run here, else the log's."""
    if finding.ranks and here.issuperset(finding.ranks):
        return os.uname().nodename
    return finding.host if finding.host and _HOST.fullmatch(finding.host) else ""
