"""The nodes of a job, asked before it starts: a node blames itself alone, and soon."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from dshealthd.config import config
from dshealthd.linux import starvation
from dshealthd.probe.observation import Outcome
from dshealthd.probe.options import MembershipOptions, ProbeOptions
from dshealthd.probe.peers.client import PeerClient
from dshealthd.probe.peers.protocol import PeerError
from dshealthd.slurm import allocation
from dshealthd.slurm.allocation import BULK_FAILED, CUT_OFF, LOST, NotAsked, Reach
from dshealthd.slurm.check import REACH_AGAIN, CheckReport, NodeCheck, NodeCheckResult, Streaks
from dshealthd.slurm.controller import ControllerError
from dshealthd.slurm.options import SlurmOptions
from tests.netns import listener
from tests.probe.peering import PATIENT, may_block
from tests.probe.services import NAMES, agents, until
from tests.slurm.cluster import Cluster, node
from tests.stopwatch import Stopwatch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from dshealthd.config.config import Config
    from tests.probe.services import Agent

AS_SHIPPED = starvation.LAG
ALL = "127.0.0.[21-28]"
GONE = Reach(7, dict.fromkeys("abcdefg", "connect_timeout"), 7)
PARTLY = Reach(7, {"a": "connect_timeout"}, 1)
BULK = Reach(3, {"a": LOST, "b": LOST, "c": "refused"}, 0)
GOOD = Reach(7, {}, 0)


def asking(agent: Agent) -> Config:
    """Return a configuration with an agent's own members and peer API."""
    loaded = config.load(None)
    return loaded.with_section(agent.service.options)


@may_block
async def test_eight_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of eight nodes hears from the seven others within seconds; one of them dead is named."""
    monkeypatch.setattr(allocation, "DEADLINE", PATIENT)
    monkeypatch.setattr(allocation, "ROUND", PATIENT)
    async with agents(tmp_path, 8) as members:
        await until(lambda: all(agent.value("probe_up") for agent in members))
        watch = Stopwatch()
        found = await asyncio.gather(
            *(
                asyncio.to_thread(allocation.look, asking(agent), agent.name, ALL)
                for agent in members
            )
        )
        print(f"8 nodes: {watch.seconds():.2f} s")
        assert watch.seconds() < 10
        assert found == [Reach(7, {}, 0)] * 8
        await members[3].service.close()
        found = [await asyncio.to_thread(allocation.look, asking(members[0]), NAMES[0], ALL)]
        assert found == [Reach(7, {NAMES[3]: "refused"}, 0)]
        assert not found[0].fault
        assert str(found[0]) == f"6 of 7 nodes of the job answered; {NAMES[3]} refused"


@contextlib.asynccontextmanager
async def among_listeners(directory: Path, *, full: bool) -> AsyncIterator[Config]:
    """Run an agent, the other members of which accept connections and say nothing. As hung agents
    do; where their queues are `full`, the kernel drops all further packets.
    """
    async with agents(directory, 1) as (agent,):
        loaded = asking(agent)
        port = int(loaded.section(ProbeOptions).peer.listen_address.rpartition(":")[2])
        members = MembershipOptions(nodes=NAMES, name=agent.name)
        with contextlib.ExitStack() as stack:
            for name in NAMES[1:]:
                stack.enter_context(listener(name, port, 0 if full else 64))
                if full:
                    stack.enter_context(socket.create_connection((name, port)))
            yield loaded.with_section(replace(loaded.section(ProbeOptions), members=members))


def looks(config: Config, number: int) -> list[Reach]:
    """Return what a node finds that looks so many times."""
    return [allocation.look(config, NAMES[0], ALL) for _ in range(number)]


@may_block
async def test_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node none of whose packets arrives knows within two looks, in less than ten seconds."""
    monkeypatch.setattr(starvation, "LAG", PATIENT)  # not what this is about
    async with among_listeners(tmp_path, full=True) as loaded:
        watch = Stopwatch()
        found = await asyncio.to_thread(looks, loaded, 2)
        assert watch.seconds() + REACH_AGAIN < 10
        assert found == [Reach(7, dict.fromkeys(NAMES[1:], "connect_timeout"), 7)] * 2
        assert found[0].fault == CUT_OFF


