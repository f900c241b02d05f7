"""Rounds between nodes over the real peer API.

What each way of going well and wrong is called, and that both members say the same.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dshealthd.linux import starvation
from dshealthd.probe.members.schedule import root_order
from dshealthd.probe.metrics import STARVED_ROUNDS, RoundMetrics
from dshealthd.probe.observation import (
    ON_DEMAND,
    Backend,
    Outcome,
    RoundKind,
    RoundPlan,
    RoundResult,
    Stage,
)
from dshealthd.probe.peers.messages import VERSIONS
from dshealthd.probe.peers.protocol import PeerError, Refusal
from dshealthd.probe.peers.resolver import Resolver
from dshealthd.probe.rounds import leader
from dshealthd.probe.rounds.active_round import RoundReport
from dshealthd.probe.rounds.round import Rounds
from tests.probe.company import EPOCH, Companion, all_have, company, ended, same
from tests.probe.peering import PATIENT, may_block
from tests.stopwatch import Stopwatch
from tests.waiting import eventually

PRESENCE = leader.PRESENCE
"""As it ships."""


async def led(companion: Companion, other: Companion, epoch: int = EPOCH) -> RoundReport:
    """Have a node lead a round and return its report."""
    report = await companion.rounds.lead(companion.plan(other.name, epoch))
    assert report is not None
    assert report.led
    return report


async def test_healthy(tmp_path: Path) -> None:
    """Both meet in the root's store, run once, and know the same, and each other's report."""
    async with company(tmp_path, 2) as companions:
        companions[1].fake.seconds = 0.002
        await led(companions[0], companions[1])
        await all_have(companions)
        observation = same(companions)
        ended(observation, Outcome.OK, stage=Stage.DONE, late=(), kind=RoundKind.PAIR)
        assert [(timing.size, timing.seconds) for timing in observation.timings] == [
            (8, 0.002),
            (4096, 0.002),
        ]
        for one, other in (companions, companions[::-1]):
            assert one.observation.told == other.node.report()
        assert [companion.fake.runs for companion in companions] == [1, 1]


async def test_busy_member_makes_the_round_light(tmp_path: Path) -> None:
    """A member whose GPUs are busy declines, and echoes take the round's place at both ends."""
    async with company(tmp_path, 2) as (root, member):
        member.node.reason = "busy_gpu"
        report = await led(root, member)
        await all_have([root, member])
        observation = same([root, member])
        assert (observation.kind, observation.backend, observation.outcome) == (
            RoundKind.LIGHT,
            "agent",
            Outcome.OK,
        )
        assert observation.reason == "busy_gpu"
        assert [timing.op for timing in observation.timings] == ["echo", "echo"]
        trip = observation.timings[0].seconds
        assert 0 < trip < report.seconds
        assert observation.timings[1].bus_bandwidth > 0
        ahead, behind = report.offset, member.reports[0].offset
        assert ahead is not None
        assert behind == -ahead
        assert abs(ahead) <= trip / 2
        assert root.fake.runs == member.fake.runs == 0


def different_members(root: Companion, member: Companion) -> None:
    """Have the member believe in another list."""
    member.node.names = (root.name, member.name)


def clock_ahead(_root: Companion, member: Companion) -> None:
    """Have the member's clock two epochs ahead."""
    member.node.clock_off = 20.0


def other_version(_root: Companion, member: Companion) -> None:
    """Have the member serve rounds of another version."""
    served = member.server._handlers
    served[b"invite 0.0.0"] = served.pop(f"invite {VERSIONS['invite']}".encode())


@pytest.mark.parametrize(
    ("difference", "reason"),
    [
        (different_members, "members_differ"),
        (clock_ahead, "clock_differs"),
        (other_version, "version_differs"),
    ],
)
async def test_disagreement(
    tmp_path: Path, difference: Callable[[Companion, Companion], None], reason: str
) -> None:
    """Nodes that are set up differently decline with what differs; echoes tell the offset."""
    async with company(tmp_path, 3) as (root, member, _):
        difference(root, member)
        watch = Stopwatch()
        report = await led(root, member)
        assert watch.seconds() < 3
        observation = report.observation
        ended(observation, Outcome.DECLINED, reason=reason, late=(member.name,))
        assert report.offset == pytest.approx(member.node.clock_off, abs=report.seconds / 2)
        assert root.fake.runs == member.fake.runs == 0


