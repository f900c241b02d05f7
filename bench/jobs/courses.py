"""What happens to a training, one thing after another, and whether the right rank is named for
it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Semaphore
from typing import Any

from bench.jobs.job import RANKS, Job
from bench.jobs.servers import Node, Prometheus

SLOW = 2
SETTLE = 30.0
"""Seconds after which a training is taken as usual, before something happens in its middle."""
REST = 60.0
"""Seconds of health between two faults of one training, at least."""
UNTOLD = 240.0
"""Most seconds that alerts of the fault before may last."""
AWAKE = 600.0
"""Most seconds until all ranks make steps."""
LATE = 1.5
"""How many times the limit a fault lasts, so that a late verdict is told from none."""
UNCHANGED = frozenset(("trainer", "trainer-zero2", "trainer-zero3", "accelerate", "lightning"))
"""Modes without a line of ours: they run with DSHEALTHD_HEARTBEAT=1."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens, and what must be said about it."""

    name: str
    limit: float
    """Seconds within which the culprits must be named; where there is none, how long it lasts."""
    alert: str = ""
    """Who names them; empty if nobody may be named, and nothing may fire."""
    ranks: tuple[int, ...] = (SLOW,)
    factor: float = 1.0
    do: str = ""
    pause: str = ""
    quota: bool = False
    signal: int = 0
    undo: int = 0
    """The signal that ends what `signal` began."""
    classes: tuple[str, ...] = ("",)
    """What the alert may call it."""
    from_start: bool = False


SLOW_ALERT, HANG, FAILED = "DshealthdRankSlow", "DshealthdJobHang", "DshealthdJobFailed"
FAULTS = {
    fault.name: fault
    for fault in (
        Fault("1.3 x", 90.0, SLOW_ALERT, factor=1.3),
        Fault("2 x", 60.0, SLOW_ALERT, factor=2.0),
        Fault("1.3 x from the start", 90.0, SLOW_ALERT, factor=1.3, from_start=True),
        Fault("2 x from the start", 90.0, SLOW_ALERT, factor=2.0, from_start=True),
        Fault("2 x by a CPU quota", 60.0, SLOW_ALERT, factor=2.0, quota=True),
        Fault("node, 1.3 x", 90.0, SLOW_ALERT, (2, 3), factor=1.3),
        Fault("node, 2 x", 60.0, SLOW_ALERT, (2, 3), factor=2.0),
        Fault("healthy", 600.0),
        Fault("checkpoint of 60 s", 60.0, pause="checkpoint"),
        Fault("evaluation of 90 s", 90.0, pause="evaluation"),
        Fault(
            "stopped", 75.0, HANG, signal=signal.SIGSTOP, undo=signal.SIGCONT, classes=("process",)
        ),
        Fault("starved of data", 75.0, HANG, do="starve", classes=("input",)),
        Fault("starved on the other node", 75.0, HANG, (0,), do="starve", classes=("input",)),
        Fault("desynchronized", 75.0, HANG, do="skip", classes=("desync",)),
        Fault("killed", 60.0, FAILED, signal=signal.SIGKILL),
    )
}
COURSES = {
    "start-1.3": ("1.3 x from the start", "2 x"),
    "start-2": ("2 x from the start", "1.3 x"),
    "middle": ("1.3 x", "2 x"),
    "node": ("node, 1.3 x", "node, 2 x"),
    "quota": ("2 x by a CPU quota",),
    "healthy": ("healthy",),
    "stopped": ("stopped", "killed"),
    "again": ("starved of data", "starved on the other node"),
    "desynchronized": ("desynchronized",),
    "each": ("2 x", "stopped", "desynchronized"),
    "pauses": ("checkpoint of 60 s", "evaluation of 90 s", "starved of data"),
}
"""The faults of one training, in their order."""


def culprits(mode: str, fault: Fault) -> tuple[int, ...]:
    """Return who is at fault: only the first and the last stage of a pipeline read data."""
    return (0,) if mode == "pipeline-4x1" and fault.do == "starve" else fault.ranks