@may_block
async def test_hung_agents_are_no_fault_of_this_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents that are hung on all other nodes are named: their kernels acknowledge what is sent."""
    monkeypatch.setattr(starvation, "LAG", PATIENT)
    async with among_listeners(tmp_path, full=False) as loaded:
        (found,) = await asyncio.to_thread(looks, loaded, 1)
        assert found == Reach(7, dict.fromkeys(NAMES[1:], "no_answer"), 0)
        assert not found.fault


TIMEOUT = PeerError(Outcome.HUNG, "no_answer")
UNACKNOWLEDGED = PeerError(Outcome.UNREACHABLE, "not_acknowledged")
REFUSED = PeerError(Outcome.REFUSED, "refused")


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([None, None], ("", False)),
        ([UNACKNOWLEDGED], ("not_acknowledged", True)),
        ([PeerError(Outcome.UNREACHABLE, "name_unknown")], ("name_unknown", False)),
        ([PeerError(Outcome.UNAUTHORIZED, "rejected")], ("rejected", False)),
        # The agent answers small messages before and after a large one is lost, there or back.
        ([None, UNACKNOWLEDGED, None], (LOST, False)),
        ([None, TIMEOUT, None], (LOST, False)),
        # It hung, ended or was cut off meanwhile: nothing is known of large messages.
        ([None, TIMEOUT, TIMEOUT], ("no_answer", False)),
        ([None, TIMEOUT, REFUSED], ("refused", False)),
        ([None, UNACKNOWLEDGED, UNACKNOWLEDGED], ("not_acknowledged", False)),
        ([None, REFUSED], ("refused", False)),
    ],
)
@may_block
async def test_what_a_round_tells(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answers: list[PeerError | None],
    expected: tuple[str, bool],
) -> None:
    """Only a node of which no packet came back is silent; only one that lives loses data."""
    left = list(answers)

    class Scripted(PeerClient):
        """Answers as told."""

        async def call(self, *arguments: Any) -> dict[str, Any]:
            """Answer."""
            body = arguments[2]
            assert bool(body["payload"]) is (len(answers) - len(left) == 1)
            if (answer := left.pop(0)) is not None:
                raise answer
            return dict(body)

    monkeypatch.setattr(allocation, "PeerClient", Scripted)
    monkeypatch.setattr(starvation, "LAG", PATIENT)
    async with agents(tmp_path, 2) as (first, second):
        found = await asyncio.to_thread(allocation.look, asking(first), first.name, ALL)
        problems = {second.name: expected[0]} if expected[0] else {}
        assert found == Reach(1, problems, int(expected[1]))
        assert not left


@may_block
async def test_a_round_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node whose every answer takes nearly as long as it may costs no more than one round."""

    class Slow(PeerClient):
        """Never answers, and does not give up."""

        async def call(self, *arguments: Any) -> dict[str, Any]:
            """Hang."""
            await asyncio.get_running_loop().create_future()
            raise AssertionError(arguments)

    monkeypatch.setattr(allocation, "PeerClient", Slow)
    monkeypatch.setattr(allocation, "ROUND", 0.2)
    monkeypatch.setattr(starvation, "LAG", PATIENT)
    async with agents(tmp_path, 2) as (first, second):
        found = await asyncio.to_thread(allocation.look, asking(first), first.name, ALL)
        assert found == Reach(1, {second.name: "slow"}, 0)