async def test_a_reason_of_a_later_release(tmp_path: Path) -> None:
    """A member that declines even a light round, for a reason that is not known here, is asked once
    more and not for ever.
    """
    async with company(tmp_path, 2) as (root, member):
        asked = []

        def check(_sender: str, plan: RoundPlan) -> None:
            asked.append(plan.kind)
            reason = "unheard_of"
            raise Refusal(reason)

        member.rounds._check = check  # type: ignore[method-assign, assignment]
        await root.rounds.lead(root.plan(member.name))
        ended(root.observation, Outcome.DECLINED, reason="other")
        assert asked == [RoundKind.PAIR, RoundKind.LIGHT]


async def test_absent_member(tmp_path: Path) -> None:
    """A member whose agent is gone ends the round at its invitation, and is named."""
    async with company(tmp_path, 2) as (root, member):
        await member.server.close()
        observation = (await led(root, member)).observation
        ended(observation, Outcome.REFUSED, stage=Stage.INVITE, late=(member.name,))
        assert root.fake.runs == 0


async def test_name_server_that_does_not_answer(tmp_path: Path) -> None:
    """A member whose address no name server tells is not named."""

    def fails(*_arguments: object, **_named: object) -> list[object]:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    async with company(tmp_path, 2) as (root, member):
        root.client._pool._addresses = lambda _: ("node.invalid", 1)
        root.client._pool._resolver = Resolver(fails)
        observation = (await led(root, member)).observation
        ended(observation, Outcome.INCONCLUSIVE, stage=Stage.INVITE, late=())


async def have_run(companions: list[Companion]) -> None:
    """Wait until each of these nodes has had a round. A refusal that overtakes the invitation which
    it makes way for is one that came to nothing.
    """
    for companion in companions:
        async with asyncio.timeout(PATIENT):
            while all(one.observation.reason == "already_testing" for one in companion.reports):
                companion.reports.clear()
                await asyncio.sleep(0.01)


async def test_both_start_at_once(tmp_path: Path) -> None:
    """Of two that start a round at once, the later in the root order joins the other's."""
    async with company(tmp_path, 2) as (one, two):
        for turn in range(5):
            epoch = EPOCH - turn % 2
            found = await asyncio.gather(
                one.rounds.lead(one.plan(two.name, epoch)),
                two.rounds.lead(two.plan(one.name, epoch)),
            )
            first = root_order((one.name, two.name), epoch)[0]
            assert [report is not None and report.led for report in found] == [
                one.name == first,
                two.name == first,
            ]
            await have_run([one, two])
            assert same([one, two]).members[0] == first
            assert one.fake.runs == two.fake.runs == turn + 1
            one.reports.clear()
            two.reports.clear()


@pytest.mark.parametrize(
    ("inviting", "peer", "epoch", "gives"),
    [(True, "b", 2, True), (True, "b", 0, False), (False, "b", 2, False), (True, "c", 2, False)],
)
def test_what_gives_way(peer: str, epoch: int, *, inviting: bool, gives: bool) -> None:
    """An invitation, to one of the other member's that has a later epoch."""
    plan = RoundPlan(
        epoch=1, kind=RoundKind.PAIR, backend=Backend.GLOO, members=("a", peer), digest=""
    )
    current: Any = SimpleNamespace(inviting=inviting, peer=peer, plan=plan)
    ours = Rounds.__new__(Rounds)
    other = replace(plan, members=("b", "a"), epoch=epoch)
    assert ours._gives_way(current, other) is gives


@pytest.mark.parametrize("extra", [0, 1])
async def test_extra_round_crosses_a_scheduled_one(tmp_path: Path, extra: int) -> None:
    """Of an extra round and the schedule's, which two members start with each other at once, that
    of the schedule is run, whoever would come first in the order of each. If both gave
    way, they would wait for each other for a minute.
    """
    async with company(tmp_path, 2) as companions:
        one, two = companions[extra], companions[1 - extra]
        for epoch in range(EPOCH - 1, EPOCH + 2):
            found = await asyncio.gather(
                one.rounds.lead(one.plan(two.name, ON_DEMAND)),
                two.rounds.lead(two.plan(one.name, epoch)),
            )
            assert [report is not None and report.led for report in found] == [False, True]
            await have_run([one, two])
            observation = same([one, two])
            assert (observation.epoch, observation.outcome) == (epoch, Outcome.OK)
            one.reports.clear()
            two.reports.clear()


