"""The drain budget holds however the requests of many nodes interleave."""

from __future__ import annotations

import threading
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dshealthd.slurm import budget
from dshealthd.slurm.controller import ControllerError
from tests.slurm.cluster import NOW, Cluster, node, silent

REASON = "dshealthd: gpu-lost gpu=3"


def drain(cluster: Cluster, name: str, ratio: float = 0.02, daily: float = 0.1) -> str:
    """Drain a node at the cluster's time, without real waiting."""

    def sleep(seconds: float) -> None:
        cluster.now += seconds

    return budget.drain(cluster, name, REASON, ratio, daily, wall=lambda: cluster.now, sleep=sleep)


def drained(cluster: Cluster) -> int:
    """Count nodes with a reason of ours."""
    return sum(entry.ours for entry in cluster.table.values())


class Turns:
    """Lets one thread at a time go on, drawn at random, at each of its requests."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._condition = threading.Condition()
        self._waiting: list[int] = []
        self._alive = 0
        self._turn: int | None = None

    def run(self, functions: list[Callable[[], None]]) -> None:
        """Run all functions to their ends."""
        self._alive = len(functions)
        threads = [threading.Thread(target=self._life, args=(entry,)) for entry in functions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()

    def _life(self, function: Callable[[], None]) -> None:
        try:
            self.wait()
            function()
        finally:
            with self._condition:
                self._alive -= 1
                self._draw()

    def wait(self) -> None:
        """Wait for this thread's turn; all others stand still until it asks again."""
        me = threading.get_ident()
        with self._condition:
            self._waiting.append(me)
            self._draw()
            assert self._condition.wait_for(lambda: self._turn == me, 60)
            self._turn = None
            self._waiting.remove(me)

    def _draw(self) -> None:
        if self._waiting and len(self._waiting) == self._alive:
            self._turn = self._random.choice(sorted(self._waiting))
            self._condition.notify_all()


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1 << 30),
    nodes=st.integers(1, 12),
    bad=st.integers(1, 12),
    ratio=st.sampled_from((0.0, 0.02, 0.2, 0.4)),
)
def test_holds_under_any_interleaving(seed: int, nodes: int, bad: int, ratio: float) -> None:
    """Never more than the budget, whoever asks when; and it is used up, at the latest next time."""
    turns = Turns(seed)
    cluster = Cluster(*(node(f"n{number:02}") for number in range(nodes)), before=turns.wait)
    names = list(cluster.table)[:bad]

    def one(name: str) -> Callable[[], None]:
        def run() -> None:
            try:
                drain(cluster, name, ratio)
            except ControllerError:  # others took too long; the next check tries again
                return

        return run

    turns.run([one(name) for name in names])
    assert drained(cluster) <= budget.size(nodes, ratio)
    cluster.before = lambda: None
    for name in names:
        if not cluster.table[name].reason:
            drain(cluster, name, ratio)
    assert drained(cluster) == min(len(names), budget.size(nodes, ratio))
    assert all("claim" not in entry.note for entry in cluster.table.values())


def test_size() -> None:
    """2 % of the nodes, and at least one."""
    assert [budget.size(nodes, 0.02) for nodes in (1, 20, 99, 100, 149, 10_000)] == [
        *(1, 1, 1, 2, 2, 200)
    ]


@pytest.mark.parametrize(("nodes", "ages", "allowed"), [
    (40, (3599,), (0, "1 an hour")),
    (40, (3601,), (1, "1 an hour")),
    (40, (-900,), (0, "1 an hour")),  # by a clock that is ahead
    (40, (86_399,) * 4, (0, "4 a day")),
    (40, (86_401,) * 4, (1, "1 an hour")),
    (4, (3601,), (1, "1 an hour")),
    (4, (3601,) * 2, (0, "2 a day")),
])  # fmt: skip
def test_allowance(nodes: int, ages: tuple[int, ...], allowed: tuple[int, str]) -> None:
    """What was drained within an hour counts against the hour, and within a day against the day."""
    bad = [node(f"b{number}", "idle+drain", REASON, NOW - age) for number, age in enumerate(ages)]
    well = [node(f"n{number}") for number in range(nodes - len(bad))]
    assert budget.allowance([*bad, *well], 0.02, 0.1, NOW) == allowed


@pytest.mark.parametrize(("gpus", "allowed"), [(0, 20), (100, 2), (1000, 20)])
def test_nodes_without_gpus_do_not_enlarge_the_budget(gpus: int, allowed: int) -> None:
    """Beside 900 others, 2 % of all nodes would be a fifth of a hundred with GPUs. Where no node
    has GRES, GPUs are not told: then all count.
    """
    nodes = [node(f"n{number}", gpus=number < gpus) for number in range(1000)]
    assert budget.allowance(nodes, 0.02, 0.1, NOW).room == allowed


