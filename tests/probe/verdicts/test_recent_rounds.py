"""What a node reports of its recent rounds, and whom it calls because of its peers' doubts."""

from __future__ import annotations

import pytest

from dshealthd.probe.observation import Kind
from dshealthd.probe.verdicts.recent_rounds import RecentRounds
from dshealthd.probe.verdicts.signals import HARD, UNTIMED, Measurement, ObservedRound, PeerReport

HIGH = 1.07


def note(
    recent: RecentRounds,
    epoch: int,
    *,
    led: bool = False,
    calls: dict[str, float] | None = None,
    timings: int = 0,
    ratio: float = 1.0,
    kind: Kind = Kind.LIGHT,
    extra: bool = True,
) -> list[str]:
    """Record a round of `me` with `peer`, which reports its own calls, by default one to `me` that
    takes fifty times as long; return whom this node should call then.
    """
    told = None if led else PeerReport(calls=calls or {"me": 50.0})
    at = 10.0 * epoch
    round = ObservedRound(epoch, at, kind, "peer", near=False, extra=extra, led=led, told=told)
    bad = ratio > HIGH
    recent.note(round, [Measurement(round, ratio, bad, not bad, "")], timings, epoch)
    return recent.doubts(epoch)


def test_doubt_is_seconded_until_an_echo_is_timed() -> None:
    """A doubt causes one call in three epochs, and is left open without a time."""
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


def test_witness_calls_whom_another_cannot_call() -> None:
    """A node that is asked as a witness calls the unreachable member, unless it has done so in this
    epoch: an earlier answer may be older than the fault.
    """
    silent = {"other": HARD, "third": 1.0}
    assert note(RecentRounds("me", HIGH), 5, calls=silent) == ["other"]
    knows = RecentRounds("me", HIGH)
    knows.declined("other", 5)
    assert knows.told(5)[1] == {"other": UNTIMED}  # it has answered
    assert note(knows, 5, calls=silent) == []
    knew = RecentRounds("me", HIGH)
    knew.declined("other", 4)
    assert note(knew, 5, calls=silent) == ["other"]
    assert note(RecentRounds("me", HIGH), 5, calls={"one": HARD, "two": HARD}) == ["one", "two"]


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
    """A node calls nobody outside the schedule if a report does not single out one or two others,
    or an echo would show nothing.
    """
    assert note(RecentRounds("me", HIGH), 5, calls=calls, kind=kind, extra=extra) == []


def test_names_of_no_members_do_not_pile_up() -> None:
    """Of all names in peers' reports, only those of the last epochs are kept."""
    recent = RecentRounds("me", HIGH)
    for epoch in range(100):
        note(recent, epoch, calls={f"name-{epoch}": HARD})
    assert recent.doubts(99) == ["name-98", "name-99"]
