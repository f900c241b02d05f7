"""Reports of others on a member, and what they count for."""

from __future__ import annotations

import pytest

from dshealthd.probe.members.schedule import ERA, MEMBERS, Timetable
from dshealthd.probe.observation import Kind, Part, Suspect
from dshealthd.probe.verdicts.explanation import Surroundings
from dshealthd.probe.verdicts.links import Links
from dshealthd.probe.verdicts.peer_history import PeerHistory
from dshealthd.probe.verdicts.signals import (
    HARD,
    RUN,
    UNTIMED,
    Measurement,
    ObservedRound,
    PeerReport,
    PeerSuspicion,
    SignalHistory,
)


def history() -> PeerHistory:
    """Return the history of four members."""
    return PeerHistory("me", dict.fromkeys(("me", "peer", "witness", "other"), ""))


def test_answer_alone_says_nothing_of_collectives() -> None:
    """A member's answer to a witness counts for its reachability, but not for a collective that
    failed; the lack of an answer counts for both.
    """
    known = history()
    known.heard("witness", 100.0, 10, PeerReport(calls={"peer": UNTIMED}))
    assert known.opinions("peer", 50.0, 5, (), calls=True) == [UNTIMED]
    assert known.opinions("peer", 50.0, 5, (), calls=True, timed=True) == []
    known.heard("other", 100.0, 10, PeerReport(calls={"peer": HARD}))
    assert known.opinions("peer", 50.0, 5, (), calls=True, timed=True) == [HARD]


def test_who_refuses_calls_is_no_witness() -> None:
    """A member that does not answer, but calls others itself, says nothing about third ones."""
    known = history()
    known.heard("witness", 100.0, 10, PeerReport(calls={"peer": HARD}))
    known.heard("other", 100.0, 10, PeerReport(calls={"peer": HARD}))
    assert known.opinions("peer", 50.0, 5, {"witness"}, calls=True) == [HARD]


@pytest.mark.parametrize(
    ("others", "silent", "needed"),
    [
        *((1, 1, 1), (2, 1, 1)),  # nobody else, or a single witness
        *((3, 1, 2), (3, 2, 1), (4, 1, 2), (4, 2, 2)),  # one may lie
        *((5, 1, 3), (5, 3, 2), (31, 1, 3), (31, 3, 3)),  # two may
        *((5, 4, 1), (31, 4, 1)),  # more are silent than may lie
    ],
)
def test_more_witnesses_are_needed_than_may_lie(others: int, silent: int, needed: int) -> None:
    """A member is gone only if more others than may lie cannot call it, unless fewer are left."""
    around = Surroundings("me", 0, others, 1.1, 3, known_leaf=False)
    assert around.witnesses([f"silent-{number}" for number in range(silent)]) == needed


def test_the_only_witness_of_a_hung_collective_is_enough() -> None:
    """Of three members, one hangs in a collective and is silent from then on, but no call to it has
    failed: the third is the only one that can know, and the silent one is no witness of itself.
    """
    known = PeerHistory("me", dict.fromkeys(("me", "peer", "witness"), ""))
    known.heard("witness", 100.0, 10, PeerReport(calls={"peer": HARD}))
    round = ObservedRound(5, 50.0, Kind.PAIR, "peer", near=False, extra=False, led=True, told=None)
    bad = Measurement(round, HARD, bad=True, good=False, reason="hung")
    history, links = SignalHistory(RUN), Links(known, high=1.1, confirmations=3, hold=12)
    history.pairs["peer"] = PeerSuspicion("peer", bad, 10, bad, bad, HARD, bads=2)
    links.review(history, 10, Surroundings("me", 0, 2, 1.1, 3, known_leaf=False), set())
    assert links.suspects() == [Suspect(Part.NODE, "peer", "hung")]


def test_who_could_not_be_called_by_others() -> None:
    """Another member's failed call is remembered, even after a good one, until the called node
    leaves the members. A slow call does not count as failed, and neither does one to this node.
    """
    known = history()
    known.heard("witness", 100.0, 10, PeerReport(calls={"peer": HARD, "other": 50.0, "x": HARD}))
    known.heard("witness", 110.0, 11, PeerReport(calls={"peer": 1.0}))
    assert known.uncalled("peer", 10)
    assert not known.uncalled("peer", 11)  # it was before
    assert not known.uncalled("other", 0)
    assert not known.uncalled("x", 0)
    known.take_members(dict.fromkeys(("me", "witness", "other"), ""))
    assert not known.uncalled("peer", 0)


def test_whom_others_find_slow() -> None:
    """Another member's slow call is remembered for some epochs, or until that member reports a good
    one. A failed or untimed call does not count, and neither does one to this node or by the called
    member.
    """
    known = history()
    known.heard("witness", 100.0, 10, PeerReport(calls={"peer": 20.0, "other": HARD, "me": 20.0}))
    assert known.slow_for_others("peer", 3.0, 10)
    assert known.slow_for_others("peer", 3.0, 14)
    assert not known.slow_for_others("peer", 3.0, 15)
    assert not known.slow_for_others("peer", 30.0, 10)  # slower than usual, not as slow as that
    assert not known.slow_for_others("other", 3.0, 10)
    assert not known.slow_for_others("me", 3.0, 10)
    known.heard("witness", 110.0, 11, PeerReport(calls={"peer": UNTIMED}))
    assert known.slow_for_others("peer", 3.0, 11)
    known.heard("witness", 120.0, 12, PeerReport(calls={"peer": 1.0}))
    assert not known.slow_for_others("peer", 3.0, 12)
    known.heard("witness", 130.0, 13, PeerReport(calls={"peer": 20.0}))
    known.take_members(dict.fromkeys(("me", "witness", "other"), ""))
    assert not known.slow_for_others("peer", 3.0, 13)


def test_what_is_kept_does_not_grow_with_the_fleet() -> None:
    """Among 10,000 members, a node keeps what it knows of those that it meets in an era, and drops
    it when the next begins; a member met besides, as one of a hung job is, counts until then.
    """
    leaves = {f"n{number:05}": f"leaf-{number // 32:03}" for number in range(10_000)}
    known = PeerHistory("n00000", leaves)
    timetable = Timetable(leaves, leaves)
    stranger = next(name for name in leaves if name not in timetable.company("n00000", 2 * ERA))
    met = set()
    for epoch in range(2 * ERA + 1):
        known.turn_to(epoch)
        for name in timetable.group_of("n00000", epoch):
            known.met(name, float(epoch), well=True)
            known.heard(name, float(epoch), epoch, PeerReport(calls={name: 1.0, "n00000": 1.0}))
            met.add(name)
        assert len(known.leaves) <= MEMBERS
        assert len(known._said) <= MEMBERS
        assert len(known._met) <= MEMBERS
        assert len(known._called_by) <= MEMBERS
    assert len(met) > 1.5 * len(known.leaves)
    assert known.intra_leaf == 31
    assert known.inter_leaf == len(known.leaves) - 32
    assert not known.turn_to(2 * ERA)
    known.admit(stranger)
    known.admit("nobody")
    assert known.leaves[stranger] == leaves[stranger]
    assert "nobody" not in known.leaves
    assert known.turn_to(3 * ERA)
    assert stranger not in known.leaves or stranger in timetable.company("n00000", 3 * ERA)