async def test_one_test_at_a_time(tmp_path: Path) -> None:
    """A node that is in a round declines another one, and does not lead one either. Beside its
    collectives it meets others in light rounds, which it is called to, and which it leads.
    """
    async with company(tmp_path, 3) as (one, two, three):
        two.fake.silent, pair = True, (two.name, one.name)
        assert not one.rounds.takes_part_in(EPOCH, pair)
        first = asyncio.create_task(one.rounds.lead(one.plan(two.name)))
        await eventually(lambda: one.fake.runs > 0)
        assert one.rounds.takes_part_in(EPOCH, pair)
        assert not one.rounds.takes_part_in(EPOCH + 1, pair)
        observation = (await led(three, one)).observation
        ended(observation, Outcome.DECLINED, reason="already_testing")
        assert await one.rounds.lead(one.plan(three.name)) is None
        for root, member in ((three, one), (one, three)):
            report = await root.rounds.lead(root.plan(member.name).light())
            assert report is not None
            ended(report.observation, Outcome.OK, kind=RoundKind.LIGHT)
        assert one.rounds.busy
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


@pytest.mark.parametrize(("others", "outcome"), [(31, Outcome.OK), (32, Outcome.DECLINED)])
async def test_light_rounds_at_a_time(tmp_path: Path, others: int, outcome: Outcome) -> None:
    """Members can have a node take part in so many, and no more."""
    async with company(tmp_path, 2) as (root, member):
        nothing: Any = None
        member.rounds._parts = dict.fromkeys(map(str, range(others)), nothing)
        report = await root.rounds.lead(root.plan(member.name).light())
        assert report is not None
        assert report.observation.outcome is outcome


@pytest.mark.parametrize("blocked", [0.0, 0.8])
@may_block
async def test_an_agent_without_a_cpu_accuses_nobody(tmp_path: Path, *, blocked: float) -> None:
    """Who looks silent to a root whose loop was blocked is not named; else it is."""
    async with company(tmp_path, 2, silent=True) as (root, member):
        member.fake.silent = True
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(starvation, "LAG", blocked / 2 or PATIENT)
            patch.setattr(leader, "SHARE", 1.0)
            task = asyncio.create_task(led(root, member))
            await eventually(lambda: member.fake.runs > 0)
            asyncio.get_running_loop().call_soon(time.sleep, blocked)
            observation = (await task).observation
        assert (observation.outcome, observation.late, observation.reason) == (
            (Outcome.INCONCLUSIVE, (), "starved")
            if blocked
            else (Outcome.HUNG, (member.name,), "silent")
        )
        metrics = RoundMetrics()
        metrics.add(root.reports[0], root.name)
        counts = {sample.metric: sample.value for sample in metrics.samples(())}
        assert counts[STARVED_ROUNDS] == bool(blocked)


@pytest.mark.parametrize("met", [False, True], ids=["in rendezvous", "in a collective"])
async def test_agent_dies(tmp_path: Path, *, met: bool) -> None:
    """A member whose agent dies, before or after the workers have met, is named within seconds."""
    async with company(tmp_path, 2) as (root, member):
        root.fake.silent = member.fake.silent = met
        member.fake.absent = not met
        task = asyncio.create_task(led(root, member))
        await eventually(lambda: root.fake.runs > 0 and member.fake.runs > 0)
        await member.close()
        watch = Stopwatch()
        observation = (await task).observation
        assert watch.seconds() < leader.FIRST + PRESENCE + 1
        ended(observation, Outcome.REFUSED, stage=Stage.STORE, late=(member.name,))


async def test_root_dies(tmp_path: Path) -> None:
    """A member whose root is gone when the results are due says so of the root by itself."""
    async with company(tmp_path, 2) as (root, member):
        root.fake.silent = True
        task = asyncio.create_task(root.rounds.lead(root.plan(member.name)))
        await eventually(lambda: member.fake.runs > 0)
        await root.server.close()  # first: the kernel of a dead agent's node refuses at once
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await all_have([member])
        observation = member.observation
        assert (observation.outcome, observation.late) == (Outcome.REFUSED, (root.name,))


