"""A member whose figures are wrong (a defect, its clock) speaks against nobody but itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dshealthd.probe.observation import (
    Backend,
    Observation,
    Outcome,
    RoundKind,
    RoundPlan,
    RoundResult,
    Stage,
    Timing,
)
from dshealthd.probe.rounds.conclusion import combine, plausible, unless_starved
from dshealthd.probe.workers.job import RankResult
from tests.probe.company import Companion, all_have, company, ended

Change = Callable[[str, Mapping[str, Any]], Mapping[str, Any] | None]


def alter(faulty: Companion, method: str, change: Change) -> None:
    """Have a node change what it sends with one method; None: it sends nothing."""
    call = faulty.client.call

    async def altered(
        peer: str, called: str, body: Mapping[str, Any], deadline: float | None = None
    ) -> dict[str, Any]:
        changed = change(peer, body) if called == method else body
        return {} if changed is None else await call(peer, called, changed, deadline)

    faulty.client.call = altered  # type: ignore[assignment] # what it sends


def saying(record: str, **fields: Any) -> Change:
    """Return a change of these fields of a record of a message."""
    return lambda _peer, body: {**body, record: replace(body[record], **fields)}


async def seen(root: Companion, member: Companion) -> Observation:
    """Let the first node lead a round, and return what the other makes of it."""
    await root.rounds.lead(root.plan(member.name))
    await all_have([member])
    return member.observation


async def test_nobody_outside_a_round_is_late(tmp_path: Path) -> None:
    """Whom a root names besides the two of its round counts for nothing."""
    async with company(tmp_path, 2) as (faulty, member):
        late = (member.name, "127.0.0.99")
        alter(
            faulty,
            "conclusion",
            saying("result", outcome=Outcome.HUNG, late=late, reason="deadline"),
        )
        ended(await seen(faulty, member), Outcome.HUNG, late=(member.name,))


async def test_times_that_cannot_be_speak_against_the_teller(tmp_path: Path) -> None:
    """A member that tells times below what any transport can do is what is wrong with a round."""
    async with company(tmp_path, 2) as (root, faulty):
        times = (Timing("all_reduce", 8, 0.0, 1.0),)
        alter(faulty, "result", lambda _peer, body: {**body, "timings": times})
        observation = await seen(root, faulty)
        ended(observation, Outcome.FAILED, late=(faulty.name,), reason="implausible")


@pytest.mark.parametrize(
    ("size", "seconds", "possible"),
    [(8, 0.99e-6, False), (8, 1.01e-6, True), (10**9, 0.99e-4, False), (10**9, 1.01e-4, True)],
)
def test_what_no_transport_can_do(size: int, seconds: float, *, possible: bool) -> None:
    """A microsecond, or ten terabytes a second."""
    timings = (Timing("all_reduce", size, seconds, 1.0),)
    rank = RankResult(rank=0, outcome=Outcome.OK, stage=Stage.DONE, timings=timings)
    assert plausible([rank]) is possible


async def test_only_what_this_node_has_timed_counts(tmp_path: Path) -> None:
    """Operations, sizes and parts that another member makes up are nothing to this node."""
    async with company(tmp_path, 2) as (faulty, member):
        times = tuple(Timing("all_reduce", 8 + n, 1.0, 1.0, f"mine{n}") for n in range(100))
        alter(faulty, "conclusion", saying("result", timings=times))
        observation = await seen(faulty, member)
        assert observation.outcome is Outcome.OK
        assert observation.timings == ()


@pytest.mark.parametrize(
    ("outcome", "reason", "tells"),
    [
        (Outcome.HUNG, "deadline", False),
        (Outcome.HUNG, "stopped", True),
        (Outcome.UNREACHABLE, "no_answer", False),
        (Outcome.UNREACHABLE, "no_route", True),
        (Outcome.FAILED, "timeout", False),
        (Outcome.FAILED, "versions_differ", True),
        (Outcome.CORRUPTED, "timeout", True),
    ],
)
def test_what_a_starved_node_sees(outcome: Outcome, reason: str, *, tells: bool) -> None:
    """What its own delay may have caused says nothing."""
    result = RoundResult(outcome, Stage.SIZES, reason=reason)
    assert unless_starved(result, starved=False) == result
    assert (unless_starved(result, starved=True) == result) is tells


def test_one_starved_worker_of_a_member() -> None:
    """As the others wait for it, what they look like says nothing."""
    plan = RoundPlan(
        epoch=0, kind=RoundKind.RAIL, backend=Backend.NCCL, members=("a", "b"), digest="", ranks=2
    )
    ends = [(Outcome.HUNG, "deadline")] * 4
    ends[1] = Outcome.INCONCLUSIVE, "starved"
    ranks = [
        RankResult(rank=rank, outcome=outcome, stage=Stage.SIZES, reason=reason)
        for rank, (outcome, reason) in enumerate(ends)
    ]
    shares = {"a": (*ranks[:2],), "b": (*ranks[2:],)}
    for me in "ab":
        found = combine(plan, me, shares)
        assert (found.outcome, found.reason) == (Outcome.INCONCLUSIVE, "starved")
