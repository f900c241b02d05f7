"""Agents that probe each other name each fault for what it is and where it is, accuse nobody else, and take it back when it is over."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from dshealthd.probe.schedule import groups
from tests.lab import faults
from tests.lab.probing import (
    PORT,
    ROUNDS,
    Probing,
    Suspect,
    bad_rounds,
    history,
    killed,
    other_key,
    other_members,
    rounds,
    sabotage,
    suspects,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from tests.agents import Scrape
    from tests.lab import Node

OPERATION = "dshealthd_probe_operation_seconds"
DISAGREES = "dshealthd_probe_peer_disagrees"
SKIPS = "dshealthd_probe_skips_total"
KNOWN = 18
"""Good rounds after which a node knows what is usual."""
CLEAR = 12
"""Epochs after the end of a fault in which every accusation ends: with four nodes each pair meets every third."""


def namespaced(lab: Probing) -> Probing:
    """Skip a test of what only namespaces give."""
    if lab.limits:
        pytest.skip("; ".join(lab.limits))
    return lab


def begun(lab: Probing, least: int = 3) -> Probing:
    """Wait until every node has had some good rounds."""
    lab.await_(lambda s: len(s) == len(lab.nodes) and all(rounds(x, outcome="ok") >= least for x in s.values()), 60 + least, "good rounds")
    return lab


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probing]:
    """Four nodes without torch: their rounds are echoes between the agents."""
    with Probing(tmp_path_factory.mktemp("light"), 4, full=False) as lab:
        yield begun(namespaced(lab))


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probing]:
    """The same with longer epochs, for faults in which a call takes two seconds to be given up."""
    with Probing(tmp_path_factory.mktemp("calm"), 4, period=3.0, full=False) as lab:
        yield begun(namespaced(lab), 1)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probing]:
    """Four nodes whose rounds are collectives with gloo."""
    with Probing(tmp_path_factory.mktemp("full"), 4) as lab:
        yield begun(namespaced(lab))


def named(
    lab: Probing,
    fault: AbstractContextManager[None],
    guilty: Node | tuple[Node, Node],
    reasons: set[str],
    *,
    by: tuple[Node, ...],
    epochs: float,
    clear: float = CLEAR,
    wrong: int = 3,
) -> None:
    """Inject a fault and have `by`, or anybody, name it, nobody name anything else, and all be taken back after its end.

    It is named after at most `wrong` scheduled rounds that did not go well for who names it first; confirmations come on top.
    """
    kind, component = ("link", "--".join(sorted(node.name for node in guilty))) if isinstance(guilty, tuple) else ("node", guilty.name)
    right = {Suspect(kind, component, reason) for reason in reasons}

    def accusers(scrapes: Mapping[str, Scrape]) -> list[Node]:
        accused = set().union(*map(suspects, scrapes.values()))
        assert accused <= right, f"{accused - right} are not {right}\n{lab.told(scrapes)}"
        return [node for node in lab.nodes if node.name in scrapes and suspects(scrapes[node.name])]

    lab.await_(lambda s: len(s) == len(lab.nodes) and not any(map(suspects, s.values())), CLEAR, "no suspects before the fault")
    lab.until_epoch(lab.epoch + 1)
    begin = time.time()
    with fault:
        found = lab.await_(accusers, epochs, f"{right} by anybody")
        first = lab.elapsed(begin)
        needed = min(bad_rounds(node, begin) for node in accusers(found))
        assert needed <= wrong, lab.told(found)
        lab.await_(lambda s: set(by) <= set(accusers(s)), epochs, f"{right} by {', '.join(node.name for node in by)}")
        everybody = lab.elapsed(begin)
    begin = time.time()
    lab.await_(lambda s: len(s) == len(lab.nodes) and not any(map(suspects, s.values())), clear, "no suspects after the fault")
    print(
        f"{component} {'/'.join(reasons)}: {needed} bad rounds, {first:.1f} epochs, {everybody:.1f} all, {lab.elapsed(begin):.1f} to clear"
    )


def test_smoke(full: Probing) -> None:
    """Rounds between four nodes go well, are timed for each size, and accuse nobody."""
    found = begun(full, 6).scrapes()
    told = full.told(found)
    for scrape in found.values():
        assert not suspects(scrape), told
        assert rounds(scrape, kind="pair", outcome="ok") >= 6, told
        assert {key for key in (8, 1024, 65536) if scrape.value(OPERATION, kind="pair", backend="gloo", size=str(key))} == {8, 1024, 65536}
        assert scrape.value("dshealthd_members") == 4
        assert scrape.value("dshealthd_probe_up") == 1
    assert len({scrape.value("dshealthd_members_hash") for scrape in found.values()}) == 1


@pytest.mark.timeout(200)
def test_eight_nodes(tmp_path: Path) -> None:
    """In 60 epochs of 8 healthy nodes every pair of the schedule meets and nobody is accused; of the half that survives all are paired."""
    with Probing(tmp_path, 8, period=1.5) as lab:
        begun(namespaced(lab))
        names = [node.name for node in lab.nodes]
        begin, met = lab.epoch + 1, Counter[tuple[int, tuple[str, ...]]]()
        end = begin + 60
        while lab.epoch < end + 1:
            lab.until_epoch(lab.epoch + 4)
            found = lab.scrapes()
            assert not any(map(suspects, found.values())), lab.told(found)
            for entry in itertools.chain.from_iterable(map(history, lab.nodes)):
                if entry["outcome"] == "ok" and entry["kind"] == "pair" and entry["epoch"] is not None:
                    met[entry["epoch"], tuple(sorted(entry["members"]))] += 1
        promised = {(epoch, group) for epoch in range(begin, end) for group in groups(names, {}, epoch)}
        assert not promised - met.keys(), f"{sorted(promised - met.keys())} did not meet\n{lab.told()}"

        survivors = lab.nodes[::2]
        lab.until_epoch(lab.epoch + 1)
        for node in lab.nodes[1::2]:
            node.kill()
        epoch = lab.epoch + 1
        lab.until_epoch(epoch + 2)
        for node in survivors:
            partners = [
                set(entry["members"]) - {node.name} for entry in history(node) if entry["epoch"] == epoch and entry["outcome"] == "ok"
            ]
            assert partners, f"{node.name} had no partner in epoch {epoch}: {history(node)}"
            assert set.union(*partners) <= {survivor.name for survivor in survivors}


def test_agent_dead(light: Probing) -> None:
    """A node whose agent is gone is named by all others: it is there and refuses."""
    one, two, *others = light.nodes
    named(light, killed(two), two, {"refused"}, by=(one, *others), epochs=15)


def test_node_dead(calm: Probing) -> None:
    """A node that nobody reaches is named, and told from one that refuses."""
    one, two, *_others = calm.nodes
    named(calm, faults.drop_all(two), two, {"unreachable"}, by=(one,), epochs=30)


def test_refused_by_firewall(light: Probing) -> None:
    """A firewall that answers all TCP of a node with RST makes it a node that refuses."""
    one, two, *others = light.nodes
    named(light, faults.reset(two), two, {"refused"}, by=(one, *others), epochs=15)


@pytest.mark.xfail(strict=True, reason="a node that others cannot call, and that calls them, is well in every other round: nobody says so")
def test_port_refused_by_firewall(light: Probing) -> None:
    """The same where only the port of the peer API is shut, and the node's own calls to others go through."""
    _, two, *_ = light.nodes
    named(light, faults.reset(two, PORT), two, {"refused"}, by=(), epochs=12)


