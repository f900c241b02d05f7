"""A member that orders round after round on idle GPUs: the receiver decides how many it runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from dshealthd.core.options import Duration
from dshealthd.probe import policy as policy_module
from dshealthd.probe.observation import (
    ON_DEMAND,
    Backend,
    Observation,
    Outcome,
    RoundKind,
    RoundPlan,
)
from dshealthd.probe.options import PolicyOptions, ProbeOptions
from dshealthd.probe.policy import DUTY
from dshealthd.probe.rounds.active_round import Decline
from dshealthd.probe.rounds.plan import WARM_UP
from dshealthd.probe.slots import SlotRunner
from tests.probe.peering import PATIENT
from tests.probe.played import PlayedWorkers
from tests.probe.services import NAMES, Agent, agents, snapshot
from tests.waiting import eventually

ASKED_RATIO = 0.1

PERIOD = 3600.0
"""No scheduled round is due meanwhile."""
EXPENSIVE = ((64 << 20, 1000),)
"""The most repetitions that an invitation can ask for; they take 1.7 s of GPU time."""
CHEAP = ((8, 1),)
SAVED = 60.0
"""Seconds over which the share of what others ask for accumulates, in place of `ASKED_SAVED`."""


def idle(
    directory: Path, policy: PolicyOptions, way: str = "well"
) -> contextlib.AbstractAsyncContextManager[list[Agent]]:
    """Run two agents with an idle GPU each; the first's workers end each round this way."""

    def change(options: ProbeOptions) -> ProbeOptions:
        options = replace(options, period=Duration(PERIOD), large_every=0)
        return replace(options, policy=policy) if options.members.name == NAMES[1] else options

    return agents(
        directory,
        2,
        change=change,
        shots={name: snapshot({"0": 0.0}) for name in NAMES[:2]},
        workers=lambda name: PlayedWorkers(
            NAMES.index(name), lambda: way if name == NAMES[0] else "well"
        ),
    )


async def begun(members: Sequence[Agent]) -> list[SlotRunner]:
    """Return the rounds of these agents, once all listen."""
    await eventually(lambda: all(agent.service.running for agent in members))
    return [agent.service.running for agent in members if agent.service.running]


async def order(
    orderer: SlotRunner, receiver: str, steps: tuple[tuple[int, int], ...]
) -> Observation:
    """Lead one round on the GPUs of both that the schedule knows nothing of. Whatever the orderer's
    own policy says, which this leaves out.
    """
    end = time.monotonic() + PATIENT
    while True:
        plan = RoundPlan(
            epoch=ON_DEMAND,
            kind=RoundKind.PAIR,
            backend=Backend.NCCL,
            members=(orderer.node.name, receiver),
            digest=orderer.node.membership().digest,
            steps=steps,
        )
        report = await orderer.rounds.lead(plan)
        # Either may still be in the round before.
        if report is not None and report.observation.reason != Decline.TESTING:
            return report.observation
        assert time.monotonic() < end


def gpu_seconds(observation: Observation) -> float:
    """Return how long an expensive round kept each GPU busy, untimed repetitions included."""
    ((_, repetitions),) = EXPENSIVE
    (timing,) = observation.timings
    return timing.seconds * (repetitions + WARM_UP + 1)


async def test_receiver_keeps_to_its_share_of_gpu_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds run until the share for what others ask is used up; from then on they are light ones.
    Its share for the schedule is untouched, and so are its own confirmations.
    """
    policy = PolicyOptions()
    monkeypatch.setattr(policy_module, "ASKED_SAVED", SAVED)
    begin = time.monotonic()
    async with idle(tmp_path, policy) as members:
        receiver = members[1]
        orderer, victim = await begun(members)
        found = [await order(orderer, receiver.name, EXPENSIVE) for _ in range(30)]
        assert {each.outcome for each in found} == {Outcome.OK}
        ran = [each for each in found if each.kind is RoundKind.PAIR]
        light = [each for each in found if each.kind is RoundKind.LIGHT]
        assert ran
        assert len(light) >= len(ran)
        assert {each.reason for each in light} == {DUTY}
        one = max(gpu_seconds(each) for each in ran)
        await eventually(lambda: receiver.value("probe_rounds_total") >= len(found))
        used = receiver.value("probe_gpu_seconds_total")
        elapsed = time.monotonic() - begin
        assert used == pytest.approx(sum(map(gpu_seconds, ran)), rel=0.01)
        assert used <= ASKED_RATIO * (SAVED + elapsed) + one
        assert victim.node.obstacle(scheduled=True) == ""
        assert victim.node.obstacle(scheduled=False) == ""


async def test_receiver_charges_rounds_that_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that hangs in each round it orders holds the receiver's GPU for a share alone. Such
    a round has no timings, so that its whole duration counts.
    """
    monkeypatch.setattr(policy_module, "ASKED_SAVED", SAVED)
    policy = PolicyOptions()
    async with idle(tmp_path, policy, "hung") as members:
        receiver = members[1]
        orderer, victim = await begun(members)
        begin = time.monotonic()
        hung = 0
        while (
            found := await order(orderer, receiver.name, (*CHEAP, *CHEAP))
        ).kind is RoundKind.PAIR:
            assert found.outcome is Outcome.HUNG
            hung += 1
            assert hung < 10
        assert hung
        assert (found.kind, found.outcome, found.reason) == (RoundKind.LIGHT, Outcome.OK, DUTY)
        spent = ASKED_RATIO * SAVED
        used = receiver.value("probe_gpu_seconds_total")
        assert spent < used < time.monotonic() - begin
        assert victim.node.obstacle(scheduled=True) == ""
        assert victim.node.obstacle(scheduled=False) == ""
