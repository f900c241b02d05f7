"""Many agents with the real schedule and verdicts, small and seeded: who is accused, how soon, and
that nobody else is.

`bench/probe_simulator.py` measures the same at full size.
"""

from __future__ import annotations

import pytest

from bench.dead_nodes import named
from bench.probe_simulator import (
    Cluster,
    Conditions,
    Fault,
    RoundMetrics,
    faults,
    lossy,
    quiet,
    trial,
)
from dshealthd.probe.observation import Part, Suspect
from dshealthd.probe.options import BaselineOptions
from dshealthd.probe.verdicts.baseline import Baselines
from dshealthd.probe.verdicts.detector import Detector

NODES, LEAF = 32, 8


def cluster(seed: int, jitter: float = 0.015, spikes: float = 0.005, **others: float) -> Cluster:
    """Return a cluster that has run for a minute."""
    made = Cluster(NODES, LEAF, Conditions(jitter, spikes, **others), seed)
    for _ in range(6):
        made.step()
    return made


@pytest.mark.parametrize("name", list(faults(Cluster(4, 4, Conditions(), 0))))
def test_fault_is_named_and_nothing_else(name: str) -> None:
    """Each fault is accused as what and where it is within about half a minute, nobody else is, and
    the accusation ends with the fault.
    """
    made, metrics = cluster(7), RoundMetrics()
    trial(made, faults(made)[name], metrics, epochs=8, rest=10)
    assert metrics.right == 1
    assert not metrics.wrong
    assert max(metrics.seconds) <= 40
    assert max(metrics.cleared) < float("inf")


def test_dead_leaf_is_named_and_nothing_else() -> None:
    """All nodes of a leaf that dies are named, or the leaf, within about half a minute."""
    seconds, others = named(cluster(3), range(LEAF))
    assert max(seconds) <= 40
    assert not others


LOSSY_TRIALS, LOSSY_RIGHT = 12, 10


@pytest.mark.parametrize(("nodes", "share"), [(4, 0.7), (8, 0.5)])
def test_lossy_node_is_named_and_not_its_links(nodes: int, share: float) -> None:
    """A node of whose rounds half or more fail, with any peer, is accused as the node. This happens
    within two minutes in 10 of 12 trials, in which nothing else is accused. In the others, one of
    its links failed by chance like a cut one.
    """
    made, metrics = Cluster(nodes, 4, Conditions(), 16), RoundMetrics()
    for _ in range(6):
        made.step()
    for _ in range(LOSSY_TRIALS):
        trial(made, lossy(made, share), metrics, rest=36)
    assert metrics.right >= LOSSY_RIGHT
    assert set(metrics.wrong) <= {"link"}  # no healthy node, not even by an old suspicion
    assert max(metrics.cleared) < float("inf")


def test_noise_accuses_nobody() -> None:
    """Half an hour of jitter, spikes and bursts of congestion accuses nobody."""
    made = cluster(8, 0.03, 0.02)
    assert quiet(made, 0.02) == (0, 0)
    assert made.rounds > NODES // 2 * 170


def test_worst_conditions_still_name_a_node() -> None:
    """With 3 % jitter and 2 % spikes, a node that takes 15 % longer is found within a minute."""
    made, metrics = cluster(9, 0.03, 0.02), RoundMetrics()
    for _ in range(2):
        trial(made, faults(made)["node 15 % slow"], metrics, epochs=10, rest=8)
    assert metrics.right == 2
    assert max(metrics.seconds) <= 60


class Unlike(Cluster):
    """Nodes of two kinds, which learn what is usual from the rounds that they have. Rounds take
    twice as long with one of the second kind; or between the two, which are in different rooms.
    """

    def __init__(self, nodes: int, second: int, *, rooms: bool) -> None:
        super().__init__(nodes, nodes, Conditions(), 7)
        self.kinds, self.rooms = [number >= nodes - second for number in range(nodes)], rooms
        self.fault = Fault(Part.NODE, 1.0, -1)
        self.judges = [
            Detector(name, self.leaves, Baselines(BaselineOptions()), lambda: self.time)
            for name in self.names
        ]

    def slowness(self, a: int, b: int, rail: int) -> float:
        """Return how many times as long a rail takes by what its ends are, and by a fault."""
        kinds = {self.kinds[a], self.kinds[b]}
        is_slow = len(kinds) > 1 if self.rooms else True in kinds
        return (2.0 if is_slow else 1.0) * super().slowness(a, b, rail)


@pytest.mark.parametrize("rooms", [False, True])
@pytest.mark.parametrize(("nodes", "second"), [(5, 2), (8, 2), (8, 4), (16, 4)])
def test_unlike_nodes_are_no_fault(nodes: int, second: int, *, rooms: bool) -> None:
    """Where some nodes have other GPUs, adapters or ways, what is slow for one end of a pair is
    usual for the other: nothing is accused, not even for a while. A node that gets slower is.
    """
    made, metrics = Unlike(nodes, second, rooms=rooms), RoundMetrics()
    for _ in range(120):
        made.step()
    assert made.log == []
    trial(made, Fault(Part.NODE, 1.3, 0), metrics, epochs=12, rest=12)
    assert (metrics.right, dict(metrics.wrong)) == (1, {})


class Twice(Cluster):
    """A cluster with a second fault."""

    second: Fault | None = None

    def slowness(self, a: int, b: int, rail: int) -> float:
        """Return the worse of both."""
        once = super().slowness(a, b, rail)
        first, self.fault = self.fault, self.second
        again = super().slowness(a, b, rail)
        self.fault = first
        return max(once, again)


def test_two_faults_at_once_are_both_named() -> None:
    """A slow node does not hide the slow adapter of another node."""
    made = Twice(NODES, LEAF, Conditions(), 11)
    made.fault, made.second = Fault(Part.NODE, 1.3, 3), Fault(Part.NIC, 1.3, 20, rail=5)
    for _ in range(10):
        made.step()
    assert made.accused() == {
        Suspect(Part.NODE, made.component(made.fault), "slow"),
        Suspect(Part.NIC, "node-0020/nic5", "slow"),
    }