@may_block
async def test_a_node_without_a_cpu_blames_nobody(
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

    monkeypatch.setattr(allocation, "PeerClient", Starved)
    async with among_listeners(tmp_path, full=True) as loaded:
        monkeypatch.setattr(starvation, "LAG", AS_SHIPPED)
        with pytest.raises(NotAsked, match=r"too busy to tell .* no CPU for \d+\.\d s"):
            await asyncio.to_thread(allocation.look, loaded, NAMES[0], ALL)


def test_who_is_asked() -> None:
    """Those behind a node in the ring: at most eight, and each is asked by as many as it asks."""
    names = [f"n{number:03}" for number in range(100)]
    asked = {name: allocation.neighbors(name, names) for name in names}
    assert asked["n098"] == ["n099", *names[:7]]
    counts = [sum(name in others for others in asked.values()) for name in names]
    assert set(counts) == {8}
    assert allocation.neighbors("a", ["a", "b"]) == ["b"]
    assert allocation.neighbors("a", ["a"]) == []


def test_one_silent_neighbor_is_not_this_nodes_fault() -> None:
    """In a job of two nodes nobody can tell which of them is cut off."""
    assert not Reach(1, {"b": "connect_timeout"}, 1).fault
    assert not Reach(0, {}, 0).fault
    assert not Reach(1, {"b": LOST}, 0).fault


def test_lost_data() -> None:
    """It is this node's fault where several nodes lack it and none has it."""
    assert Reach(2, {"b": LOST, "c": LOST}, 0).fault == BULK_FAILED
    assert Reach(3, {"b": LOST, "c": LOST, "d": "connect_timeout"}, 1).fault == BULK_FAILED
    assert not Reach(3, {"b": LOST, "c": LOST}, 0).fault
    assert not Reach(2, {"b": LOST, "c": "refused"}, 0).fault


def test_not_configured(tmp_path: Path) -> None:
    """Without members or a key nothing is known, and the message says what is missing."""
    loaded = config.load(None)
    with pytest.raises(NotAsked, match=r"needs probe\.peer and probe\.members"):
        allocation.look(loaded, "n1", "n[1-3]")
    peer = replace(
        loaded.section(ProbeOptions).peer,
        listen_address="127.0.0.1:10062",
        key_file=tmp_path / "none",
    )
    members = MembershipOptions(nodes=("n1", "n2"), name="n1")
    loaded = loaded.with_section(replace(loaded.section(ProbeOptions), peer=peer, members=members))
    with pytest.raises(NotAsked, match="key_file"):
        allocation.look(loaded, "n1", "n[1-3]")
    with pytest.raises(NotAsked, match=r"n\[1-"):
        allocation.look(loaded, "n1", "n[1-")


def test_an_allocation_without_this_node_is_not_used(tmp_path: Path) -> None:
    """Nodes that are not those of this node's job are not contacted, and nothing is concluded."""
    loaded = config.load(None)
    key = tmp_path / "key"
    key.write_text("0" * 64)
    key.chmod(0o600)
    peer = replace(
        loaded.section(ProbeOptions).peer, listen_address="127.0.0.1:10062", key_file=key
    )
    members = MembershipOptions(nodes=("n1", "n2", "n3", "n4"), name="n1")
    loaded = loaded.with_section(replace(loaded.section(ProbeOptions), peer=peer, members=members))
    with pytest.raises(NotAsked, match=r'"n1" is not among the nodes of the job, "n\[3-4\]"'):
        allocation.look(loaded, "n1", "n[3-4]")


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
    for found, reason in (
        (GONE, "node-cut-off peers=0/7"),
        (BULK, "bulk-transfer-failed peers=0/3"),
    ):
        cluster = Cluster(node("n1"), node("n2"))
        outcome, slept = prolog(cluster, found, found)
        assert (outcome.result, slept) == (NodeCheckResult.DRAINED, REACH_AGAIN)
        assert cluster.table["n1"].reason == f"dshealthd: {reason}"


def test_everything_else_drains_nobody() -> None:
    """A second look that is better, others that are silent, and what cannot be asked."""
    unknown = (NotAsked("no members"), ControllerError("scontrol: no answer"))
    cases: list[tuple[tuple[Reach | Exception, ...], NodeCheckResult]] = [
        ((GOOD,), NodeCheckResult.CLEAN),
        ((PARTLY,), NodeCheckResult.BAD),
        ((GONE, PARTLY), NodeCheckResult.BAD),
        ((GONE, GOOD), NodeCheckResult.CLEAN),
        ((GONE, BULK), NodeCheckResult.BAD),
        ((BULK, PARTLY), NodeCheckResult.BAD),
        *(((error,), NodeCheckResult.UNKNOWN) for error in unknown),
    ]
    for found, expected in cases:
        cluster = Cluster(node("n1"), node("n2"))
        assert prolog(cluster, *found)[0].result is expected
        assert not cluster.changes()


def test_budget_holds() -> None:
    """A switch that fails cuts off a rack: the budget bounds that as everything else."""
    cluster = Cluster(node("n1"), node("n2", "idle+drain", "dshealthd: node-cut-off", 4e9))
    outcome, _ = prolog(cluster, GONE, GONE)
    assert outcome.result is NodeCheckResult.BAD
    assert "budget of 1" in cluster.table["n1"].note
