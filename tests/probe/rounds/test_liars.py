"""Members with valid credentials that lie in a round: nobody believes them about anybody else."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from dshealthd.probe.observation import Kind, Observation, Outcome, Stage
from dshealthd.probe.rounds import member
from dshealthd.probe.rounds.plan import RoundPlan
from tests.probe.company import NAMES, Companion, all_have, company, ended

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    Change = Callable[[str, Mapping[str, Any]], Mapping[str, Any] | None]


BOTH_CREDENTIALS = pytest.mark.parametrize("mutual_tls", [False, True], ids=["key", "tls"])


def lie(liar: Companion, method: str, change: Change) -> None:
    """Have a node change what it sends with one method; None: it sends nothing."""
    call = liar.client.call

    async def lying(
        peer: str, called: str, body: Mapping[str, Any], deadline: float
    ) -> dict[str, Any]:
        changed = change(peer, body) if called == method else body
        return {} if changed is None else await call(peer, called, changed, deadline)

    liar.client.call = lying  # type: ignore[assignment] # what it sends


def saying(**fields: object) -> Change:
    """Return a lie in these fields of a message."""
    return lambda _peer, body: {**body, **fields}


def timing(seconds: float, size: int = 8, part: str = "", op: str = "all_reduce") -> dict[str, Any]:
    """Return a timing as a message has it."""
    return {"op": op, "size": size, "seconds": seconds, "bus_bandwidth": 1.0, "part": part}


async def seen(companions: list[Companion], *, light: bool = False) -> list[Observation]:
    """Let the first node lead a round of all, and return what the others make of it."""
    root, *members = companions
    plan = root.plan(*(member.name for member in members))
    await root.rounds.lead(plan.light() if light else plan)
    await all_have(members)
    return [member.observation for member in members]


@BOTH_CREDENTIALS
@pytest.mark.parametrize("outcome", [Outcome.HUNG, Outcome.CORRUPTED, Outcome.FAILED])
@pytest.mark.parametrize("count", [2, 3])
async def test_root_blames_a_healthy_member(
    tmp_path: Path,
    outcome: Outcome,
    count: int,
    mutual_tls: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """The workers of all went through: what the root says instead counts for nothing."""
    async with company(tmp_path, count, mutual_tls=mutual_tls) as companions:
        false = saying(outcome=outcome, stage=Stage.SIZES, late=(NAMES[1],), reason="deadline")
        lie(companions[0], "conclusion", false)
        for observation in await seen(companions):
            ended(observation, Outcome.OK, late=())
            assert observation.timings


async def test_member_that_is_slow_to_take_a_share_disputes_nothing(tmp_path: Path) -> None:
    """Who has all shares stays in the round until the others have its own."""
    async with company(tmp_path, 3, silent=True) as companions:
        _, quick, slow = companions
        call = quick.client.call

        async def slowly(
            peer: str, method: str, body: Mapping[str, Any], deadline: float
        ) -> dict[str, Any]:
            if (peer, method) == (slow.name, "result"):
                await asyncio.sleep(member.STRAGGLERS / 2)
            return await call(peer, method, body, deadline)

        quick.client.call = slowly  # type: ignore[method-assign]
        for observation in await seen(companions):
            ended(observation, Outcome.OK, reason="")
            assert dict(observation.scores) == dict.fromkeys(NAMES[:3], 1.0)


async def test_third_member_was_never_invited(tmp_path: Path) -> None:
    """A round of three, of which only two know, blames neither the victim nor the third."""
    async with company(tmp_path, 3, silent=True) as (liar, victim, third):
        lie(liar, "invite", lambda peer, body: None if peer == third.name else body)
        false = saying(outcome=Outcome.HUNG, stage=Stage.SIZES, late=(victim.name,))
        lie(liar, "conclusion", false)
        liar.fake.deadline, victim.fake.deadline = 1.0, 0.5
        await liar.rounds.lead(liar.plan(victim.name, third.name))
        await all_have([victim])
        assert not third.reports
        assert victim.observation.outcome is Outcome.INCONCLUSIVE
        assert victim.observation.reason == "disputed"
        assert victim.observation.late == ()


@BOTH_CREDENTIALS
@pytest.mark.parametrize("light", [False, True])
async def test_root_says_that_a_member_is_gone(
    tmp_path: Path,
    light: bool,  # noqa: FBT001 - a parameter of the test
    mutual_tls: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """Who answers others is not absent, whatever the root says; the others have called it."""
    async with company(tmp_path, 3, mutual_tls=mutual_tls) as companions:
        false = saying(
            outcome=Outcome.UNREACHABLE,
            stage=Stage.INVITE,
            late=(NAMES[2],),
            reason="connect_timeout",
        )
        lie(companions[0], "conclusion", false)
        observation, _ = await seen(companions, light=light)
        ended(observation, Outcome.INCONCLUSIVE, late=())


async def test_absent_member_is_absent_for_all(tmp_path: Path) -> None:
    """Where the root could not reach a member, the others find that themselves."""
    async with company(tmp_path, 3) as (root, member, absent):
        await absent.server.close()
        await root.rounds.lead(root.plan(member.name, absent.name))
        await all_have([member])
        for companion in (root, member):
            assert companion.observation.outcome is Outcome.REFUSED
            assert companion.observation.late == (absent.name,)


async def test_nobody_speaks_for_others(tmp_path: Path) -> None:
    """Scores that the root or a member gives for another node are left out."""
    async with company(tmp_path, 3) as companions:
        said = [{"component": name, "score": 1000.0} for name in NAMES[:3]]
        lie(companions[0], "conclusion", saying(scores=said))
        observation, _ = await seen(companions)
        assert dict(observation.scores) == {NAMES[0]: 1000.0, NAMES[1]: 1.0, NAMES[2]: 1.0}


async def test_one_that_came_further_makes_nobody_late(tmp_path: Path) -> None:
    """In a round that hangs, one member alone says that it came further than the others."""
    async with company(tmp_path, 3) as companions:
        for companion in companions:
            companion.fake.outcome, companion.fake.reason = Outcome.HUNG, "deadline"
            companion.fake.stage, companion.fake.counters = Stage.SIZES, (5, 4)
        companions[0].fake.stage, companions[0].fake.counters = Stage.VERIFY, (900, 900)
        for observation in await seen(companions):
            ended(observation, Outcome.HUNG, late=())


@pytest.mark.parametrize("seconds", [0.0, 1e-8])
async def test_times_that_cannot_be_speak_against_the_teller(
    tmp_path: Path, seconds: float
) -> None:
    """A member that tells times below what any transport can do is what is wrong with a round."""
    async with company(tmp_path, 2) as (liar, member):
        times = [timing(seconds)]
        lie(liar, "conclusion", saying(timings=times))
        (observation,) = await seen([liar, member])
        ended(observation, Outcome.FAILED, late=(liar.name,), reason="implausible")


async def test_only_what_this_node_has_timed_counts(tmp_path: Path) -> None:
    """Operations, sizes and parts that another member makes up are nothing to this node."""
    async with company(tmp_path, 2) as (liar, member):
        times = [timing(1.0, 8 + number, f"mine{number}") for number in range(100)]
        lie(liar, "conclusion", saying(timings=times))
        (observation,) = await seen([liar, member])
        assert observation.outcome is Outcome.OK
        assert {(t.size, t.part) for t in observation.timings} == {(8, ""), (4096, "")}


async def test_echo_times_of_others_are_not_taken_over(tmp_path: Path) -> None:
    """Who led a light round has measured it; the other end learns nothing from what it says."""
    async with company(tmp_path, 2) as (liar, member):
        times = [timing(2e-6, 0, op="echo")]
        lie(liar, "conclusion", saying(timings=times))
        (observation,) = await seen([liar, member], light=True)
        assert (observation.kind, observation.timings) == (Kind.LIGHT, ())


async def test_earlier_protocol_is_declined(tmp_path: Path) -> None:
    """An agent of an earlier protocol is another version, and not to blame for anything."""
    async with company(tmp_path, 2) as (root, member):
        version = RoundPlan(
            round="x",
            epoch=0,
            kind=Kind.PAIR,
            backend=root.plan(member.name).backend,
            members=NAMES[:2],
            digest="",
        ).version
        lie(root, "invite", saying(version=version.partition("/")[0]))
        report = await root.rounds.lead(root.plan(member.name))
        assert report is not None
        assert report.observation.outcome is Outcome.DECLINED
        assert report.observation.reason == "version_differs"
