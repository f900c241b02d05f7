"""Light rounds with the other nodes of a hung job, whose agents are real."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dshealthd.core.options import Duration
from dshealthd.jobs.hangs.classes import HangClass
from dshealthd.jobs.hangs.judge import Standstill
from dshealthd.probe.hung_jobs import ROUNDS, STANDING, HungJobs, Neighborhood
from dshealthd.probe.observation import Outcome
from dshealthd.probe.options import ProbeOptions
from dshealthd.probe.peers.protocol import PeerError
from tests.probe.peering import Time
from tests.probe.services import NAMES, Agent, agents
from tests.waiting import eventually

ASKED = 32
GAP = 60.0
PARTNERS = 4


def hang(job: str, reason: HangClass = HangClass.WAITING) -> Standstill:
    """Return a hang with default details."""
    return Standstill(job=job, reason=reason, culprits=(), ranks=(), since=0.0)


def entry(job: str, ranks: int = 1, world_size: int = 4) -> dict[str, Any]:
    """Return a job as it appears in a summary."""
    return {"job": job, "state": "hung", "ranks": ranks, "loss": "finite", "world_size": world_size}


def unscheduled(options: ProbeOptions) -> ProbeOptions:
    """Keep scheduled rounds out of the test."""
    return replace(options, period=Duration(3600.0))


def give_job(members: Iterable[Agent], job: str) -> None:
    """Have agents report ranks of a job."""
    for agent in members:
        agent.summary["jobs"] = [entry(job)]


def led(agent: Agent) -> list[tuple[str, str]]:
    """Return the partner and outcome of each extra round that an agent led."""
    return [
        (one["members"][1], one["outcome"])
        for one in agent.rounds
        if one["led"] and one["epoch"] is None
    ]


async def test_all_nodes_of_a_job_look_at_the_same_time(tmp_path: Path) -> None:
    """Each of four nodes meets the other three, although each declines while it leads a round."""
    async with agents(tmp_path, 4, change=unscheduled) as members:
        await eventually(lambda: all(agent.value("probe_up") for agent in members))
        give_job(members, "run-1")
        for agent in members:
            agent.service.update_hangs([hang("run-1")])
        await eventually(
            lambda: all(
                {name for name, outcome in led(agent) if outcome == "ok"}
                == set(NAMES[:4]) - {agent.name}
                for agent in members
            )
        )


class Company:
    """Members that answer as configured, and record who is asked and met."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.jobs: dict[str, str] = {}
        self.states: dict[str, dict[str, Any]] = {}
        self.silent: set[str] = set()
        self.left_out: set[str] = set()
        self.asked: list[str] = []
        self.met: list[str] = []
        self.answering = self.most = 0

    def around(self, me: str) -> Neighborhood:
        """Return them as the `Neighborhood` of one of them."""
        return Neighborhood(me, lambda: self.names, self.left_out.__contains__, self.ask, self.meet)

    async def ask(self, name: str) -> dict[str, Any]:
        """Answer with a summary."""
        self.asked.append(name)
        self.answering += 1
        self.most = max(self.most, self.answering)
        await asyncio.sleep(0)
        self.answering -= 1
        if name in self.silent:
            raise PeerError(Outcome.UNREACHABLE, "timeout")
        found = entry(self.jobs[name]) | self.states.get(name, {}) if name in self.jobs else None
        return {"jobs": [found] if found else []}

    async def meet(self, name: str) -> bool:
        """Note a round."""
        self.met.append(name)
        return True


def played(company: Company, watch: HungJobs, me: str, *, turns: int = 50) -> None:
    """Let a node process the hangs that it has seen, until it waits."""

    async def scene() -> None:
        work = asyncio.create_task(watch.work(company.around(me)))
        for _ in range(turns):
            await asyncio.sleep(0)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    asyncio.run(scene())


MANY = tuple(f"n{number:03d}" for number in range(100))


def watching(own: Iterable[dict[str, Any]] = (), clock: Time | None = None) -> HungJobs:
    """Return the `HungJobs` of a node that has these jobs."""
    return HungJobs(lambda: {"jobs": list(own)}, clock or Time())