def test_dead_link(calm: Probing) -> None:
    """Two nodes that do not reach each other while others reach both: the link is named by both, and no node."""
    one, two, *_ = calm.nodes
    named(calm, faults.drop(one, two), (one, two), {"unreachable"}, by=(one, two), epochs=25)


def test_link_dead_one_way(calm: Probing) -> None:
    """The same where only one direction is cut."""
    one, two, *_ = calm.nodes
    named(calm, faults.drop_one_way(one, two), (one, two), {"unreachable"}, by=(one, two), epochs=30)


def test_loss(calm: Probing) -> None:
    """A node that loses half of all packets is named, by itself or others; which of its rounds fail, and how, is chance."""
    _, two, *_ = calm.nodes
    named(calm, faults.loss(two, 0.5), two, {"unreachable", "hung", "slow"}, by=(), epochs=30, wrong=6)


def test_agent_stopped(calm: Probing) -> None:
    """A node whose agent is stopped accepts connections and answers nothing: it hangs."""
    one, two, *_others = calm.nodes
    named(calm, faults.pause(two.agent.pid), two, {"hung"}, by=(one,), epochs=25)


def test_other_key(light: Probing) -> None:
    """A node with another key is named as not authorized, by itself and by others."""
    _, two, *_ = light.nodes
    named(light, other_key(two), two, {"unauthorized"}, by=(two,), epochs=20)


def test_other_members(light: Probing) -> None:
    """A node with another list of members accuses nobody and is accused by nobody; all see with whom they disagree, and why."""
    one, two, *others = light.nodes
    with other_members(two):
        found = light.await_(
            lambda s: all(s[node.name].value(DISAGREES, peer="node-2", reason="members_differ") for node in (one, *others)),
            12,
            "disagreement",
        )
        assert len({scrape.value("dshealthd_members_hash") for scrape in found.values()}) == 2
        assert not any(map(suspects, found.values())), light.told(found)
    light.await_(lambda s: not any(scrape.all(DISAGREES) for scrape in s.values()), CLEAR, "agreement")


