"""What several nodes show of a job, as one."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from dshealthd.collectors.job_hang import BOUND, PHASE_SECONDS
from dshealthd.collectors.training import (
    HEARD,
    NODE_RANKS,
    NODE_STEP_SECONDS,
    NODE_WORK_SECONDS,
    PHASE,
    SLOWEST,
    STEP,
)
from dshealthd.core import schema
from dshealthd.core.collector import Sample
from dshealthd.core.schema import SchemaError
from dshealthd.findings.entry import Entry
from dshealthd.findings.overview import JobPart, merge_job, overview
from dshealthd.findings.series import Series
from tests.job_states import TOGETHER, WORLD, Part


@pytest.mark.parametrize(("field", "values", "whole"), [
    ("ranks", (8, 4, 0), 12),
    ("world_size", (None, 16, 16), 16),
    ("world_size", (None, None, None), None),
    ("step", (7, None, 5), 5),
    ("step", (None, None, None), None),
    ("step_highest", (7, None, 9), 9),
    ("steps_per_minute", (60.0, None, 50.0), 50.0),
    ("steps_per_minute", (None, None, None), None),
    ("loss", ("unknown", "finite", "not finite"), "not finite"),
    ("loss", ("unknown", "finite", "finite"), "finite"),
    ("loss", ("unknown", "unknown", "unknown"), "unknown"),
    ("attempts", (2, None, 3), 3),
    ("attempts", (None, None, None), None),
])  # fmt: skip
def test_figures_of_all_nodes(field: str, values: tuple[Any, ...], whole: object) -> None:
    """The slowest pace, the lowest and highest step, the worst loss, whichever node comes first."""
    for order in (values, values[::-1]):
        parts = [JobPart("training", **{field: value}) for value in order]
        assert getattr(merge_job(parts), field) == whole


@pytest.mark.parametrize(("state", "pace"), [("training", 60.0), ("hung", None), ("failed", None)])
def test_only_what_trains_has_a_pace(state: str, pace: float | None) -> None:
    """The last one says nothing of a job that has stopped since."""
    assert merge_job([JobPart(state, "input", steps_per_minute=60.0)]).steps_per_minute == pace


WORST = (
    ("no heartbeats", "training"),
    ("training", "stalled"),
    ("stalled", "failed"),
    ("failed", "hung"),
    ("no heartbeats", "of a later release"),
)
"""States of a job on two nodes, of which the second is that of the job."""
ALONE = (
    # Some were just heard, or may be at work unseen: of these the rules say nothing.
    ((Part("hung", "input"), Part("silent")), "stalled"),
    ((Part("silent"), Part("training")), "training"),
    ((Part("silent"), Part("silent")), "silent"),
    ((Part("stalled", "idle"), Part("no heartbeats")), "no heartbeats"),
    *(((Part(better), Part(worse)), worse) for better, worse in WORST),
)


@pytest.mark.parametrize(("parts", "state"), [*TOGETHER, *ALONE])
def test_nodes_together_know_better(parts: tuple[Part, Part], state: str) -> None:
    """What all nodes show of a job may say more than the worst of it does, which it is otherwise;
    which node comes first decides nothing.
    """
    whole = [
        JobPart(*one[:2], ranks=one.ranks, world_size=WORLD, step=one.step, step_highest=one.step)
        for one in parts
    ]
    assert merge_job(whole).state == merge_job(whole[::-1]).state == state


@pytest.mark.parametrize("field", ["kind", "what", "says", "part", "reason", "job"])
def test_texts_of_an_entry(field: str) -> None:
    """Two hundred characters are read back from the record, one more is not."""
    given: dict[str, Any] = {"kind": "boot", "what": "boot", "says": "", "begin": 1.0, "end": 1.0}
    kind = schema.of(Entry)
    document = Entry(**given).document()
    assert getattr(kind.read(document | {field: "x" * 200}), field) == "x" * 200
    with pytest.raises(SchemaError, match=field):
        kind.read(document | {field: "x" * 201})


def shown(*samples: Sample) -> dict[str, Any]:
    """Return the job with these samples, of which one rank sends heartbeats, at Unix time 1,000."""
    (job,) = overview(Series((STEP(50.0, "j", "0"), *samples)), "", wall=1000.0)
    return job


@pytest.mark.parametrize(("ago", "bound", "state"), [
    (30.0, 30.0, "training"),
    (30.1, 30.0, "silent"),
    (60.0, 120.0, "training"),
    (60.1, 120.0, "silent"),
])  # fmt: skip
def test_a_job_that_is_silent(ago: float, bound: float, state: str) -> None:
    """For half a minute, and for half of what would be overdue."""
    assert shown(HEARD(1000.0 - ago, "j", "0"), BOUND(bound, "j", "0"))["state"] == state
    other = STEP(50.0, "j", "1"), HEARD(999.0, "j", "1")
    assert shown(HEARD(1000.0 - ago, "j", "0"), BOUND(bound, "j", "0"), *other)["state"] == (
        "training"
    )


@pytest.mark.parametrize(("seconds", "state"), [(4.9, "training"), (5.0, "paused")])
def test_a_pause_of_a_moment_is_not_shown(seconds: float, state: str) -> None:
    """From five seconds on, with the phase of the rank that has been in one for longest."""
    phases = PHASE(1.0, "j", "0", "checkpoint"), PHASE(0.0, "j", "0", "training")
    job = shown(*phases, PHASE_SECONDS(seconds, "j", "0"), PHASE_SECONDS(1.0, "j", "1"))
    assert job["state"] == state
    assert (job["stall"] or {"cause": None})["cause"] == (
        "checkpoint" if state == "paused" else None
    )


@pytest.mark.parametrize("roles", [8, 9])
def test_eight_roles_are_told(roles: int) -> None:
    """Each over four times; a node of eight GPUs has no more."""
    told = [("j", str(role)) for role in range(roles)]
    samples = [STEP(50.0, "j", "0")]
    for role in told:
        samples += [NODE_STEP_SECONDS(1.0, *role), NODE_RANKS(2.0, *role), SLOWEST(0.0, *role)]
        for over, of in product(("30s", "2m", "5m", "pauses"), ("slow", "usual")):
            samples.append(NODE_WORK_SECONDS(0.5, *role, over, of))
    (job,) = overview(Series(samples), "")
    assert len(job["own_work"]) == 4 * 8


@pytest.mark.parametrize("ranks", [64, 65])
def test_sixty_four_ranks_are_listed(ranks: int) -> None:
    """The lowest; all are counted."""
    (job,) = overview(Series(STEP(50.0 + rank, "j", str(rank)) for rank in range(ranks)), "")
    assert (job["step"], job["step_highest"]) == (50, 49 + ranks)
    assert [rank["rank"] for rank in job["ranks"]] == list(range(64))
    assert job["ranks_here"] == ranks
