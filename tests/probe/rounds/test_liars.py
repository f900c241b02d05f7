"""Members with valid credentials that lie in a round are not believed about the other end."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from dshealthd.probe.observation import Kind, Observation, Outcome, Stage
from dshealthd.probe.peers.protocol import PeerError
from dshealthd.probe.rounds.plan import RoundPlan
from tests.probe.company import NAMES, Companion, all_have, company, ended
from tests.probe.peering import PATIENT

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


async def seen(root: Companion, member: Companion, *, light: bool = False) -> Observation:
    """Let the first node lead a round, and return what the other makes of it."""
    plan = root.plan(member.name)
    await root.rounds.lead(plan.light() if light else plan)
    await all_have([member])
    return member.observation


@BOTH_CREDENTIALS
@pytest.mark.parametrize("outcome", [Outcome.HUNG, Outcome.CORRUPTED, Outcome.FAILED])
async def test_root_blames_a_healthy_member(
    tmp_path: Path,
    outcome: Outcome,
    mutual_tls: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """The workers of both went through: what the root says instead counts for nothing."""
    async with company(tmp_path, 2, mutual_tls=mutual_tls) as (liar, member):
        lie(liar, "conclusion", saying(outcome=outcome, stage=Stage.SIZES, reason="deadline"))
        observation = await seen(liar, member)
        ended(observation, Outcome.OK, late=())
        assert observation.timings


async def test_nobody_speaks_for_others(tmp_path: Path) -> None:
    """Scores that the root gives for another node are left out."""
    async with company(tmp_path, 2) as (liar, member):
        said = [{"component": name, "score": 1000.0} for name in NAMES[:3]]
        lie(liar, "conclusion", saying(scores=said))
        observation = await seen(liar, member)
        assert dict(observation.scores) == {NAMES[0]: 1000.0, NAMES[1]: 1.0}


async def test_group_is_refused(tmp_path: Path) -> None:
    """A round of three, as earlier versions lead them, is declined like any other of theirs, and
    whoever asks this version for one gets the same answer.
    """
    async with company(tmp_path, 3) as (root, member, _):
        plan = replace(root.plan(member.name), kind=Kind.GROUP, members=NAMES[:3])
        for version, reason in (("0.0.9/3", "version_differs"), (plan.version, "malformed")):
            body = {**replace(plan, version=version).invitation(), "scores": ()}
            with pytest.raises(PeerError, match=reason):
                await root.client.call(member.name, "invite", body, PATIENT)
        assert not member.reports


@pytest.mark.parametrize("seconds", [0.0, 1e-8])
async def test_times_that_cannot_be_speak_against_the_teller(
    tmp_path: Path, seconds: float
) -> None:
    """A member that tells times below what any transport can do is what is wrong with a round."""
    async with company(tmp_path, 2) as (liar, member):
        times = [timing(seconds)]
        lie(liar, "conclusion", saying(timings=times))
        observation = await seen(liar, member)
        ended(observation, Outcome.FAILED, late=(liar.name,), reason="implausible")


async def test_only_what_this_node_has_timed_counts(tmp_path: Path) -> None:
    """Operations, sizes and parts that another member makes up are nothing to this node."""
    async with company(tmp_path, 2) as (liar, member):
        times = [timing(1.0, 8 + number, f"mine{number}") for number in range(100)]
        lie(liar, "conclusion", saying(timings=times))
        observation = await seen(liar, member)
        assert observation.outcome is Outcome.OK
        assert {(t.size, t.part) for t in observation.timings} == {(8, ""), (4096, "")}


async def test_echo_times_of_others_are_not_taken_over(tmp_path: Path) -> None:
    """Who led a light round has measured it; the other end learns nothing from what it says."""
    async with company(tmp_path, 2) as (liar, member):
        times = [timing(2e-6, 0, op="echo")]
        lie(liar, "conclusion", saying(timings=times))
        observation = await seen(liar, member, light=True)
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
