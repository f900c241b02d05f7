"""From a fault in a real training to its page.

Each leads to exactly the one that names job, node, rank and class, and to its end.

DeepSpeed (ZeRO 1 and 2) and DDP trainings of four ranks over two nodes each, three at a time, which
compute, evaluate, write checkpoints and pause while others are broken.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import pytest

from tests.lab import job_trials
from tests.lab.healthy_jobs import Watched, watch
from tests.lab.job_faults import FAULTS
from tests.lab.job_trials import TRIALS, Story
from tests.lab.paging import Paging
from tests.lab.receiver import FIRING, RESOLVED, WATCHDOG_MISSED

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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
        if lab.lab.limits:
            pytest.skip("; ".join(lab.lab.limits))
        lab.until_watched()
        yield job_trials.run(lab, directory, TRIALS)


def test_every_fault_is_tried() -> None:
    """The trials hold each fault once."""
    assert sorted(name for trials in TRIALS for trial in trials for name in trial.faults) == sorted(
        FAULTS
    )


@pytest.mark.parametrize("name", FAULTS)
def test_page(name: str, story: Story) -> None:
    """The fault leads to its page, with the first step and a runbook, and to no second one.

    Once the fault is over the page is.
    """
    fault, case = FAULTS[name], story.cases[name]
    firing = [(when, alert) for when, alert in case.told if alert.status == FIRING]
    assert firing, f"nothing came; others: {story.others}"
    first, alert = firing[0]
    print(
        f"{name}: {alert.receiver} after {first - case.begin:.1f} s: "
        f"{alert.annotations['description']}"
    )
    assert len({alert.fingerprint for _, alert in firing}) == 1, [str(alert) for _, alert in firing]
    description = alert.annotations["description"]
    node = fault.at(case.nodes)
    assert node is None or node in description
    assert fault.rank is None or re.search(rf"rank {fault.rank}\b", description)
    assert alert.labels.get("training_job") in {None, *case.names}
    assert "First step: " in description
    page, _, anchor = alert.annotations["runbook_url"].rpartition("#")
    assert re.fullmatch(rf"http://[^/:]+:\d+/runbooks/{fault.symptom}", page)
    assert anchor == alert.labels["alertname"].lower()
    if fault.symptom == "training-hang":
        assert case.worked < HANG_SECONDS
    over = [when for when, alert in case.told if alert.status == RESOLVED]
    assert over, "it was never said to be over"
    assert over[0] > case.over
    print(f"{name}: over after {over[0] - case.over:.1f} s")


def test_nothing_else_came(story: Story) -> None:
    """No other page and no ticket came for any of the faults, and none is left."""
    assert not story.others, "\n".join(story.others)
    assert not story.left, "\n".join(story.left)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """Watch healthy jobs for three minutes."""
    directory: Path = tmp_path_factory.mktemp("healthy")
    with Paging(directory, 4, gpus=2) as lab:
        if lab.lab.limits:
            pytest.skip("; ".join(lab.lab.limits))
        return watch(lab, directory, 180.0)


def test_healthy_jobs_are_discovered(watched: Watched) -> None:
    """Each job has the same name on both of its nodes, and a heartbeat of each rank on the rank's
    own node alone.
    """
    for job in watched.jobs:
        for look in job.looks:
            assert look.ranks == [{"0", "1"}, {"2", "3"}]
    assert len({job.looks[0].name for job in watched.jobs}) == len(watched.jobs)


def test_step_times_of_healthy_jobs(watched: Watched) -> None:
    """The step time on /metrics is that of the training's own log, to 5 %, at every look and for
    each rank.
    """
    for job in watched.jobs:
        for look in job.looks:
            assert look.step_seconds.keys() == RANKS
            for rank, seconds in look.step_seconds.items():
                assert seconds == pytest.approx(look.logged_seconds[rank], rel=0.05), (
                    job.title,
                    look,
                )


def test_healthy_jobs_are_not_accused(watched: Watched) -> None:
    """In three minutes of steps, evaluations, checkpoints and pauses nobody is told of anything,
    and the chain is alive.
    """
    assert [str(alert) for alert in watched.told] == []
    assert watched.silence < WATCHDOG_MISSED
