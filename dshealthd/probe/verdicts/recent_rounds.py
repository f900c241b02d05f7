"""This node's recent rounds with each peer, as it reports them to its peers.

Also the doubted peers, which this node should call itself: those that find their echoes to this
node slow, and those that another member cannot call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.probe.observation import Kind
from dshealthd.probe.verdicts.signals import HARD, UNTIMED

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dshealthd.probe.verdicts.signals import Measurement, ObservedRound

_MOST = 6
"""Maximum pairs reported to peers; only those of this epoch or the last one are."""
_ECHO_TIMES = 2
"""Timings of a light round: an empty echo, and one with a payload."""
_SILENT = 2
"""Members that do not answer a peer beyond which they are not called on its behalf."""
_SECONDED = 3
"""Minimum epochs between two calls of this node to a doubted peer."""


class RecentRounds:
    """The last rounds of one node with others."""

    def __init__(self, me: str, high: float) -> None:
        """`high` is the ratio from which a round reported by a peer counts as slow."""
        self._me = me
        self._high = high
        self._pairs: dict[str, tuple[int, float]] = {}
        """Epoch and ratio of the last round with each peer."""
        self._calls: dict[str, tuple[int, float]] = {}
        """The same for rounds that this node led."""
        self._doubts: dict[str, int] = {}
        """Doubted peers, and the epoch of the report that raised the doubt. A peer reports its own
        echoes to this node as slow, or another member reports that a peer does not answer.
        """
        self._seconded: dict[str, int] = {}
        """The epoch in which this node called a peer because of a doubt."""

    def keep(self, names: Iterable[str]) -> None:
        """Forget the doubts about nodes that are not in `names`."""
        for store in (self._doubts, self._seconded):
            for peer in store.keys() - names:
                del store[peer]

    def note(
        self, round: ObservedRound, measurements: Sequence[Measurement], timings: int, epoch: int
    ) -> None:
        """Record a round with one peer; `timings` is how many of its measurements are timings."""
        peer, ratio = round.peer, _ratio(round, measurements)
        _put(self._pairs, peer, epoch, ratio)
        if not round.led:
            self._note_doubt(round, epoch)
            self._note_silence(round, epoch)
        elif ratio > 1 or round.kind is not Kind.LIGHT or timings == _ECHO_TIMES:
            _put(self._calls, peer, epoch, ratio)
            self._doubts.pop(peer, None)
        elif not self._is_timed(peer, epoch):
            _put(self._calls, peer, epoch, UNTIMED)

    def _is_timed(self, peer: str, epoch: int) -> bool:
        """Return whether this node still reports a timing of its own echo to a peer."""
        since, ratio = self._calls.get(peer, (-1, UNTIMED))
        return UNTIMED < ratio < HARD and 0 <= epoch - since <= 1

    def _note_doubt(self, round: ObservedRound, epoch: int) -> None:
        """Note a doubt if a peer reports that its echoes to this node are slow. Only the leader of
        an echo knows its time, and a link is accused only if both ends find it slow, so this node
        has to time one itself.
        """
        if (
            round.kind is Kind.LIGHT
            and round.told is not None
            and self._high <= round.told.calls.get(self._me, UNTIMED) < HARD
            and not self._is_timed(round.peer, epoch)
        ):
            self._doubts[round.peer] = epoch

    def _note_silence(self, round: ObservedRound, epoch: int) -> None:
        """Note a doubt about the member that a peer could not call, if it asks for a witness.

        It asks by an echo outside the schedule. The schedule alone decides who calls whom, and
        nobody else may call that member for some epochs: it could be down, or only the path from
        one node to it. A peer that fails with many members is at fault itself, or lies to use up
        this node's rounds. If a collective failed, an answered echo shows nothing: the peer then
        asks by a collective.
        """
        calls = round.told.calls if round.told is not None else {}
        silent = [name for name, ratio in calls.items() if ratio >= HARD]
        if not (round.unasked and round.kind is Kind.LIGHT and 0 < len(silent) <= _SILENT):
            return
        # Old doubts are dropped, as a peer may send any names, not just those of members.
        self._doubts = {name: at for name, at in self._doubts.items() if 0 <= epoch - at <= 1}
        for name in silent:
            since, _ = self._calls.get(name, (-1, UNTIMED))
            if name != self._me and since != epoch:
                self._doubts[name] = epoch

    def doubts(self, epoch: int) -> list[str]:
        """Return the peers that this node should call now because of a doubt."""
        return [
            peer
            for peer, since in self._doubts.items()
            if 0 <= epoch - since <= 1
            and not (peer in self._seconded and 0 <= epoch - self._seconded[peer] < _SECONDED)
        ]

    def second(self, peer: str, epoch: int) -> None:
        """Note that this node calls a peer because of a doubt."""
        self._seconded[peer] = epoch

    def declined(self, peer: str, epoch: int) -> None:
        """Note that a peer declined a call, and so has answered it. An echo that should have been
        timed because of a doubt is still due.
        """
        self._seconded.pop(peer, None)
        if not self._is_timed(peer, epoch):
            _put(self._calls, peer, epoch, UNTIMED)

    def told(self, epoch: int) -> tuple[dict[str, float], dict[str, float]]:
        """Return the ratios to report by peer, of recent rounds and of those that this node led."""
        pairs, calls = (
            {peer: ratio for peer, (since, ratio) in store.items() if since >= epoch - 1}
            for store in (self._pairs, self._calls)
        )
        return pairs, calls


def _ratio(round: ObservedRound, measurements: Sequence[Measurement]) -> float:
    """Return the ratio of a round to report to peers. The worst if any measurement is bad, as peers
    want to know whether this pair has a fault.
    """
    if bad := [measurement.ratio for measurement in measurements if measurement.bad]:
        return max(bad)
    if round.kind is Kind.LIGHT:
        # An echo that takes a tenth longer than usual is fine, but peers judge the ratio by the
        # tolerance of collectives.
        return 1.0
    # The highest of many good timings is high by chance, so the median counts.
    return sorted(measurement.ratio for measurement in measurements)[len(measurements) // 2]


def _put(store: dict[str, tuple[int, float]], peer: str, epoch: int, ratio: float) -> None:
    # A dict keeps the position of a key that is set again, but the first key must be the pair met
    # longest ago, which is dropped.
    store.pop(peer, None)
    store[peer] = epoch, ratio
    if len(store) > _MOST:
        del store[next(iter(store))]
