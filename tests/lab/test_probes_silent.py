"""The same for faults in which no answer comes, which takes longer to be told.

And what two members do that begin at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.agents import Scrape
from tests.lab import faults
from tests.lab.probing import ROUNDS, SKIPS, Probing, begun, history, named

pytestmark = pytest.mark.lab  # see test_probes.py


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probing]:
    """The same with longer epochs, for faults in which a call takes two seconds to be given up.

    Two calls in vain must leave most of an epoch to rounds with others: in shorter ones a member of
    four is too busy to say that it is well.
    """
    with Probing(tmp_path_factory.mktemp("calm"), 4, period=6.0, full=False) as lab:
        yield begun(lab, 1)


def test_node_dead(calm: Probing) -> None:
    """A node that nobody reaches is named, and told from one that refuses."""
    one, two, *_others = calm.nodes
    named(calm, faults.drop_all(two), two, {"unreachable"}, by=(one,), epochs=30)


def test_dead_link(calm: Probing) -> None:
    """Of two nodes that reach all others but not each other, both name the link, and no node."""
    one, two, *_ = calm.nodes
    named(calm, faults.drop(one, two), (one, two), {"unreachable"}, by=(one, two), epochs=25)


def test_link_dead_one_way(calm: Probing) -> None:
    """The same where only one direction is cut."""
    one, two, *_ = calm.nodes
    cut = faults.drop(one, two, both_ways=False)
    named(calm, cut, (one, two), {"unreachable"}, by=(one, two), epochs=30)


def test_agent_stopped(calm: Probing) -> None:
    """A node whose agent is stopped accepts connections and answers nothing: it hangs."""
    one, two, *_others = calm.nodes
    named(calm, faults.pause(two.agent.pid), two, {"hung"}, by=(one,), epochs=25)


def test_loss(calm: Probing) -> None:
    """A node that loses half of all packets is named, by itself or others, and no other node.

    Which of its rounds fail, and how, is chance: where all with one peer do and those with others
    do not, the link to that peer is named as well.
    """
    _, two, *_ = calm.nodes
    named(
        calm,
        faults.loss(two, 0.5),
        two,
        {"intermittent", "unreachable", "hung", "slow"},
        by=(),
        epochs=40,
        wrong=8,
        links=True,
    )


def test_busy_gpus(tmp_path: Path) -> None:
    """Where GPUs are busy rounds are light ones, which is said, and these still name a dead
    link.
    """
    with Probing(
        tmp_path, 4, period=6.0, policy="idle", collectors=("gpu_bus", "gpu_processes")
    ) as lab:
        for node in lab.nodes:
            node.gpus.set(None, "processes", "4242:1073741824")
        lab.await_(
            lambda s: (
                len(s) == 4 and all(scrape.all(SKIPS, reason="busy_gpu") for scrape in s.values())
            ),
            40,
            "busy GPUs",
        )
        begun(lab)
        one, two, *_ = lab.nodes
        named(lab, faults.drop(one, two), (one, two), {"unreachable"}, by=(one, two), epochs=25)
        assert not any(
            scrape.all(ROUNDS, kind="pair", outcome="ok") for scrape in lab.scrapes().values()
        )


@pytest.mark.parametrize("ahead", [0.6, 2.0], ids=["at_once", "before"])
def test_both_start_at_once(tmp_path: Path, ahead: float) -> None:
    """Two members that both begin an epoch's round have one round.

    In the same moment, or the second before the first, by their clocks. In four epochs one after
    the other: on a machine that is too busy to answer an echo a round may fail, and is tried again.
    """
    with Probing(tmp_path, 2, period=3.0, full=False) as lab:
        nodes = lab.nodes
        with faults.clock_offset(nodes[1], ahead):
            begun(lab, 1)
            begin = lab.epoch + 1

            def four_in_a_row(_: Mapping[str, Scrape]) -> bool:
                outcomes: list[dict[int, list[str]]] = []
                for node in nodes:
                    found: dict[int, list[str]] = {}
                    for entry in history(node):
                        if entry["epoch"] is not None and entry["epoch"] >= begin:
                            found.setdefault(entry["epoch"], []).append(entry["outcome"])
                    outcomes.append(found)
                return any(
                    all(
                        found.get(first + more) == ["ok"] for found in outcomes for more in range(4)
                    )
                    for first in outcomes[0]
                )

            lab.await_(four_in_a_row, 40, "one round of both in each of four epochs")
