"""This node's recent rounds with each peer, as it tells its peers of them.

And the peers that it is to call itself: those that find their echoes to this node slow, and those
that another cannot call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.probe.observation import Kind
from dshealthd.probe.verdicts.signals import HARD, UNTIMED

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dshealthd.probe.verdicts.signals import Measurement, ObservedRound

_MOST = 6
"""Pairs that are told to peers, if they are of this epoch or the last one."""
_ECHO_TIMES = 2
"""Times of an echo: empty, and with a payload."""
_SECONDED = 3
"""Epochs between two echoes that a peer's slow ones make this node time."""


class RecentRounds:
    """The last rounds of one node with others."""

    def __init__(self, me: str, high: float) -> None:
        """`high` is the ratio from which on a round that peers tell of counts as slow."""
        self._me = me
        self._high = high
        self._pairs: dict[str, tuple[int, float]] = {}
        """The epoch and the ratio of the last round with each."""
        self._calls: dict[str, tuple[int, float]] = {}
        """The same of those that this node led."""
        self._doubts: dict[str, int] = {}
        """Peers whose echoes to this node are slow, by what they say, or that do not answer another
        that asks, and the epoch of that.
        """
        self._seconded: dict[str, int] = {}
        """The epoch in which this node called a peer for that."""

    def keep(self, names: Iterable[str]) -> None:
        """Forget the doubts of nodes that are no members."""
        for store in (self._doubts, self._seconded):
            for peer in store.keys() - names:
                del store[peer]

    def note(
        self, round: ObservedRound, measurements: Sequence[Measurement], timings: int, epoch: int
    ) -> None:
        """Note a round with one peer; `timings` of its measurements are times."""
        (peer,) = round.peers
        ratio = _ratio(round, measurements)
        _put(self._pairs, peer, epoch, ratio)
        if not round.led:
            self._note_doubt(round, peer, epoch)
            self._note_silence(round, peer, epoch)
        elif ratio > 1 or round.kind is not Kind.LIGHT or timings == _ECHO_TIMES:
            _put(self._calls, peer, epoch, ratio)
            self._doubts.pop(peer, None)
        elif not self._is_timed(peer, epoch):
            _put(self._calls, peer, epoch, UNTIMED)

    def _is_timed(self, peer: str, epoch: int) -> bool:
        """Tell whether peers are still told a time of an echo to a peer."""
        since, ratio = self._calls.get(peer, (-1, UNTIMED))
        return UNTIMED < ratio < HARD and 0 <= epoch - since <= 1

    def _note_doubt(self, round: ObservedRound, peer: str, epoch: int) -> None:
        """Note where a peer says that its echoes to this node are slow.

        Of an echo only the leader knows the time, and a link is accused where both ends find it
        slow.
        """
        word = round.told.get(peer)
        if (
            round.kind is Kind.LIGHT
            and word is not None
            and self._high <= word.calls.get(self._me, UNTIMED) < HARD
            and not self._is_timed(peer, epoch)
        ):
            self._doubts[peer] = epoch

    def _note_silence(self, round: ObservedRound, peer: str, epoch: int) -> None:
        """Note whom a peer could not call that asks this node out of turn, as a witness.

        Who may call whom is for the schedule to draw: a node that nobody else calls for some epochs
        could be down, or only the way from one node to it. Who fails with several is at fault
        itself, or a liar that would use up this node's rounds. That an agent answers says nothing
        where it is a collective that failed: who asks for that does so by one.
        """
        word = round.told.get(peer)
        silent = [name for name, ratio in word.calls.items() if ratio >= HARD] if word else []
        if not (round.unasked and round.kind is Kind.LIGHT and len(silent) == 1):
            return
        (name,) = silent
        since, _ = self._calls.get(name, (-1, UNTIMED))
        if name != self._me and not 0 <= epoch - since <= 1:
            # Names are what a peer says, and need not be those of members.
            self._doubts = {
                doubted: at for doubted, at in self._doubts.items() if 0 <= epoch - at <= 1
            }
            self._doubts[name] = epoch

    def doubts(self, epoch: int) -> list[str]:
        """Return the peers that this node is to call now, for what they or others say."""
        return [
            peer
            for peer, since in self._doubts.items()
            if 0 <= epoch - since <= 1
            and not (peer in self._seconded and 0 <= epoch - self._seconded[peer] < _SECONDED)
        ]

    def second(self, peer: str, epoch: int) -> None:
        """Note that a peer is called for a doubt."""
        self._seconded[peer] = epoch

    def declined(self, peer: str, epoch: int) -> None:
        """Note that a peer was busy, and so has answered a call.

        If an echo was to be timed for a doubt, that is still to do.
        """
        self._seconded.pop(peer, None)
        if not self._is_timed(peer, epoch):
            _put(self._calls, peer, epoch, UNTIMED)

    def told(self, epoch: int) -> tuple[dict[str, float], dict[str, float]]:
        """Return the ratios of the recent rounds by peer, and of those that this node led."""
        pairs, calls = (
            {peer: ratio for peer, (since, ratio) in store.items() if since >= epoch - 1}
            for store in (self._pairs, self._calls)
        )
        return pairs, calls


def _ratio(round: ObservedRound, measurements: Sequence[Measurement]) -> float:
    """Return what peers are told of a round.

    The worst where any measurement is bad: they ask whether this pair has a fault.
    """
    if bad := [measurement.ratio for measurement in measurements if measurement.bad]:
        return max(bad)
    if round.kind is Kind.LIGHT:
        # An echo that takes a tenth longer than usual is well; peers compare what they are told
        # with what a collective may differ.
        return 1.0
    # The highest of many good timings is high by chance.
    return sorted(measurement.ratio for measurement in measurements)[len(measurements) // 2]


def _put(store: dict[str, tuple[int, float]], peer: str, epoch: int, ratio: float) -> None:
    # A dict keeps the position of a key that is set again, and the pair met longest ago is the one
    # to drop.
    store.pop(peer, None)
    store[peer] = epoch, ratio
    if len(store) > _MOST:
        del store[next(iter(store))]
