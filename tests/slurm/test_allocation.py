"""The nodes of a job, asked before it starts: a node blames itself alone, and soon."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from dshealthd import config
from dshealthd.linux import starvation
from dshealthd.probe.options import MembershipOptions
from dshealthd.probe.peers.client import PeerClient
from dshealthd.slurm import allocation
from dshealthd.slurm.allocation import NotAsked, Reach
from dshealthd.slurm.check import REACH_AGAIN, CheckReport, NodeCheck, NodeCheckResult
from dshealthd.slurm.controller import ControllerError
from dshealthd.slurm.options import SlurmOptions
from dshealthd.slurm.streaks import Streaks
from tests.netns import listener
from tests.probe.peering import PATIENT
from tests.probe.services import NAMES, agents, until
from tests.slurm.cluster import Cluster, node
from tests.stopwatch import Stopwatch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from dshealthd.config import Config
    from tests.probe.services import Agent

AS_SHIPPED = starvation.LAG
ALL = "127.0.0.[21-28]"
GONE = Reach(7, dict.fromkeys("abcdefg", "connect_timeout"), 7)
PARTLY = Reach(7, {"a": "connect_timeout"}, 1)
GOOD = Reach(7, {}, 0)


def asking(agent: Agent) -> Config:
    """Return a configuration with an agent's own members and peer API."""
    loaded = config.load(None)
    return replace(loaded, probe=agent.service.options)


def test_eight_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of eight nodes hears from the seven others within seconds; one of them dead is named."""

    async def scene() -> None:
        async with agents(tmp_path, 8) as members:
            await until(lambda: all(agent.value("probe_up") for agent in members))
            watch = Stopwatch()
            found = await asyncio.gather(
                *(asyncio.to_thread(allocation.look, asking(agent), ALL) for agent in members)
            )
            print(f"8 nodes: {watch.seconds():.2f} s")
            assert watch.seconds() < 10
            assert found == [Reach(7, {}, 0)] * 8
            await members[3].service.close()
            found = [await asyncio.to_thread(allocation.look, asking(members[0]), ALL)]
            assert found == [Reach(7, {NAMES[3]: "refused"}, 0)]
            assert not found[0].cut_off
            assert str(found[0]) == f"6 of 7 nodes of the job answered; {NAMES[3]} refused"

    monkeypatch.setattr(allocation, "DEADLINE", PATIENT)
    asyncio.run(scene())


@contextlib.asynccontextmanager
async def among_silent_nodes(directory: Path) -> AsyncIterator[Config]:
    """Run an agent, the other members of which accept connections and say nothing."""
    async with agents(directory, 1) as (agent,):
        loaded = asking(agent)
        port = int(loaded.probe.peer.listen_address.rpartition(":")[2])
        members = MembershipOptions(nodes=NAMES, name=agent.name)
        with contextlib.ExitStack() as stack:
            for name in NAMES[1:]:
                stack.enter_context(listener(name, port))
            yield replace(loaded, probe=replace(loaded.probe, members=members))


def test_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that gets no answer from any other knows within two looks, in less than ten seconds."""

    async def scene() -> None:
        async with among_silent_nodes(tmp_path) as loaded:
            watch = Stopwatch()
            found = [await asyncio.to_thread(allocation.look, loaded, ALL) for _ in range(2)]
            assert watch.seconds() + REACH_AGAIN < 10
            assert [(reach.asked, reach.silent, reach.cut_off) for reach in found] == [
                (7, 7, True)
            ] * 2

    monkeypatch.setattr(starvation, "LAG", PATIENT)  # not what this is about
    asyncio.run(scene())