def applies(mode: str, course: str) -> bool:
    """Return whether a course has an answer in a mode: what has no replica has only its own
    past.
    """
    return mode != "pipeline-4x1" or course not in {"start-1.3", "start-2", "node"}


class Judge:
    """What the alerts say about a job while something happens to it."""

    def __init__(self, fault: Fault, ranks: Sequence[int]) -> None:
        self._fault = fault
        self._ranks = set(ranks)
        self._nodes = {_node(rank) for rank in ranks}
        self.named: dict[int, str] = {}
        """The culprits that are named rightly, with their class."""
        self.innocent: set[str] = set()
        self.others: set[str] = set()
        """What else fires, and names nobody."""

    def hear(self, alerts: Sequence[dict[str, str]], *, lasting: bool = True) -> None:
        """Take what fires; `lasting` says that the fault still lasts."""
        for labels in alerts:
            rank = labels.get("rank") or next(
                iter(re.findall(r"\brank (\d+)", labels.get("reason", ""))), ""
            )
            name, node = labels["alertname"], labels.get("node", "")
            said = " ".join(
                filter(None, (name, rank and f"rank {rank}", node, labels.get("class", "")))
            )
            wrong = not self._fault.alert or (rank and int(rank) not in self._ranks)
            wrong = wrong or (rank and node and node != _node(int(rank)))
            if wrong:
                self.innocent.add(said)
            elif name == self._fault.alert and rank and node:
                if labels.get("class", "") in self._fault.classes:
                    if lasting:
                        self.named.setdefault(int(rank), labels.get("class", ""))
                else:
                    self.innocent.add(said)
            else:
                self.others.add(said)

    @property
    def is_done(self) -> bool:
        """Whether all culprits are named: of slow ranks the slowest of each node."""
        if self._fault.alert == SLOW_ALERT:
            return {_node(rank) for rank in self.named} == self._nodes
        return bool(self._fault.alert) and set(self.named) == self._ranks


def _node(rank: int) -> str:
    return "node-1" if rank * 2 < RANKS else "node-2"