def test_few_are_asked_and_fewer_are_met() -> None:
    """The members that follow in the list are queried, wrapping around at its end. Members that do
    not answer are met first, then the first ones with the job, but no accused member and none in
    maintenance.
    """
    company = Company(MANY)
    company.jobs = dict.fromkeys(MANY, "run-1")
    company.silent = {"n002", "n003", "n004", "n005"}
    company.left_out = {"n099", "n000", "n002"}
    watch = watching()
    watch.update_hangs([hang("run-1", HangClass.COLLECTIVE)])
    played(company, watch, "n098")
    assert company.asked == [f"n{number:03d}" for number in (1, *range(3, 34))]
    assert (len(company.asked), company.most) == (ASKED, 8)
    assert company.met == ["n003", "n004", "n001", "n006"]
    assert len(company.met) == PARTNERS
    assert [sample.value for sample in watch.samples() if sample.metric is ROUNDS] == [4.0]


def test_hangs_that_need_no_rounds() -> None:
    """Nobody is queried for a hang that a rank here explains, for one of a job that is all on this
    node, and for one that is over before its turn.
    """
    company = Company(MANY)
    watch = watching([entry("run-2", ranks=8, world_size=8)])
    watch.update_hangs([hang("run-1", HangClass.PROCESS), hang("run-2")])
    played(company, watch, "n000")
    watch.update_hangs([hang("run-3")])
    watch.update_hangs([])
    played(company, watch, "n000")
    assert company.asked == []


def test_a_job_that_hangs_again_and_again_is_looked_into_once_a_minute() -> None:
    """The rate of hangs that users cause is bounded; another job's hang gets its turn."""
    company, clock = Company(MANY), Time()
    watch = watching(clock=clock)
    watch.update_hangs([hang("run-1")])
    played(company, watch, "n000")
    asked = len(company.asked)
    assert asked == ASKED
    for _ in range(10):
        watch.update_hangs([])
        watch.update_hangs([hang("run-1")])
    watch.update_hangs([hang("run-1"), hang("run-2")])
    played(company, watch, "n000")
    assert len(company.asked) == asked
    clock.now += GAP
    played(company, watch, "n000")
    assert len(company.asked) == 2 * asked
    clock.now += GAP
    played(company, watch, "n000")
    assert len(company.asked) == 3 * asked
    standing = [sample.labels for sample in watch.samples() if sample.metric is STANDING]
    assert standing == [("run-1",), ("run-2",)]


def test_how_many_ranks_stand_still() -> None:
    """Those of all members with the job are added up, as many members as it may have nodes, unless
    one is at work; they are asked again while the hang lasts, and met once.
    """
    company, clock = Company(MANY), Time()
    company.jobs = dict.fromkeys(MANY[:64], "run-1")
    watch = watching([entry("run-1", world_size=64)], clock)

    def standing() -> list[float]:
        clock.now += GAP + 1
        watch.update_hangs([hang("run-1")])
        played(company, watch, "n000", turns=200)
        return [sample.value for sample in watch.samples() if sample.metric is STANDING]

    for cause in ("waiting", "idle", "collective"):
        company.states["n033"] = {"state": "stalled", "cause": cause}
        assert standing() == [64.0]
    for state, cause in (("stalled", "working"), ("training", ""), ("paused", "checkpoint")):
        company.states["n033"] = {"state": state, "cause": cause}
        assert standing() == []
    assert len(company.met) == PARTNERS
    watch.update_hangs([])
    assert [sample.metric for sample in watch.samples()] == [ROUNDS]


@pytest.mark.parametrize(
    ("ranks", "size", "asked"),
    [(8, 8 * (1024 - ASKED - 1), 1023), (0, 1024 - ASKED - 1, 1023), (1, 10**6, 1024)],
)
def test_a_job_says_that_it_is_large(ranks: int, size: int, asked: int) -> None:
    """As many members are asked as it may have nodes, and a thousand at most."""
    names = tuple(f"n{number:04}" for number in range(2048))
    company = Company(names)
    watch = watching([entry("run-1", ranks, size)])
    watch.update_hangs([hang("run-1")])
    played(company, watch, names[0], turns=1000)
    assert len(company.asked) == asked


def test_a_node_that_is_no_member_asks_nobody() -> None:
    """A node that is not in the list queries nobody: the list may have changed since."""
    company = Company(MANY)
    watch = watching()
    watch.update_hangs([hang("run-1")])
    played(company, watch, "elsewhere")
    assert company.asked == []
