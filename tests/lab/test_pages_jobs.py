"""From a fault in a real training to its page.

Each leads to exactly the one that names job, node, rank and class, and to its end.

DeepSpeed (ZeRO 1 and 2) and DDP trainings of four ranks over two nodes each, three at a time, which
compute, evaluate, write checkpoints and pause while others are broken.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import pytest

from tests.lab import job_trials
from tests.lab.job_faults import FAULTS
from tests.lab.job_trials import TRIALS, Story
from tests.lab.jobs import Job
from tests.lab.paging import Paging
from tests.lab.receiver import WATCHDOG_MISSED, judged
from tests.training.step_clock import average
from tests.waiting import until

PERIOD = 1.0
"""Seconds from one probe between nodes to the next."""
NEVER_SLOW = 10000.0
"""Where a dozen processes import torch at once on two cores, how long a probe takes says nothing.

Whether it comes through does.
"""
HANG_SECONDS = 60.0
"""In which a hang is told: 30 s of silence are usual for every job, and the page comes within 30 s
after them; on a machine of its own: other work is taken out.
"""
HEALTHY_SECONDS = 180.0
RANKS = {"0", "1", "2", "3"}

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """Run all trials in one lab."""
    directory = tmp_path_factory.mktemp("jobs")
    begin = time.monotonic()
    with Paging(
        directory,
        2 * len(TRIALS),
        gpus=2,
        period=PERIOD,
        slow_ratio=NEVER_SLOW,
        progress=lambda what: print(f"{time.monotonic() - begin:.0f} s: {what}"),
    ) as lab:
        lab.until_watched()
        yield job_trials.run(lab, directory, TRIALS)


def test_every_fault_is_tried() -> None:
    """The trials hold each fault once."""
    assert sorted(name for trials in TRIALS for trial in trials for name in trial.faults) == sorted(
        FAULTS
    )


@pytest.mark.parametrize("name", FAULTS)
def test_page(name: str, story: Story) -> None:
    """The fault leads to its one page, with first step and runbook, which ends with it."""
    fault, case = FAULTS[name], story.cases[name]
    assert case.told, story.others
    alert = judged(name, case.told, case.begin, case.over)
    description = alert.annotations["description"]
    node = fault.at(case.nodes)
    assert node is None or node in description
    assert fault.rank is None or re.search(rf"rank {fault.rank}\b", description)
    assert alert.labels.get("training_job") in {None, *case.names}
    if fault.symptom == "training-hang":
        assert case.worked < HANG_SECONDS


def test_nothing_else_came(story: Story) -> None:
    """No other page and no ticket came for any of the faults, and none is left."""
    assert not story.others, "\n".join(story.others)
    assert not story.left, "\n".join(story.left)


class Look(NamedTuple):
    """What the nodes of a job say at one moment, and what the job has printed of the same steps."""

    name: str
    """What the job is called: by its ranks' own environment."""
    ranks: list[set[str]]
    """Which report under this name, on each node."""
    step_seconds: dict[str, float]
    logged_seconds: dict[str, float]


@dataclass
class Watched:
    """What was seen of each job, and told."""

    looks: list[list[Look]]
    told: list[str]
    silence: float
    """The longest time without a Watchdog, in seconds."""


def look(job: Job) -> Look:
    """Compare what the agents tell with what the job has printed."""
    name = job.name()
    reached: dict[str, tuple[int, float]] = {}
    ranks = []
    for node in job.nodes:
        scrape = node.scrape()
        values: dict[str, dict[str, float]] = defaultdict(dict)
        for metric in ("step", "step_seconds"):
            for key, value in scrape.series.get(f"dshealthd_job_{metric}", {}).items():
                labels = dict(key)
                if labels["training_job"] == name:
                    values[metric][labels["rank"]] = value
        ranks.append(set(values["step"]))
        reached |= {
            rank: (round(step), values["step_seconds"][rank])
            for rank, step in values["step"].items()
        }
    # What a rank has told it prints a moment later.
    until(
        lambda: all(
            len(job.steps().get(int(rank), ())) >= step for rank, (step, _) in reached.items()
        )
    )
    logged = job.steps()
    return Look(
        name,
        ranks,
        {rank: seconds for rank, (_, seconds) in reached.items()},
        # A heartbeat does not know how long the first step took.
        {rank: average(logged[int(rank)][1:step]) for rank, (step, _) in reached.items()},
    )


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """Watch a DDP and a DeepSpeed training for three minutes, or until somebody is told of
    something.
    """
    directory = tmp_path_factory.mktemp("healthy")
    with Paging(directory, 4, gpus=2) as lab:
        lab.until_watched()
        nodes = lab.lab.nodes
        with (
            job_trials.ddp(directory / "ddp", nodes[:2], 29500) as one,
            job_trials.zero(directory / "zero", nodes[2:], 29500, stage=1) as other,
        ):
            for job in (one, other):
                job.until(job_trials.LEARNT, job_trials.LEARNS)
            looks: list[list[Look]] = [[], []]
            begin = time.monotonic()
            while time.monotonic() - begin < HEALTHY_SECONDS and not lab.receiver.told():
                for seen, job in zip(looks, (one, other), strict=True):
                    seen.append(look(job))
                lab.receiver.wait(lambda: bool(lab.receiver.told()), 15.0)
            told = [str(alert) for alert in lab.receiver.told()]
            return Watched(looks, told, lab.receiver.longest_silence(begin))


def test_healthy_jobs_are_discovered(watched: Watched) -> None:
    """Each job has the same name on both of its nodes, and a heartbeat of each rank on the rank's
    own node alone.
    """
    for looks in watched.looks:
        for found in looks:
            assert found.ranks == [{"0", "1"}, {"2", "3"}]
    assert len({looks[0].name for looks in watched.looks}) == 2


def test_step_times_of_healthy_jobs(watched: Watched) -> None:
    """The step time on /metrics is that of the training's own log, to 5 %, at every look and for
    each rank.
    """
    for looks in watched.looks:
        for found in looks:
            assert found.step_seconds.keys() == RANKS
            assert found.step_seconds == pytest.approx(found.logged_seconds, rel=0.05)


def test_healthy_jobs_are_not_accused(watched: Watched) -> None:
    """In three minutes of steps, evaluations, checkpoints and pauses nobody is told of anything,
    and the chain is alive.
    """
    assert watched.told == []
    assert watched.silence < WATCHDOG_MISSED