def test_an_hour_later() -> None:
    """What was drained more than an hour ago does not count, nor what an administrator drained."""
    cluster = Cluster(
        node("n1", "idle+drain", REASON, NOW - 3601),
        node("n2", "idle+drain", "bad cable", NOW - 10),
        node("n3", "idle"),
        node("n4", "idle"),
    )
    assert drain(cluster, "n3") == ""
    assert cluster.table["n3"].reason == REASON
    text = "not drained, budget of 1 an hour is spent: gpu-lost gpu=3"
    cluster.calls.clear()
    for _ in range(3):
        assert drain(cluster, "n4") == text
    # Each check of a node over the budget asks once, and takes no ticket.
    assert cluster.calls == [("nodes",), ("note", "n4", text), ("nodes",), ("nodes",)]
    assert cluster.table["n4"].note == text
    assert cluster.table["n4"].state.working


def test_day() -> None:
    """A fault that spends every hour's budget stops at the day's, which repair refills."""
    cluster = Cluster(*(node(f"n{number:02}") for number in range(40)))
    names = list(cluster.table)[:8]
    said = []
    for hour in range(6):  # 1 node an hour, 10 % of 40 a day
        cluster.now = NOW + hour * 3601
        said += [drain(cluster, name) for name in names if not cluster.table[name].reason][:1]
    text = "not drained, budget of 4 a day is spent: gpu-lost gpu=3"
    assert said == ["", "", "", "", text, text]
    assert cluster.table["n04"].note == text
    cluster.undrain(cluster.table["n00"])
    assert drain(cluster, "n04") == ""
    cluster.now = NOW + 25 * 3601
    assert drain(cluster, "n05") == ""


def test_day_is_never_below_the_hour() -> None:
    """Who allows more in an hour than the day's default has it."""
    cluster = Cluster(*(node(f"n{number}") for number in range(4)))
    for name in cluster.table:
        assert drain(cluster, name, ratio=1.0) == ""


def test_comment_of_others_stays() -> None:
    """Our note stands behind what others wrote in the comment, and goes with the drain."""
    cluster = Cluster(node("n1", comment="rack 7"), node("n2"))
    drain(cluster, "n1")
    assert (cluster.table["n1"].comment, cluster.table["n1"].note) == ("rack 7", "")


@pytest.mark.parametrize(
    ("state", "reason", "says"),
    [
        ("idle+drain", "bad cable", "bad cable"),
        ("idle", "kept in mind", "kept in mind"),
        ("idle+maintenance", "", "idle"),
    ],
)
def test_what_appears_meanwhile_stays(state: str, reason: str, says: str) -> None:
    """An administrator who changes the node while a ticket is being taken wins."""
    cluster = Cluster(node("n1"), node("n2"))

    def administrator() -> None:
        if any(call[0] == "note" for call in cluster.calls):
            cluster.table["n1"] = node("n1", state, reason, NOW)

    cluster.before = administrator
    assert drain(cluster, "n1").endswith(f"changed the node meanwhile: {says}")
    assert cluster.table["n1"].reason == reason


@pytest.mark.parametrize(
    ("age", "blocks"), [(899, True), (901, False), (-899, True), (-901, False)]
)
def test_dead_claimant_blocks_for_a_while(age: int, *, blocks: bool) -> None:
    """A node that died with its ticket counts until no clock can take it for alive."""
    ticket = f"claim ticket=1 time={NOW - age:.0f}"
    cluster = Cluster(node("n1", note=ticket), node("n2"))
    assert ("budget" in drain(cluster, "n2")) is blocks


def test_nobody_waits_for_long() -> None:
    """A node that is about to take a ticket and dies is waited for only two seconds, in which
    slurmctld is queried five times a second.
    """
    cluster = Cluster(node("n1", note=f"claim ticket=0 time={NOW:.0f}"), node("n2"))
    with pytest.raises(ControllerError, match="tickets"):
        drain(cluster, "n2")
    assert NOW + 2 <= cluster.now < NOW + 2.4
    assert 10 <= sum(call[0] == "nodes" for call in cluster.calls) <= 15
    assert cluster.table["n2"].note == ""


def test_silent_controller() -> None:
    """Nothing is done where Slurm does not answer."""
    cluster = Cluster(node("n1"), before=silent)
    with pytest.raises(ControllerError):
        drain(cluster, "n1")
    assert not cluster.calls
