"""The whole agent on genuine jobs, with its usual intervals and no heartbeats.

Which rank it names, what for, and after how many seconds; and that it names nobody else, ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.agents import RunningAgent, running
from tests.command_line import dshealthd
from tests.nccl.job import Job
from tests.nccl.node import show

pytestmark = [pytest.mark.nccl, pytest.mark.timeout(1200)]

SIZE = 4
STEP = 1.0
"""Seconds from one step of a training to the next."""
WATCHED = 110.0
"""Seconds after the faults: the dead are told a minute after, by an answer 15 s later at most."""
PREFIX = "dshealthd_job_nccl_"


@dataclass
class Situation:
    """A job, what is done to it, and what may be said of it."""

    fault: Callable[[Job], object] | None
    """What ends its training; None where it goes on."""
    behind: dict[str, int] = field(default_factory=dict)
    """By rank, by how many operations it is behind."""
    troubles: dict[str, set[str]] = field(default_factory=dict)
    """By rank, what is wrong with it, first and last."""
    step: Callable[[Job], object] = lambda job: job.launch("world", "AllReduce", 1)
    goes_on: bool = False
    """Whether its training goes on after what was done to it."""


def skip(job: Job) -> None:
    """Have rank 2 skip three operations that the others wait in."""
    job.hold()
    job.launch("world", "AllReduce", 3, [0, 1, 3])


def run_ahead(job: Job) -> None:
    """Have rank 0 go on alone."""
    job.hold()
    job.launch("world", "AllReduce", 3, [0])


def exchange(job: Job) -> None:
    """Send and receive, which NCCL does not count."""
    for sender in (0, 2):
        job.ranks[sender].say(f"do world Send{sender + 1} 1")
        job.ranks[sender + 1].say(f"do world Recv{sender} 1")
    for rank in job.ranks:
        rank.hear()


GONE = {"3": {"unresponsive", "dead"}}


SITUATIONS = {
    "well": Situation(None, goes_on=True),
    "skipped": Situation(skip, behind={"2": 3}),
    "ahead": Situation(run_ahead, behind={"1": 3, "2": 3, "3": 3}),
    "stopped": Situation(lambda job: job.stop(3), troubles=GONE),
    "killed": Situation(lambda job: job.kill(3), troubles=GONE),
    "exited": Situation(lambda job: job.leave(3), troubles=GONE),
    "destroyed": Situation(lambda job: job.destroy("pair/0", 1), goes_on=True),
    "send/receive": Situation(None, step=exchange, goes_on=True),
}


@dataclass
class Seen:
    """What the metrics said of a job since the fault, and after how many seconds first."""

    behind: dict[tuple[str, int], float] = field(default_factory=dict)
    troubles: dict[tuple[str, str], float] = field(default_factory=dict)
    gpus: set[tuple[str, str]] = field(default_factory=set)
    idle: float = 0.0
    states: set[str] = field(default_factory=set)

    def look(self, agent: RunningAgent, job: Job, seconds: float) -> None:
        """Take one scrape."""
        series = agent.scrape().series

        def of(name: str) -> Iterator[tuple[dict[str, str], float]]:
            for key, value in series.get(f"{PREFIX}{name}", {}).items():
                if (labels := dict(key))["training_job"] == job.name:
                    yield labels, value

        for labels, value in of("rank_operations_behind"):
            self.behind.setdefault((labels["rank"], int(value)), seconds)
            self.gpus.add((labels["rank"], labels["gpu"]))
        for labels, _ in of("rank_trouble_info"):
            self.troubles.setdefault((labels["rank"], labels["trouble"]), seconds)
            self.gpus.add((labels["rank"], labels["gpu"]))
        self.idle = max([self.idle, *(value for _, value in of("answers_without_progress"))])
        self.states |= {labels["state"] for labels, _ in of("ras_state")}


@pytest.mark.parametrize("version", ["2.28.9", "2.30.7"])
def test_agent(version: str, make_job: Callable[..., Job], tmp_path: Path) -> None:
    """Every culprit is named by rank and GPU, and nobody else is."""
    tried = SITUATIONS
    jobs: dict[str, Job] = {}
    for name in tried:
        jobs[name] = job = make_job(version, SIZE)
        job.join()
        job.split("pair", [0, 0, 1, 1])
        job.launch("pair/0", "AllGather", 2)
    view = tmp_path / "view"
    flags = ("--path.procfs", str(show(view, *jobs.values())), "--path.dev", str(view))
    (view / "nvidiactl").touch()
    with running(tmp_path, "", flags=flags) as agent:
        train(jobs, tried, until=answered_twice(agent, jobs))
        for name, job in jobs.items():
            if (fault := tried[name].fault) is not None:
                fault(job)
        started = time.monotonic()
        seen = {name: Seen() for name in tried}

        def watch() -> bool:
            for name, job in jobs.items():
                seen[name].look(agent, job, time.monotonic() - started)
            return time.monotonic() - started > WATCHED

        train(jobs, {name: tried[name] for name in tried if tried[name].goes_on}, until=watch)
    problems = []
    for name, situation in tried.items():
        found = seen[name]
        print(f"{version} {name}: {told(found)}")
        if set(found.behind) != set(situation.behind.items()):
            problems.append(f"{name}: behind {found.behind}")
        right = {(rank, what) for rank, all in situation.troubles.items() for what in all}
        if set(found.troubles) != right:
            problems.append(f"{name}: troubles {found.troubles}")
        if any(rank.isdecimal() and rank != gpu for rank, gpu in found.gpus):
            problems.append(f"{name}: on GPUs {found.gpus}")
        if found.states != {"answered"}:
            problems.append(f"{name}: {found.states}")
        if jobs[name].ended():
            problems.append(f"{name}: ended {jobs[name].ended()}")
    assert not problems
    summary = evidence(jobs["killed"], tmp_path, flags)
    assert "rank 3 on 127.0.0.1 GPU 3 is dead" in summary, summary


def train(jobs: dict[str, Job], tried: dict[str, Situation], until: Callable[[], bool]) -> None:
    """Have jobs make steps until something is so."""
    while not until():
        for name, situation in tried.items():
            situation.step(jobs[name])
        time.sleep(STEP)


def answered_twice(agent: RunningAgent, jobs: dict[str, Job]) -> Callable[[], bool]:
    """Return what tells whether each job has answered twice, so that answers can be compared."""
    names = {job.name for job in jobs.values()}

    def answered() -> bool:
        series = agent.scrape().series.get(f"{PREFIX}answers_without_progress", {})
        return names <= {dict(key)["training_job"] for key in series}

    return answered


def told(seen: Seen) -> str:
    """Return what was seen, in a line."""
    parts = [
        f"rank {rank or '?'} behind by {behind} after {seconds:.0f} s"
        for (rank, behind), seconds in seen.behind.items()
    ]
    parts += [
        f"rank {rank or '?'} {what} after {seconds:.0f} s"
        for (rank, what), seconds in seen.troubles.items()
    ]
    return (", ".join(parts) or "nobody named") + f"; answers without progress {seen.idle:.0f}"


def evidence(job: Job, folder: Path, flags: tuple[str, ...]) -> str:
    """Return the summary of the evidence of a job."""
    state = str(folder / "state")
    done = dshealthd("evidence", "--job", job.name, *flags, "--path.state", state)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
