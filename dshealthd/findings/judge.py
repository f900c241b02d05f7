"""The judge: turns each new sample into findings, and is the only one that does.

The node's page, `dshealthd status`, Slurm, Kubernetes, NVRx, evidence and the alerts show its
findings.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dshealthd.config import registry
from dshealthd.core import documents, schema, state_writer
from dshealthd.core.collector import Reason, Sample, counter, gauge
from dshealthd.core.result import CollectionOutcome
from dshealthd.core.state_writer import StateFile
from dshealthd.findings import coverage, fabric, idleness, stalls
from dshealthd.findings.agent import CRASHED
from dshealthd.findings.attempts import Attempts
from dshealthd.findings.catalogue import catalogue, starting_finding, unread
from dshealthd.findings.entry import Entry
from dshealthd.findings.episodes import Episode, Episodes
from dshealthd.findings.finding import Finding, State, Verdict
from dshealthd.findings.gpu_history import GpuHistory
from dshealthd.findings.idleness import Idleness
from dshealthd.findings.judgement import judgement_of, pending, series_of, unready
from dshealthd.findings.limits import Limits
from dshealthd.findings.options import FindingsOptions
from dshealthd.findings.past import Past
from dshealthd.findings.record import NodeRecord, current_boot
from dshealthd.findings.trends import Trends

if TYPE_CHECKING:
    from pathlib import Path

    from dshealthd.config.config import Config
    from dshealthd.core.snapshot import Snapshot
    from dshealthd.jobs.hangs.judge import Standstill

log = logging.getLogger(__name__)

FINDING = gauge(
    "dshealthd_finding",
    "1 while the node has this finding, after its hold. `training_job` is the job that used the "
    "part, or empty. A critical finding with a job is a page, without a job a ticket.",
    *("finding", "symptom", "component", "part", "reason", "severity", "training_job"),
)
VALUE = gauge(
    "dshealthd_finding_value",
    "Measured value of a finding, in the unit of its text; absent for findings without a value.",
    *FINDING.dimensions,
)
BEGUN = counter(
    "dshealthd_findings_total",
    "Findings that have begun since the agent started.",
    "finding",
)
JUDGED = gauge(
    "dshealthd_findings_judged_timestamp_seconds",
    "Unix time at which the node's findings were last computed.",
)
LEFT_OUT = gauge(
    "dshealthd_findings_left_out",
    "Findings that are not exported because there are too many; the worst ones are exported.",
)

DELAY = 0.3
"""Seconds from a result that changed to the judgement: collectors that are due together end
within them, and are judged at once.
"""
AT_LEAST_EVERY = 10.0
"""Seconds after which the node is judged without new samples: Xids age."""
SAVE_EVERY = 300.0
"""Seconds between two writes of the past, each by a process of its own; a finding or a training's
attempt that begins or ends is written at once. A crash loses as much of windows that are hours to
days long, and of where an attempt's time went.
"""
MAX_EXPORTED = 100
"""Most findings exported; a node has as many only if something is wrong with the judge."""
MAX_FILE = 8 << 20
"""Most bytes of the state file; it has some 100 KiB."""
VERSION = 1


class Judge:
    """The service that judges this node."""

    name = "findings"

    def __init__(
        self,
        snapshot: Snapshot,
        own: Callable[[], Iterable[Sample]],
        names: Callable[[], tuple[str, str]],
        state: Path | None,
        monotonic: Callable[[], float],
        wall: Callable[[], float],
        standstills: Callable[[], Mapping[str, Standstill]] = dict,
    ) -> None:
        """Prepare; `load` restores the past, `apply` starts it, after all that it judges.

        `own` returns the agent's own samples, without these; `names` the host's name and the
        probes' name for this node. `state` is the directory of the file that outlives the agent.
        `standstills` returns the jobs that stand still here.
        """
        catalogue()  # reads files, which the loop must not
        self._snapshot, self._own, self._names = snapshot, own, names
        self._standstills = standstills
        self._monotonic, self._wall = monotonic, wall
        self._limits = Limits()
        self._episodes, self._past, self._gpus = Episodes(), Past(), GpuHistory()
        self._idleness = Idleness()
        self._record = NodeRecord(state)
        self.attempts = Attempts(self._record)
        self._trends = Trends()
        self._judged: float | None = None
        """Monotonic time of the last judgement."""
        self._saved = -math.inf
        self._problem = ""
        self._file = StateFile(state, self.name, MAX_FILE)
        self._loaded = self._running = self._failed = False
        self._whole = False
        """Whether the last judgement had a result of each source."""
        self._stopped = False
        """Whether a signal has stopped the agent, which is no crash."""
        self._crashed = False
        """Whether the agent before this one has crashed, until that has been judged."""
        self._broken: frozenset[str] = frozenset()
        """Names of the rules that failed in the last judgement."""
        self.derived: tuple[Sample, ...] = ()
        """What the last judgement derived, for rules that compare nodes and the overview of
        jobs."""
        self._timer: asyncio.TimerHandle | None = None

    async def apply(self, config: Config) -> None:
        """Judge with the configuration's limits from now on."""
        self._limits = config.section(FindingsOptions).limits
        if not self._running:
            await self.load()
            self._running = True
            self._snapshot.on_change = functools.partial(self._judge_within, DELAY)
        self._judge_within(DELAY)

    @property
    def verdict(self) -> Verdict:
        """The findings of the last judgement, until then those of an earlier agent; unknown beside
        them until each source has been judged, and where a defect has ended the judgement.
        """
        found = [
            dataclasses.replace(finding, trend=self._trends.of(finding))
            for finding in self._episodes.verdict().findings
        ]
        if (why := self.unready) and all(finding.alert for finding in found):
            node, _ = self._names()
            found.append(starting_finding(why, pending(self._snapshot), node))
        if self._failed:
            node, _ = self._names()
            why = "the last judgement failed by a defect; the log has it"
            found.append(unread(self.name, "", Reason.INTERNAL, why, node))
        watched = self._episodes.watched(self._monotonic(), self._wall())
        return dataclasses.replace(Verdict.of(found), watched=watched)

    @property
    def unready(self) -> str:
        """Why the absence of findings does not mean health yet; empty once each source that can be
        asked was judged. Whatever concludes anything from this node's findings goes by it.
        """
        return unready(self._snapshot) or ("" if self._whole else "not judged yet")

    def judge(self) -> None:
        """Judge the samples of this moment."""
        self._failed = True
        whole = not unready(self._snapshot)
        now, wall = self._monotonic(), self._wall()
        series = series_of(
            self._snapshot, self._own(), self._limits, self._past, now, self._standstills()
        )
        attempts = tuple(self.attempts.samples())
        series.add(attempts)
        self._gpus.settle(series, wall)
        self._idleness.settle(series, now)
        coverage.settle(series)
        if self._crashed:
            series.add([CRASHED(1.0, f"{wall:.0f}")])
            self._crashed = False
        node, name = self._names()
        found, failed = judgement_of(
            self._snapshot,
            series,
            node=node,
            name=name,
            monotonic=now,
            wall=wall,
            shown=lambda finding: self._episodes.open_at(finding, now),
        )
        for rule in failed.keys() - self._broken:
            log.error("findings: the rule %s failed:\n%s", rule, failed[rule])
        self._broken = frozenset(failed)
        self._episodes.update(found.values(), now, wall, self._readable)
        for episode in self._episodes.closed:
            self._record.add(_entry(episode, now, wall, over=True))
        self._record.settle(series, now, wall)
        metrics = stalls.EXPORTED + idleness.EXPORTED + coverage.EXPORTED
        self.derived = *series.samples(metrics), *attempts
        self._judged, self._failed, self._whole = now, False, whole
        changed = self._episodes.changed or self.attempts.changed
        if self._running and (changed or now - self._saved >= SAVE_EVERY):
            self._save(now, wall)
        if self._running:
            self._record.save(now, wall)
        self._trends.settle(self._snapshot, now)

    def samples(self) -> Iterator[Sample]:
        """Yield the samples of findings, and when they were judged; at first those of an earlier
        agent.
        """
        now = self._monotonic()
        firing = self._episodes.firing
        if firing or self._judged is not None:
            yield from exported(firing)
        if self._judged is None:
            return
        yield from self.derived
        yield from self._record.samples(self._lasting(now), self._wall())
        for finding, count in self._episodes.begun.items():
            yield BEGUN(float(count), finding)
        yield JUDGED(self._wall() - (now - self._judged))

    def status(self) -> Mapping[str, Any]:
        """Return whether the judge runs and remembers."""
        if not self._running:
            return {"state": "off"}
        if self._failed:
            return {"state": "failing", "detail": "the last judgement failed"}
        if self._broken:
            return {
                "state": "failing",
                "detail": f"rules failed: {', '.join(sorted(self._broken))}",
            }
        problem = self._problem or self._record.problem
        return {"state": "ok", **({"detail": problem} if problem else {})}

    def history(self) -> bytes:
        """Return the node's record with what lasts, as JSON for `/api/v1/history`."""
        node, _ = self._names()
        return self._record.document(node, self._lasting(self._monotonic()), self._wall())

    def hours(self) -> str:
        """Return the worst of each of the last 24 hours, as `NodeRecord.hours` does."""
        return self._record.hours(self._lasting(self._monotonic()), self._wall())

    def trends(self) -> bytes:
        """Return the last hour of the node's figures, as JSON for `/api/v1/trends`."""
        node, _ = self._names()
        wall = self._wall()
        begun = [*self._record.shown(wall), *self._lasting(self._monotonic())]
        return self._trends.document(node, wall, begun)

    def _lasting(self, now: float) -> list[Entry]:
        wall = self._wall()
        found = [_entry(episode, now, wall, over=False) for episode in self._episodes.lasting]
        return found + self.attempts.lasting()

    def record_stop(self) -> None:
        """Record that a signal stops the agent; any other end is a crash."""
        self._stopped = True

    async def close(self) -> None:
        """Stop judging, and write what outlives the agent."""
        if not self._running:
            return
        self._running = False
        self._snapshot.on_change = lambda: None
        if self._timer is not None:
            self._timer.cancel()
        now, wall = self._monotonic(), self._wall()
        self._save(now, wall)
        self._record.save(now, wall, last=True)
        await state_writer.wait_until_written(state_writer.DEADLINE)

    def _judge_within(self, seconds: float) -> None:
        """Judge within so many seconds, unless that is due sooner anyway."""
        loop = asyncio.get_running_loop()
        if self._timer is None or self._timer.when() > loop.time() + seconds:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_later(seconds, self._turn)

    def _turn(self) -> None:
        # The next turn first, so that a defect, which the loop logs, costs only one judgement.
        self._timer = None
        self._judge_within(AT_LEAST_EVERY)
        self.judge()
        self._judge_within(self._episodes.due(self._monotonic()) + DELAY)

    def _readable(self, finding: Finding) -> bool:
        """Return whether a finding was judged and its source read, so that its absence means
        health.
        """
        if finding.rule in self._broken:
            return False
        if finding.severity is not State.UNKNOWN and pending(self._snapshot):
            return False  # at the start; rules read several sources
        collector = registry.collectors_by_metric().get(finding.source)
        latest = None if collector is None else self._snapshot.get(collector)
        if latest is None or finding.severity is State.UNKNOWN:
            return True
        failed = latest.sampled is None or latest.result.outcome is CollectionOutcome.ERROR
        names = {finding.part.lower(), *fabric.names_in_faults(finding.part)}
        return not failed and all(fault.part.lower() not in names for fault in latest.result.faults)

    async def load(self) -> None:
        """Restore what an earlier agent of this node left, once."""
        if self._loaded:
            return
        self._loaded = True
        await asyncio.gather(self._load(), self._record.load())
        self.attempts.resume(self._monotonic())
        self._record.begin(self._wall(), current_boot(), crashed=self._crashed)

    async def _load(self) -> None:
        try:
            if (document := await self._file.load()) is not None:
                with schema.reading("it"):
                    self._restore(document)
        except (OSError, schema.SchemaError) as error:
            self._problem = f"begins without a past: {self._file.place}: {error}"
            log.warning("findings: %s", self._problem)

    def _restore(self, document: Any) -> None:
        if document["version"] != VERSION:
            schema.misfit("version", f"{document['version']!r} is not {VERSION}")
        age = max(0.0, self._wall() - schema.UNIX_TIME.read(document["time"], "time"))
        clock, now = schema.FIGURE.read(document["clock"], "clock"), self._monotonic() - age
        booted = document["runs"]["boot"] != current_boot()[0]
        past = Past()
        past.restore(document["past"], clock, now, booted=booted)
        gpus = schema.of(GpuHistory).read(document["gpus"], "gpus")
        jobs = schema.of(Idleness).read(document["idleness"], "idleness")
        self.attempts.restore(document["runs"])
        # The last, as it adds to what was judged meanwhile: all of the file counts, or nothing.
        known = catalogue().__contains__
        self._episodes.restore(document["findings"], clock, now, known, booted=booted)
        self._past, self._gpus, self._idleness = past, gpus, jobs
        self._crashed = not document["stopped"] and not booted

    def _save(self, now: float, wall: float) -> None:
        self._saved = now
        document = {
            "version": VERSION,
            "time": wall,
            "clock": now,
            "stopped": self._stopped,
            "findings": self._episodes.document(),
            "past": self._past.document(now),
            "gpus": schema.of(GpuHistory).write(self._gpus, "gpus"),
            "idleness": schema.of(Idleness).write(self._idleness, "idleness"),
            "runs": self.attempts.document(),
        }
        self._file.save(documents.dumps(document, separators=documents.COMPACT))


def _entry(episode: Episode, now: float, wall: float, *, over: bool) -> Entry:
    """Return a finding as the node's record has it; its end is dated by the clock of now."""
    end = wall - (now - episode.seen) if over else None
    return Entry.of(episode.at(episode.seen), end, episode.worst)


def exported(findings: Sequence[Finding]) -> Iterator[Sample]:
    """Yield the samples of findings, worst first."""
    for finding in findings[:MAX_EXPORTED]:
        labels = (
            finding.name,
            finding.slug,
            finding.component,
            finding.part,
            finding.reason,
            str(finding.severity),
            finding.training_job,
        )
        yield FINDING(1.0, *labels)
        if finding.value is not None:
            yield VALUE(finding.value, *labels)
    yield LEFT_OUT(float(max(0, len(findings) - MAX_EXPORTED)))
