"""The service that takes evidence of hangs, one at a time, in a separate process.

It neither blocks nor slows the agent's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dshealthd.collection.worker_process import Channel
from dshealthd.core import background, child, documents, state_file, state_writer
from dshealthd.core.collector import Sample, counter, gauge
from dshealthd.core.options import encode
from dshealthd.core.timing import time_limit
from dshealthd.evidence.bundle import Kept, bundles_among
from dshealthd.evidence.findings import HangCase, LogSources
from dshealthd.evidence.options import EvidenceOptions
from dshealthd.linux import forked

if TYPE_CHECKING:
    from pathlib import Path

    from dshealthd.config.config import Config
    from dshealthd.core.host import Host
    from dshealthd.jobs.hangs.judge import Standstill

log = logging.getLogger(__name__)

BUNDLES = counter(
    "dshealthd_evidence_bundles_total",
    "Bundles of evidence by outcome: complete, partial (a rank could not be inspected, or the "
    "bundle was full), killed (at its deadline; partial evidence is kept), refused (the disk is "
    "nearly full, or processes of the user's earlier evidence hang), failed.",
    "outcome",
)
INFO = gauge(
    "dshealthd_evidence_bundle_info",
    "1 for the newest kept bundle of a job; bundle is a directory below evidence in path.state.",
    "training_job",
    "bundle",
)
OUTCOMES = ("complete", "partial", "killed", "refused", "failed")

MOST_LEFT = 8
"""Processes of one user that may hang and not be killed, as in a worker. A collection starts more
than a hundred, and the service may have 512.
"""
COMMAND = child.python("dshealthd.evidence")
DIRECTORY = "evidence"
INTERVAL = 10.0
"""Seconds from the first exposition to the second."""
GRACE = 1.0
"""Seconds for the collecting process to exit after its channel is closed."""


class Taken(NamedTuple):
    """The result of a collection of evidence."""

    outcome: str
    detail: str
    bundle: str
    """Name of its directory; empty if there is none."""


def case(hang: Standstill) -> HangCase:
    """Return the evidence case of a hang."""
    return HangCase(
        job=hang.job,
        reason=str(hang.reason),
        since=hang.since,
        culprits=tuple((rank, culprit.words) for rank, culprit in hang.culprits),
        explanation=hang.explanation,
        ranks=tuple((rank.rank, rank.pid) for rank in hang.ranks if rank.ended is None),
        always_ask=any(rank.rank == 0 for rank in hang.ranks),  # also one that has ended
    )


def log_sources(config: Config) -> LogSources:
    """Return the logs that evidence of a hang includes: those that the collectors read."""
    return LogSources(
        getattr(config.collectors.get("job_logs"), "paths", ()),
        getattr(config.collectors.get("kernel_log"), "journal", False),
    )


class Evidence:
    """The service: the bundles of this node, and the one that is being taken."""

    name = "evidence"

    def __init__(
        self,
        options: EvidenceOptions,
        state: Path,
        host: Host,
        *,
        metrics: Callable[[], str],
        document: Callable[[], Mapping[str, Any]],
        monotonic: Callable[[], float],
        wall: Callable[[], float],
        interval: float = INTERVAL,
        command: Sequence[str] = COMMAND,
    ) -> None:
        """Keep bundles below `state`.

        `metrics` returns an exposition and `document` a status document, of which `jobs` and
        `probe` are used; both are empty if unknown.
        `interval` is the time in seconds from the first exposition to the second. `command` is the
        collecting program, which gets the number of its descriptor as its last argument.
        """
        self.options = options
        self.logs = LogSources()
        self.directory = state / DIRECTORY
        self._host = host
        self._metrics = metrics
        self._document = document
        self._monotonic = monotonic
        self._wall = wall
        self._interval = interval
        self._command = command
        self._outcomes: Counter[str] = Counter()
        self._kept: list[Kept] | None = None
        """The bundles on the disk, oldest first; None while they are unknown."""
        self._first_seen: dict[str, float] = {}
        """When each hung job was first seen hung, by the monotonic clock."""
        self._done: set[str] = set()
        """Jobs whose present hang has been handled."""
        self._waiting: dict[str, HangCase] = {}
        self._left: dict[int, list[int]] = {}
        """Groups of processes that collections could not kill, by the user of the ranks."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._running = False

    async def apply(self, config: Config) -> None:
        """Apply a configuration from now on."""
        self.options, self._host = config.section(EvidenceOptions), config.path.host
        self.logs = log_sources(config)
        if self._kept is None:
            await self.remember()

    async def remember(self) -> None:
        """List the bundles of evidence on the disk."""
        look = functools.partial(state_file.names_in_child, str(self.directory))
        try:
            names = await background.call(look, "kept evidence", state_writer.DEADLINE, OSError)
        except FileNotFoundError:
            names = []
        except OSError as error:
            self._kept = None
            log.warning("evidence: %s", str(error) or "the disk of path.state is hung")
            return
        self._kept = bundles_among(names)

    def update_hangs(self, hangs: Iterable[Standstill]) -> None:
        """Note the hangs that are confirmed now, and start collecting evidence of those that are
        due; hangs that are not given are over.

        Evidence does not wait until the probes have found a cause, as the page does: the job may
        end meanwhile.
        """
        present = {hang.job: hang for hang in hangs}
        now = self._monotonic()
        self._first_seen = {job: self._first_seen.get(job, now) for job in present}
        # A job that went on and hangs again has a new hang, without evidence yet.
        self._done &= present.keys()
        self._waiting = {job: case for job, case in self._waiting.items() if job in present}
        if not self.options.enabled:
            return
        for job, hang in present.items():
            ripe = now - self._first_seen[job] >= self.options.after and self._due(job)
            if ripe and job not in self._done:
                self._done.add(job)
                self._waiting[job] = case(hang)
        if self._waiting and not self._running:
            self._running = True
            task = asyncio.create_task(self._collect_waiting(), name="evidence")
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def samples(self) -> Iterator[Sample]:
        """Yield the metrics of the evidence."""
        for outcome in OUTCOMES:
            yield BUNDLES(self._outcomes[outcome], outcome)
        newest = {entry.job: entry.name for entry in self._kept or ()}
        for job, name in newest.items():
            yield INFO(1.0, job, name)

    def status(self) -> dict[str, Any]:
        """Return the evidence part of the status document; the newest bundle first."""
        kept = self._kept
        bundles = None if kept is None else [entry.name for entry in reversed(kept)]
        return {
            "state": "running" if self._running else "ok",
            "directory": str(self.directory),
            "bundles": bundles,
        }

    async def collect(self, case: HangCase) -> Taken:
        """Take evidence of a hang now, as one bundle.

        Every failure is an outcome. Cancellation kills the collecting process.
        """
        taken = await self._collect(case)
        await self.remember()
        self._outcomes[taken.outcome if taken.outcome in OUTCOMES else "failed"] += 1
        place = f": {self.directory / taken.bundle}" if taken.bundle else ""
        log.log(
            logging.WARNING if taken.outcome in {"complete", "partial"} else logging.ERROR,
            "evidence %s%s%s",
            taken.outcome,
            place,
            f" ({taken.detail})" if taken.detail else "",
        )
        return taken

    async def _collect(self, case: HangCase) -> Taken:
        try:
            process, channel = await _start(self._command)
        except OSError as error:
            return Taken("failed", f"cannot start the process: {error}", "")
        bundle = ""

        async def collected() -> dict[str, Any]:
            nonlocal bundle
            channel.send(self._request(case))
            answer = await _received(channel)
            if "bundle" in answer:
                bundle = answer["bundle"]
                await asyncio.sleep(self._interval)
                channel.send({"metrics": self._metrics(), "interval": self._interval})
                answer = await _received(channel)
            return answer

        try:
            async with time_limit(self.options.deadline):
                answer = await collected()
            if answer.get("left") and answer["user"] is not None:
                self._left.setdefault(answer["user"], []).extend(answer["left"])
            return Taken(str(answer["outcome"]), str(answer["detail"]), bundle)
        except TimeoutError:
            detail = f"not finished within {self.options.deadline}; partial evidence is kept"
            return Taken("killed", detail, bundle)
        except (EOFError, *documents.MISSHAPEN) as error:
            return Taken("failed", f"the collecting process failed: {error!r}", bundle)
        finally:
            channel.close()
            # Its children end with it. A process that cannot be killed is left behind.
            if not (await process.ends(GRACE) or await process.killed()):
                log.error("evidence: process %d cannot be killed", process.pid)

    async def close(self) -> None:
        """Abort the running collections."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def _due(self, job: str) -> bool:
        """Return whether the last evidence of a job is old enough.

        Evidence from the future, after the clock was set back, counts as old enough.
        """
        taken = (entry.taken for entry in self._kept or () if entry.job == job)
        last = max(taken, default=None)
        return last is None or not 0 <= self._wall() - last < self.options.again_after

    async def _collect_waiting(self) -> None:
        try:
            while self._waiting:
                job = next(iter(self._waiting))
                await self.collect(self._waiting.pop(job))
        finally:
            self._running = False

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("evidence: ended by a defect", exc_info=error)

    def _hanging(self) -> list[int]:
        """Return the users for whom too many processes hang that could not be killed."""
        self._left = {
            user: hanging
            for user, groups in self._left.items()
            if (hanging := [*filter(forked.remains, groups)])
        }
        return [user for user, groups in self._left.items() if len(groups) > MOST_LEFT]

    def _request(self, case: HangCase) -> dict[str, Any]:
        options = self.options
        document = self._document()
        return {
            "case": case,
            "host": encode(self._host),
            "directory": str(self.directory),
            "begun": self._wall(),
            "limits": {
                "max_bundles": options.max_bundles,
                "max_bytes": options.max_bytes,
                "bundle_bytes": options.max_bundle_bytes,
                "min_free": options.min_free_bytes,
            },
            "node": socket.gethostname(),
            "metrics": self._metrics(),
            "jobs": document.get("jobs", []),
            "probes": document.get("probe"),
            "logs": self.logs,
            "hanging": self._hanging(),
        }


async def _start(command: Sequence[str]) -> tuple[child.Child, Channel]:
    """Start the collecting process, in a session of its own, so that no terminal signal reaches it.

    StartError.
    """
    what = "the evidence process"
    with child.channel(what) as (ours, theirs):
        started = child.spawn(what, [*command, str(theirs.fileno())], descriptors=[theirs.fileno()])
        return started, await Channel.opened(ours)


async def _received(channel: Channel) -> dict[str, Any]:
    """Return the collecting process's next frame.

    ValueError if it is malformed, EOFError if the process has ended.
    """
    while (message := channel.receive()) is None:
        await channel.changed()
    return message
