"""Queries end no process of a genuine job, and every answer is true, field by field."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.nccl.job import Job
from tests.nccl.node import Node
from tests.nccl.truth import DEAD_BY, differences

pytestmark = [pytest.mark.nccl, pytest.mark.timeout(1200)]

ASKED = ("2.28.9", "2.30.7")
SIZE = 4
SPLITS = 6
QUERIES = 200
"""In each situation: half as soon as it is there, half once RAS has given up who is missing."""
UNANSWERED = 0.05
"""Share of queries that may end without an answer. The kernel gives a connection to any process of
the job; where one of four is stopped, all six that a query makes go to it in 1 of 4,096 cases, and
a loaded machine does the rest.
"""
LAST = SIZE - 1


@dataclass
class Scene:
    """One situation, and what came of asking in it."""

    name: str
    job: Job
    node: Node
    answered: int = 0
    missing: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def ask(self, version: str) -> None:
        """Ask once, and hold what is answered against the truth."""
        result = self.node.sweep()
        assert not self.job.ended(), f"{self.name}: ranks ended: {self.job.ended()}"
        if self.node.state(result) == "failed":
            self.failures += [fault.detail for fault in result.faults]
            return
        assert self.node.state(result) == "answered", (self.name, result)
        status = self.node.collector._jobs[self.job.name].status
        assert status is not None
        wrong = list(differences(self.job, status, version))
        assert not wrong, f"{self.name}, answer {self.answered + 1}: {wrong}"
        self.answered += 1
        for communicator in status.communicators:
            self.missing.update(trouble.what for trouble in communicator.troubles)


def several_communicators(job: Job) -> None:
    """Join all, split them in ways of two and all, and have one rank skip a collective."""
    job.join()
    for number in range(SPLITS):
        shift = number % 2
        colors = [(rank >> shift) % 2 if number % 3 else 0 for rank in range(SIZE)]
        job.split(f"c{number}", colors)
    job.launch("world", "AllReduce", 5)
    job.launch("c1/0", "AllGather", 2)
    job.launch("c2/1", "ReduceScatter", 1)
    job.launch("c4/0", "Broadcast", 3)
    job.hold()
    job.launch("world", "AllReduce", 3, [0, 1, 3])


SITUATIONS: dict[str, Callable[[Job], object]] = {
    "well": lambda _: None,
    "stopped": lambda job: job.stop(LAST),
    "killed": lambda job: job.kill(LAST),
    "exited": lambda job: job.leave(LAST),
    "destroyed": lambda job: job.destroy("c1/1", LAST),
}


@pytest.mark.parametrize("version", ASKED)
def test_queries(version: str, make_job: Callable[..., Job], tmp_path: Path) -> None:
    """200 queries in each situation end no process, and no answer has a wrong field."""
    scenes = []
    for name in SITUATIONS:
        job = make_job(version, SIZE)
        several_communicators(job)
        scenes.append(Scene(name, job, Node(job, tmp_path / name)))
    for scene in scenes:
        SITUATIONS[scene.name](scene.job)
        for _ in range(QUERIES // 2):
            scene.ask(version)
    for scene in scenes:
        # Until RAS has given the missing up, as `truth` then insists.
        while (left := DEAD_BY - (time.monotonic() - scene.job.ranks[LAST].since)) > 0:
            time.sleep(left)
        for _ in range(QUERIES // 2):
            scene.ask(version)
    for scene in scenes:
        assert len(scene.failures) <= UNANSWERED * QUERIES, scene.failures
        assert scene.answered + len(scene.failures) == QUERIES
    gone = [scene for scene in scenes if scene.name in {"stopped", "killed", "exited"}]
    assert all(scene.missing["dead"] and scene.missing["unresponsive"] for scene in gone)