def test_a_node_without_a_cpu_blames_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who gets no CPU while it waits does not know whether it is cut off, and is not drained."""
    pauses: list[float] = []

    class Starved(PeerClient):
        """Gets no CPU at its first call."""

        async def call(self, *arguments: Any) -> dict[str, Any]:
            """Let the time pass in which answers come."""
            if not pauses:
                pauses.append(allocation.DEADLINE)
                asyncio.get_running_loop().call_soon(time.sleep, pauses[0])
            return await super().call(*arguments)

    async def scene() -> None:
        async with among_silent_nodes(tmp_path) as loaded:
            monkeypatch.setattr(starvation, "LAG", AS_SHIPPED)
            with pytest.raises(NotAsked, match=r"too busy to tell .* no CPU for \d+\.\d s"):
                await asyncio.to_thread(allocation.look, loaded, ALL)

    monkeypatch.setattr(allocation, "PeerClient", Starved)
    asyncio.run(scene())


def test_who_is_asked() -> None:
    """Those behind a node in the ring: at most eight, and each is asked by as many as it asks."""
    names = [f"n{number:03}" for number in range(100)]
    asked = {name: allocation.neighbours(name, names) for name in names}
    assert asked["n098"] == ["n099", *names[:7]]
    counts = [sum(name in others for others in asked.values()) for name in names]
    assert set(counts) == {8}
    assert allocation.neighbours("a", ["a", "b"]) == ["b"]
    assert allocation.neighbours("a", ["a"]) == []


def test_one_silent_neighbour_is_not_this_nodes_fault() -> None:
    """In a job of two nodes nobody can tell which of them is cut off."""
    assert not Reach(1, {"b": "connect_timeout"}, 1).cut_off
    assert not Reach(0, {}, 0).cut_off


def test_not_configured(tmp_path: Path) -> None:
    """Without members or a key nothing is known, and the message says what is missing."""
    loaded = config.load(None)
    with pytest.raises(NotAsked, match=r"needs probe\.peer and probe\.members"):
        allocation.look(loaded, "n[1-3]")
    peer = replace(loaded.probe.peer, listen_address="127.0.0.1:10062", key_file=tmp_path / "none")
    members = MembershipOptions(nodes=("n1", "n2"), name="n1")
    loaded = replace(loaded, probe=replace(loaded.probe, peer=peer, members=members))
    with pytest.raises(NotAsked, match="key_file"):
        allocation.look(loaded, "n[1-3]")
    with pytest.raises(NotAsked, match=r"n\[1-"):
        allocation.look(loaded, "n[1-")


def prolog(cluster: Cluster, *found: Reach | Exception) -> tuple[CheckReport, float]:
    """Return what a prolog does with these looks, and for how long it waits between them."""
    looks, slept = list(found), list[float]()

    def look() -> Reach:
        reach = looks.pop(0)
        if isinstance(reach, Exception):
            raise reach
        return reach

    def ask() -> None:
        raise AssertionError

    check = NodeCheck(SlurmOptions(), "n1", ask, cluster, Streaks(), slept.append)  # type: ignore[arg-type] # never asked
    outcome = check.reaches(look)
    assert not looks
    return outcome, sum(slept)


def test_cut_off_twice_drains() -> None:
    """A node that reaches nobody, twice, is drained by name; its job goes elsewhere."""
    cluster = Cluster(node("n1"), node("n2"))
    outcome, slept = prolog(cluster, GONE, GONE)
    assert (outcome.result, slept) == (NodeCheckResult.DRAINED, REACH_AGAIN)
    assert cluster.table["n1"].reason == "dshealthd: node-cut-off peers=0/7"


def test_everything_else_drains_nobody() -> None:
    """A second look that is better, others that are silent, and what cannot be asked."""
    unknown = (NotAsked("no members"), ControllerError("scontrol: no answer"))
    cases: list[tuple[tuple[Reach | Exception, ...], NodeCheckResult]] = [
        ((GOOD,), NodeCheckResult.CLEAN),
        ((PARTLY,), NodeCheckResult.BAD),
        ((GONE, PARTLY), NodeCheckResult.BAD),
        ((GONE, GOOD), NodeCheckResult.CLEAN),
        *(((error,), NodeCheckResult.UNKNOWN) for error in unknown),
    ]
    for found, expected in cases:
        cluster = Cluster(node("n1"), node("n2"))
        assert prolog(cluster, *found)[0].result is expected
        assert not cluster.changes()


def test_budget_holds() -> None:
    """A switch that fails cuts off a rack: the budget bounds that as everything else."""
    cluster = Cluster(node("n1"), node("n2", "drained", "dshealthd: node-cut-off", 4e9))
    outcome, _ = prolog(cluster, GONE, GONE)
    assert outcome.result is NodeCheckResult.BAD
    assert "budget of 1" in cluster.table["n1"].note