class Training:
    """One training, and what happens to it."""

    def __init__(self, mode: str, course: str, job: Job, server: Prometheus) -> None:
        self._mode, self._course, self._job, self._server = mode, course, job, server
        self._starved = job.starved()
        self._at = time.time()

    def settle(self) -> str:
        """Wait for the first values of the own work; return why there are none."""
        end = time.monotonic() + AWAKE
        while len(self._server.telling(self._job.name)) < RANKS:
            if time.monotonic() > end or not self._job.runs():
                return "tells of no own work"
            time.sleep(1.0)
        return ""

    def meet(self, fault: Fault, *, last: bool) -> dict[str, Any]:
        """Have something happen, wait for what is said, and return the result; `last` says that
        nothing happens after it.
        """
        ranks = culprits(self._mode, fault)
        judge = Judge(fault, ranks)
        seconds = ratio = None
        if not fault.from_start:
            self._starved = self._job.starved()
            self._at = self._strike(fault, ranks)
        began = time.monotonic() - (time.time() - self._at)
        while time.monotonic() < began + fault.limit * (LATE if fault.alert else 1.0):
            judge.hear(self._server.firing(self._job.name))
            if judge.is_done:
                seconds = time.monotonic() - began
                if fault.alert == SLOW_ALERT:
                    ratio = self._server.ratio(self._job.name, _node(ranks[0]))
                break
            time.sleep(1.0)
        starved = self._share()
        # Those that stand still are where their last heartbeat says.
        behind = self._behind() if fault.alert == HANG else None
        cleared = None if last else self._relieve(fault, judge)
        right = (
            not judge.innocent
            if not fault.alert
            else not judge.innocent and seconds is not None and seconds <= fault.limit
        )
        return {
            "mode": self._mode,
            "course": self._course,
            "fault": fault.name,
            "right": right,
            "named": {str(rank): said for rank, said in judge.named.items()},
            "seconds": seconds,
            "cleared": cleared,
            "ratio": ratio,
            "innocent": sorted(judge.innocent),
            "others": sorted(judge.others),
            "starved": starved,
            "behind": behind,
            "past": self._server.past(self._job.name, self._at - 30.0, time.time()),
            "began": self._at,
        }

    def _strike(self, fault: Fault, ranks: Sequence[int]) -> float:
        """Have something happen, and return when it began, as Unix time in seconds."""
        began = time.time()
        if fault.quota:
            self._job.limit(ranks[0], fault.factor)
            began = time.time()  # it has first measured for some seconds how much the rank uses
        elif fault.signal:
            self._job.signal(ranks[0], fault.signal)
        elif fault.pause:
            at = max(self._job.steps()) + 4
            self._job.strike(pause=fault.pause, seconds=fault.limit, at=at)
        elif fault.alert:
            self._job.strike(ranks, fault.factor, fault.do)
        return began

    def _relieve(self, fault: Fault, judge: Judge) -> float | None:
        """End what happens, and wait until nothing is said about it any more; return the
        seconds.
        """
        if fault.undo:
            self._job.signal(culprits(self._mode, fault)[0], fault.undo)
        elif not fault.quota and not fault.pause:
            self._job.strike()
        began, cleared = time.monotonic(), None
        while time.monotonic() < began + UNTOLD:
            alerts = self._server.firing(self._job.name)
            judge.hear(alerts, lasting=False)
            if cleared is None and not alerts:
                cleared = time.monotonic() - began
            if cleared is not None and time.monotonic() >= began + REST:
                break
            time.sleep(1.0)
        return cleared

    def _behind(self) -> int | None:
        """Return by how many steps a rank's heartbeat is behind the steps that it has made: those
        before it was followed. None if a rank has no heartbeat.
        """
        told = self._server.steps(self._job.name)
        made = dict(enumerate(self._job.steps()))
        return max(made[rank] - told[rank] for rank in made) if made.keys() == told.keys() else None

    def _share(self) -> float:
        """Return the greatest share of the time in which a rank has waited for a CPU."""
        now = self._job.starved()
        elapsed = time.time() - self._at
        shares = [(now[rank] - self._starved.get(rank, 0.0)) / elapsed for rank in now]
        return max(shares, default=0.0)


def run(
    mode: str,
    course: str,
    place: Path,
    nodes: Sequence[Node],
    server: Prometheus,
    number: str,
    starts: Semaphore,
    site: str = "",
) -> list[dict[str, Any]]:
    """Run one training, and return a result for each thing that happened to it.

    With the archive of a site's switch, `site`, no training has a line of ours.
    """
    faults = [FAULTS[name] for name in COURSES[course]]
    first = faults[0]
    start = {"ranks": first.ranks, "factor": first.factor} if first.from_start else None
    failed = {"mode": mode, "course": course, "fault": first.name, "right": False}
    found: list[dict[str, Any]] = []
    with starts:
        job = Job(
            place,
            mode,
            nodes,
            number,
            site=site,
            unchanged=mode in UNCHANGED,
            burn=SLOW if first.quota else None,
            side=any(fault.do == "skip" for fault in faults),
            start=start,
        )
        end = time.monotonic() + AWAKE
        while len(job.steps()) < RANKS and job.runs() and time.monotonic() < end:
            time.sleep(0.5)
    try:
        if len(job.steps()) < RANKS:
            return [{**failed, "failure": "did not start"}]
        job.started()
        training = Training(mode, course, job, server)
        if failure := training.settle():
            return [{**failed, "failure": failure}]
        if not first.from_start:
            time.sleep(SETTLE)
        for fault in faults:
            if not job.runs():
                found.append({**failed, "fault": fault.name, "failure": "ended by itself"})
                break
            found.append(training.meet(fault, last=fault is faults[-1]))
    finally:
        printed = job.end()
        if not found or any("failure" in result for result in found):
            print(mode, course, printed, file=sys.stderr)
        with contextlib.suppress(OSError):
            (place / "last").write_text(printed)
    return found
