"""One collection of evidence: parallel steps, each in a process, into a bundle with a summary.

It runs in a process of its own, since the disk may hang too. A step that hangs is killed at its
deadline, and its output until then is kept.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dshealthd.core import documents
from dshealthd.core.collector import reason_in_words
from dshealthd.core.text import plural
from dshealthd.evidence import (
    flight_recorder,
    job_logs,
    kernel_log,
    members,
    nccl_ras,
    process,
    stacks,
    summary,
)
from dshealthd.evidence.findings import (
    CollectedEvidence,
    HangCase,
    LogSources,
    NodeMembers,
    RankEvidence,
)
from dshealthd.explain import dumps
from dshealthd.explain.group_verdicts import judge_dumps
from dshealthd.jobs.ras.protocol import MAX_ANSWER
from dshealthd.jobs.ras.question import JobProcess
from dshealthd.linux.forked import Ended, Function, Pool

if TYPE_CHECKING:
    from dshealthd.core.host import Host
    from dshealthd.evidence.bundle import Bundle

HOUR = 3600.0
DEADLINE = flight_recorder.PATIENCE + members.DEADLINE
"""Seconds for the steps that do more than read `/proc`: a flight recorder's waits longest."""
_SMALL = 4 << 20


class Step(NamedTuple):
    """A part of a collection, in a process of its own, since whatever it touches may hang."""

    name: str
    function: Function
    max_bytes: int = _SMALL
    """Most bytes that it may emit."""


