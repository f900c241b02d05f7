"""What a node tells of its recent rounds, and the echoes that it times for its peers' doubts."""

from __future__ import annotations

from dshealthd.probe.observation import Kind
from dshealthd.probe.verdicts.recent_rounds import RecentRounds
from dshealthd.probe.verdicts.signals import UNTIMED, Measurement, ObservedRound, PeerReport

HIGH = 1.07


def note(
    recent: RecentRounds, epoch: int, *, led: bool, timings: int = 0, ratio: float = 1.0
) -> None:
    """Note an echo of `me` with `peer`, which says that its own to `me` take fifty times as long."""
    told = {} if led else {"peer": PeerReport(calls={"me": 50.0})}
    round = ObservedRound(
        epoch, 10.0 * epoch, Kind.LIGHT, ("peer",), near=False, extra=True, led=led, told=told
    )
    bad = ratio > HIGH
    recent.note(round, [Measurement(round, ratio, bad, not bad, "")], timings, epoch)


def test_doubt_is_seconded_until_an_echo_is_timed() -> None:
    """A peer's doubt is answered once in three epochs; a busy peer, or a time that does not count,
    leaves it open.
    """
    recent = RecentRounds("me", HIGH)
    note(recent, 5, led=False)
    assert recent.doubts(5) == ["peer"]
    recent.second("peer", 5)
    assert recent.doubts(5) == []
    recent.declined("peer")
    assert recent.doubts(5) == ["peer"]
    recent.second("peer", 5)
    note(recent, 5, led=True)
    assert recent.told(5) == ({"peer": 1.0}, {"peer": UNTIMED})
    note(recent, 8, led=False)
    assert recent.doubts(8) == ["peer"]
    note(recent, 8, led=True, timings=2, ratio=40.0)
    assert recent.doubts(8) == []
    note(recent, 9, led=True)
    assert recent.told(9)[1] == {"peer": 40.0}  # a time that did not count says nothing else
