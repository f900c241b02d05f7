"""What a node reports of its recent rounds, and whom it calls because of its peers' doubts."""

from __future__ import annotations

import pytest

from dshealthd.probe.observation import Kind
from dshealthd.probe.verdicts.recent_rounds import RecentRounds
from dshealthd.probe.verdicts.signals import HARD, UNTIMED, Measurement, ObservedRound, PeerReport

HIGH = 1.07


def note(
    recent: RecentRounds, epoch: int, *, led: bool, timings: int = 0, ratio: float = 1.0
) -> None:
    """Record an echo of `me` with `peer`, which reports that its own to `me` take fifty times as
    long.
    """
    told = {} if led else {"peer": PeerReport(calls={"me": 50.0})}
    round = ObservedRound(
        epoch, 10.0 * epoch, Kind.LIGHT, ("peer",), near=False, extra=True, led=led, told=told
    )
    bad = ratio > HIGH
    recent.note(round, [Measurement(round, ratio, bad, not bad, "")], timings, epoch)


def test_doubt_is_seconded_until_an_echo_is_timed() -> None:
    """A peer's doubt causes one call in three epochs; a busy peer, or a time that does not count,
    leaves it open.
    """
    recent = RecentRounds("me", HIGH)
    note(recent, 5, led=False)
    assert recent.doubts(5) == ["peer"]
    recent.second("peer", 5)
    assert recent.doubts(5) == []
    recent.declined("peer", 5)
    assert recent.doubts(5) == ["peer"]
    recent.second("peer", 5)
    note(recent, 5, led=True)
    assert recent.told(5) == ({"peer": 1.0}, {"peer": UNTIMED})
    note(recent, 8, led=False)
    assert recent.doubts(8) == ["peer"]
    note(recent, 8, led=True, timings=2, ratio=40.0)
    assert recent.doubts(8) == []
    note(recent, 9, led=True)
    assert recent.told(9)[1] == {"peer": 40.0}  # a time that did not count changes nothing


def asked(
    recent: RecentRounds, calls: dict[str, float], *, kind: Kind = Kind.LIGHT, extra: bool = True
) -> list[str]:
    """Return whom this node should call after a round in which `peer` reports its `calls`."""
    told = {"peer": PeerReport(calls=calls)}
    round = ObservedRound(5, 50.0, kind, ("peer",), near=False, extra=extra, led=False, told=told)
    recent.note(round, [Measurement(round, 1.0, bad=False, good=True, reason="")], 0, 5)
    return recent.doubts(5)


def test_witness_calls_whom_another_cannot_call() -> None:
    """A node that is asked as a witness calls the unreachable member, unless it has done so in this
    epoch: an earlier answer may be older than the fault.
    """
    silent = {"other": HARD, "third": 1.0}
    assert asked(RecentRounds("me", HIGH), silent) == ["other"]
    knows = RecentRounds("me", HIGH)
    knows.declined("other", 5)
    assert knows.told(5)[1] == {"other": UNTIMED}  # it has answered
    assert asked(knows, silent) == []
    knew = RecentRounds("me", HIGH)
    knew.declined("other", 4)
    assert asked(knew, silent) == ["other"]
    assert asked(RecentRounds("me", HIGH), {"one": HARD, "two": HARD}) == ["one", "two"]


@pytest.mark.parametrize(
    ("calls", "kind", "extra"),
    [
        ({"other": HARD}, Kind.LIGHT, False),  # a scheduled round, which asks for nothing
        ({"other": HARD}, Kind.PAIR, True),  # a collective that failed
        # Its own fault, or a lie.
        ({"one": HARD, "two": HARD, "three": HARD}, Kind.LIGHT, True),
        ({"me": HARD}, Kind.LIGHT, True),
        ({"other": 50.0}, Kind.LIGHT, True),
    ],
)
def test_what_is_no_reason_to_call(calls: dict[str, float], kind: Kind, *, extra: bool) -> None:
    """A node calls nobody outside the schedule if a report does not single out one or two others, or
    an echo would show nothing.
    """
    assert asked(RecentRounds("me", HIGH), calls, kind=kind, extra=extra) == []


def test_names_of_no_members_do_not_pile_up() -> None:
    """Of all names in peers' reports, only those of the last epochs are kept."""
    recent = RecentRounds("me", HIGH)
    for epoch in range(100):
        told = {"peer": PeerReport(calls={f"name-{epoch}": HARD})}
        round = ObservedRound(
            epoch, 0.0, Kind.LIGHT, ("peer",), near=False, extra=True, led=False, told=told
        )
        recent.note(round, [Measurement(round, 1.0, bad=False, good=True, reason="")], 0, epoch)
    assert recent.doubts(99) == ["name-98", "name-99"]