def test_clock_off(light: Probing) -> None:
    """A node whose clock is off by 288 s is told by name and reason; the others' rounds go on, and nobody is accused."""
    one, two, *others = light.nodes
    with faults.clock_offset(two, 288):
        light.await_(
            lambda s: all(s[node.name].value(DISAGREES, peer="node-2", reason="clock_differs") for node in (one, *others)), 20, "clock"
        )
        before = light.scrapes()
        light.await_(
            lambda s: all(rounds(s[node.name], outcome="ok") >= rounds(before[node.name], outcome="ok") + 2 for node in (one, *others)),
            12,
            "rounds of the others",
        )
        light.await_(lambda s: not any(map(suspects, s.values())), CLEAR, "no suspect, once it is forgotten that it was being restarted")
    light.await_(
        lambda s: len(s) == 4 and not any(scrape.all(DISAGREES) or suspects(scrape) for scrape in s.values()), 2 * CLEAR, "agreement"
    )


def test_slow_node(light: Probing) -> None:
    """A slow node is named by itself, and no link to it by others."""
    begun(light, KNOWN)
    _, two, *_ = light.nodes
    named(light, faults.slow(two, "10mbit"), two, {"slow"}, by=(two,), epochs=15)


def test_slow_pair(light: Probing) -> None:
    """A slow way between two nodes that are well with others is named as the link, by both."""
    begun(light, KNOWN)
    one, two, *_ = light.nodes
    named(light, faults.slow_pair(one, two, "10mbit"), (one, two), {"slow"}, by=(one, two), epochs=25)


def test_slow_collectives(full: Probing) -> None:
    """A slow node shows in the times of its collectives, and is named by itself."""
    begun(full, KNOWN)
    _, two, *_ = full.nodes
    named(full, faults.slow(two, "25mbit"), two, {"slow"}, by=(two,), epochs=25)


def test_wrong_data(full: Probing) -> None:
    """A node whose worker contributes wrong data is named as corrupting it."""
    _, two, *_ = full.nodes
    named(full, sabotage(two, "collective:3:bad_input"), two, {"corrupted"}, by=(two,), epochs=15)


def test_wrong_torch(full: Probing) -> None:
    """A node with another version of torch is named: its rounds fail."""
    _, two, *_ = full.nodes
    named(full, sabotage(two, "versions"), two, {"failed"}, by=(two,), epochs=15)


def test_worker_killed_in_rendezvous(full: Probing) -> None:
    """A node whose workers are killed while they meet the others is named, and nobody who waits for them."""
    _, two, *_ = full.nodes
    named(full, sabotage(two, "stage:init:kill"), two, {"failed"}, by=(two,), epochs=25)


@pytest.mark.timeout(160)
def test_worker_stopped_in_a_collective(full: Probing) -> None:
    """A node whose workers stop in a collective is named as hanging, after as many deadlines as it takes, and nobody who waits for them."""
    _, two, *_ = full.nodes
    named(full, sabotage(two, "collective:3:stop"), two, {"hung"}, by=(two,), epochs=70, clear=20, wrong=4)


def test_busy_gpus(tmp_path: Path) -> None:
    """Where GPUs are busy rounds are light ones, which is said, and these still name a dead link."""
    with Probing(tmp_path, 4, policy="idle", collectors=("gpu_bus", "gpu_processes")) as lab:
        for node in namespaced(lab).nodes:
            node.gpus.set(None, "processes", "4242:1073741824")
        lab.await_(lambda s: len(s) == 4 and all(scrape.all(SKIPS, reason="busy_gpu") for scrape in s.values()), 40, "busy GPUs")
        begun(lab)
        one, two, *_ = lab.nodes
        named(lab, faults.drop(one, two), (one, two), {"unreachable"}, by=(one, two), epochs=25)
        assert not any(scrape.all(ROUNDS, kind="pair", outcome="ok") for scrape in lab.scrapes().values())


@pytest.mark.parametrize("ahead", [0.6, 2.0], ids=["at_once", "before"])
def test_both_start_at_once(tmp_path: Path, ahead: float) -> None:
    """Two members that both begin an epoch's round have one round: in the same moment, or the second before the first, by their clocks."""
    with Probing(tmp_path, 2, period=3.0, full=False) as lab:
        one, two = namespaced(lab).nodes
        with faults.clock_offset(two, ahead):
            begin = lab.epoch + 2
            lab.until_epoch(begin + 5)
            for node in (one, two):
                found = [(entry["epoch"] - begin, entry["outcome"]) for entry in history(node) if entry["epoch"] in range(begin, begin + 4)]
                assert found == [(epoch, "ok") for epoch in range(4)], lab.told()