class Collection:
    """The steps of one bundle."""

    def __init__(
        self,
        case: HangCase,
        host: Host,
        bundle: Bundle,
        *,
        node: str,
        begun: float,
        py_spy: str | None,
        logs: LogSources,
    ) -> None:
        """Prepare a collection begun at Unix time `begun`.

        `py_spy` is the path of that program, None if it is not installed.
        """
        self.findings = CollectedEvidence(case=case, node=node, begun=begun)
        self._started = time.monotonic()
        self._host = host
        self._bundle = bundle
        self._py_spy = py_spy
        self._logs = logs
        self.left: list[int] = []
        """Groups of processes that could not be killed."""

    def begin(
        self,
        metrics: str,
        jobs: Sequence[Mapping[str, Any]],
        probes: Mapping[str, Any] | None,
    ) -> None:
        """Write the agent's data and a first summary into the bundle."""
        findings = self.findings
        findings.metrics, findings.jobs = metrics, jobs
        if probes is not None:
            findings.rounds = [
                entry
                for entry in probes.get("rounds", [])
                if entry.get("time", 0.0) >= findings.begun - HOUR
            ]
            self._bundle.append("probes.json", documents.dumps(probes, indent=1).encode())
        else:
            findings.missing.append("probes: no data from the agent")
        self._bundle.summarize(summary.write(findings))
        if metrics:
            self._bundle.append("metrics-before.prom", metrics.encode())
        else:
            findings.missing.append("metrics: no data from the agent")

    def collect(self) -> None:
        """Run all steps of the collection. OSError if the bundle cannot be written."""
        self._discover()
        # First, before other steps make the ranks do something.
        self._run(
            (
                Step(
                    f"kernel {rank.pid}",
                    functools.partial(
                        process.collect, host=self._host, pid=rank.pid, rank=rank.rank
                    ),
                )
                for rank in self.findings.ranks
            ),
            members.DEADLINE,
        )
        kernel = functools.partial(kernel_log.collect, host=self._host, journal=self._logs.journal)
        steps = [Step("kernel log", kernel)]
        asking = self._query_ras()
        if asking is not None:
            steps.append(Step("NCCL RAS", asking, 2 * MAX_ANSWER + _SMALL))
        explained = functools.partial(
            job_logs.collect,
            host=self._host,
            ranks=[(rank.job, rank.rank, rank.pid) for rank in self.findings.ranks],
            paths=self._logs.paths,
            now=self.findings.begun,
        )
        steps.append(Step("job logs", explained))
        for rank in self.findings.ranks:
            steps += self._steps_of(rank)
        self._run(steps, DEADLINE)
        self._read_dumps()

    def end(self, metrics: str | None, interval: float) -> None:
        """Write the second exposition, `interval` seconds after the first, and the summary.

        OSError.
        """
        findings = self.findings
        if metrics:
            self._bundle.append("metrics-after.prom", metrics.encode())
            findings.interval = interval
            findings.moved = summary.changed_metrics(findings.metrics, metrics)
        elif findings.metrics:
            findings.missing.append("metrics at the end: no data from the agent")
        if self._bundle.full:
            findings.missing.append(
                "the bundle is full (an eighth of max_bytes); further data was left out"
            )
        findings.seconds = time.monotonic() - self._started
        findings.finished = True
        self._bundle.summarize(summary.write(findings))
        self._bundle.hand_over()

    @property
    def whole(self) -> bool:
        """Whether ranks were found, each one's process could be inspected, and all data fitted."""
        ranks = self.findings.ranks
        seen = bool(ranks) and not any("kernel" in rank.problems for rank in ranks)
        return seen and not self._bundle.full

    def _discover(self) -> None:
        """Find the ranks to collect from by their environments.

        If that hangs, the ranks that send heartbeats are still known.
        """
        case = self.findings.case
        pids = [pid for _, pid in case.ranks]
        step = members.search(self._host, case.job, pids)
        if step.left:
            self.left.append(step.left)
        ranks: dict[int, RankEvidence] = {}
        more = 0
        if step.problem:
            self.findings.missing.append(
                f"environments of the ranks, and with them RAS and flight recorders: {step.problem}"
            )
        else:
            found: NodeMembers = members.MEMBERS.read(step.value)
            ranks = {rank.pid: rank for rank in found.ranks}
            more = found.more
            for reason, count in found.unseen.items():
                who = plural(count, "process that may be a rank", "processes that may be ranks")
                self.findings.missing.append(
                    f"{who} could not be inspected: {reason_in_words(reason)}"
                )
        for number, pid in case.ranks:
            unread = {"recorder": "its environment could not be read"}
            ranks.setdefault(pid, RankEvidence(case.job, number, pid, problems=unread))
        culprits, most = {rank for rank, _ in case.culprits}, members.MAX_RANKS
        # Culprits first; of the others, users take turns.
        known = sorted(ranks.values(), key=lambda rank: rank.rank not in culprits)
        self.findings.ranks = sorted(known[:most], key=lambda rank: (rank.job, rank.rank, rank.pid))
        if more := max(more, len(known) - most):
            self.findings.missing.append(
                f"{plural(more, 'more rank')}: at most {most} are inspected"
            )

    def _steps_of(self, rank: RankEvidence) -> Iterator[Step]:
        """Yield the steps of one rank that make the rank, or py-spy, do something."""
        stacked = functools.partial(
            stacks.collect, host=self._host, pid=rank.pid, rank=rank.rank, program=self._py_spy
        )
        yield Step(f"stacks {rank.pid}", stacked, 2 * stacks.MAX_OUTPUT)
        if rank.environment is not None:
            recorded = functools.partial(
                flight_recorder.collect,
                host=self._host,
                pid=rank.pid,
                rank=rank.rank,
                environment=rank.environment,
            )
            yield Step(f"recorder {rank.pid}", recorded, dumps.MAX_DUMP + 1)

    def _query_ras(self) -> Function | None:
        """Return the step that queries NCCL RAS; None if another node queries it or none can."""
        case, ranks = self.findings.case, self.findings.ranks
        if not ranks:
            return None
        if not case.job and len({rank.job for rank in ranks}) > 1:
            self.findings.missing.append("NCCL RAS: there are several jobs; name one with --job")
            return None
        if not case.always_ask and all(rank.rank != 0 for rank in ranks):
            self.findings.missing.append("NCCL RAS: queried by the node of rank 0")
            return None
        told = next((rank for rank in ranks if rank.environment is not None), None)
        if told is None:
            self.findings.missing.append("NCCL RAS: the environment of no rank could be read")
            return None
        return functools.partial(
            nccl_ras.query_job,
            host=self._host,
            environment=told.environment or {},
            # Also those whose environment is unknown: no rank may have a release that a query can
            # crash.
            members=[JobProcess(one.pid, one.start, one.parent, one.rank) for one in ranks],
            world_size=told.world,
        )

    def _record(self, step: Ended) -> None:
        if step.left:
            self.left.append(step.left)
        kind, _, pid = step.name.partition(" ")
        rank = next((rank for rank in self.findings.ranks if pid == str(rank.pid)), None)
        if rank is not None:
            if step.problem:
                rank.problems[kind] = step.problem
            else:
                rank.facts[kind] = step.value
        elif step.problem:
            self.findings.missing.append(f"{step.name}: {step.problem}")
        elif step.name == "NCCL RAS":
            self.findings.ras = step.value
        elif step.name == "job logs":
            self.findings.logs = step.value["says"]

    def _read_dumps(self) -> None:
        """Digest the dumps, and compare those of one standstill: new ones, and those written since
        the last progress, or, where that is unknown, when the newest was. An older one shows where
        its rank was then.
        """
        digests: dict[str, dict[int, tuple[float, Mapping[str, Any]]]] = {}
        # In turn: several that need dumps.MEMORY each would take more than the service may have,
        # and the dumps of 64 ranks together are 2 GiB.
        for rank in [rank for rank in self.findings.ranks if rank.facts.get("recorder")]:
            recorder = rank.facts["recorder"]
            data = self._bundle.read(recorder["file"])
            step = dumps.digested(f"digest {rank.pid}", data)
            self._record(step)
            if not step.problem:
                written = math.inf if not recorder["note"] else recorder["written"]
                digests.setdefault(rank.job, {})[rank.rank] = written, step.value
                self._bundle.append(
                    f"{rank.file}.flight-recorder.json",
                    documents.dumps(step.value, indent=1).encode(),
                )
        for job, found in digests.items():
            several = f"{job}, " if len(digests) > 1 else ""
            newest = max(written for written, _ in found.values())
            since = self.findings.case.since
            least = newest - flight_recorder.PATIENCE if since is None else since
            present = {rank: dump for rank, (written, dump) in found.items() if written >= least}
            self.findings.collectives += [
                f"{several}{verdict.text}" for verdict in judge_dumps(present)
            ]

    def _run(self, steps: Iterable[Step], deadline: float) -> None:
        pool = Pool()
        try:
            for step in steps:
                pool.start(step.name, step.function, deadline, step.max_bytes, self._bundle.append)
            for ended in pool.ended():
                self._record(ended)
        finally:
            pool.close()
        # Now, as the collection may be killed before its end.
        self._bundle.summarize(summary.write(self.findings))