CASES = {
    "wrong sum everywhere": (
        "corrupted sizes wrong_data 5",
        "corrupted sizes wrong_data 5",
        "corrupted - wrong_data",
    ),
    "wrong sum at one": (
        "ok done - 9",
        "corrupted verify wrong_data 9",
        "corrupted them wrong_data",
    ),
    "killed": ("failed sizes connection_lost 5", "failed sizes killed 5", "failed them killed"),
    "stopped": ("hung sizes deadline 5", "hung sizes stopped 4", "hung them stopped"),
    "stopped, and the other lost its connection": (
        "failed sizes connection_lost 5",
        "hung sizes stopped 4",
        "hung them stopped",
    ),
    "both wait": ("hung init deadline 0", "hung init deadline 0", "hung - deadline"),
    "one came further": ("hung warm_up deadline 2", "hung init deadline 1", "hung them deadline"),
    "ended early, as it had not come as far": (
        "hung init deadline 0",
        "inconclusive store ended_early 0",
        "inconclusive - deadline",
    ),
    "a job has started at one": (
        "hung sizes deadline 5",
        "declined import busy_gpu 0",
        "declined - busy_gpu",
    ),
    "a job has started, and a sum is wrong": (
        "declined import busy_gpu 0",
        "corrupted verify wrong_data 9",
        "corrupted them wrong_data",
    ),
    "other torch": (
        "failed store versions_differ 0",
        "failed store versions_differ 0",
        "declined - versions_differ",
    ),
    "other torch, of which one rank tells before all are cut short": (
        "failed store versions_differ 0",
        "inconclusive import ended_early 0",
        "declined - versions_differ",
    ),
    "other torch, and killed": (
        "failed store versions_differ 0",
        "failed store killed 0",
        "failed them killed",
    ),
    "starved, and the other was ended while it waited": (
        "inconclusive sizes starved 6",
        "hung sizes deadline 5",
        "inconclusive - starved",
    ),
    "stopped, and the other is starved": (
        "inconclusive sizes starved 5",
        "hung sizes stopped 4",
        "hung them stopped",
    ),
    "failed before it has spoken to the other": (
        "hung store deadline 0",
        "failed import no_address 0",
        "failed them no_address",
    ),
    "both failed before they met": (
        "failed import no_address 0",
        "failed import no_address 0",
        "inconclusive - no_address",
    ),
    "own worker in the way": ("ok done - 9", "inconclusive import busy 0", "inconclusive - busy"),
}


@pytest.mark.parametrize(("mine", "theirs", "expected"), CASES.values(), ids=CASES.keys())
async def test_what_workers_say(tmp_path: Path, mine: str, theirs: str, expected: str) -> None:
    """Both nodes' results make one outcome, with who had not come as far or was at fault."""
    async with company(tmp_path, 2) as (root, member):
        for companion, result in ((root, mine), (member, theirs)):
            ended, stage, slug, entered = result.split()
            companion.fake.outcome, companion.fake.stage, companion.fake.reason = (
                Outcome(ended),
                Stage(stage),
                slug.strip("-"),
            )
            companion.fake.counters = int(entered), int(entered)
        await led(root, member)
        await all_have([root, member])
        observation = same([root, member])
        outcome, late, reason = expected.split()
        assert (observation.outcome, observation.reason) == (Outcome(outcome), reason)
        assert observation.late == ((member.name,) if late == "them" else ())


@pytest.mark.parametrize("guilty", [0, 1], ids=["root", "member"])
async def test_who_waits_for_the_guilty_is_not_late(tmp_path: Path, guilty: int) -> None:
    """A round ends at once with the node of a killed worker, whatever the others do."""
    async with company(tmp_path, 2) as companions:
        root, member = companions
        companions[guilty].fake.outcome, companions[guilty].fake.reason = (Outcome.FAILED, "killed")
        companions[guilty].fake.stage = Stage.INIT
        companions[1 - guilty].fake.silent = True
        watch = Stopwatch()
        await led(root, member)
        await all_have(companions)
        assert watch.seconds() < 4
        observation = same(companions)
        ended(observation, Outcome.FAILED, reason="killed", late=(companions[guilty].name,))


async def test_messages_of_strangers(tmp_path: Path) -> None:
    """What is of another round, or of a node not in it, is refused and changes nothing."""
    async with company(tmp_path, 3) as (root, member, stranger):
        root.fake.silent = True
        plan = root.plan(member.name)
        task = asyncio.create_task(root.rounds.lead(plan))
        await eventually(lambda: root.fake.runs > 0)
        bodies: dict[str, dict[str, object]] = {
            "store": {"round": plan.round, "op": "set", "key": "x", "value": b"1", "timeout": 1.0},
            "result": {"round": plan.round, "ranks": (), "timings": ()},
            "conclusion": {"round": plan.round, "result": RoundResult(Outcome.OK, Stage.DONE)},
        }
        for method, body in bodies.items():
            with pytest.raises(PeerError, match="unknown_round"):
                await stranger.client.call(root.name, method, body, PATIENT)
        with pytest.raises(PeerError, match="malformed"):
            await member.client.call(root.name, "result", bodies["result"], PATIENT)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
