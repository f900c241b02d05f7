"""Links to peers with which rounds go badly: when to accuse one of being slow or broken.

The accused is the link, or the peer itself if it cannot report for itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.probe.observation import Kind, Part, Suspect
from dshealthd.probe.verdicts.accusation import AMBIGUOUS
from dshealthd.probe.verdicts.peer_history import unanswered
from dshealthd.probe.verdicts.signals import FAR_BELOW, HARD, REACH

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from dshealthd.probe.verdicts.explanation import Surroundings
    from dshealthd.probe.verdicts.peer_history import PeerHistory
    from dshealthd.probe.verdicts.signals import PeerSuspicion, SignalHistory

SLOW = "slow"
HARD_BADS = 2
"""Failed rounds with a peer before others are consulted: the first one and a retry."""
_CUT_BADS = 5
"""Failed calls after which the path between two agents counts as cut, if both reach others. A node
that loses half of its packets fails this often in a row with one peer in 1 of 16 cases. Both ends
count the calls of both, so the path is retried while others are being consulted.
"""
_FLAPPING_BADS = 8
"""The same if good calls came between the failed ones. A cut path lets no call through; if some get
through, the path flaps or a node loses packets.
"""
_OTHERS = 3
"""Minimum good rounds with others before this node blames the path."""
_OTHERS_RATIO = 4
"""Minimum good rounds with others for each bad one: otherwise this node may be losing packets."""
SLOW_MORE = 2
"""Flagged rounds that a slow link needs on top of `confirmations`. It needs more because a
suspicion of a link starts with a single flagged round.
"""
_MOST = 12
"""Flagged rounds of a pair after which it is called ambiguous if its ends do not agree. It is
called so only after a wait since the first of them, by the following constants.
"""
_EPOCHS = 2
"""The wait in epochs for others' reports, which do not come between extra rounds."""
_DISPUTES = 3
"""Epochs in which the other end must disagree for this short wait to apply to a slow pair. A single
one may be chance: one of its rounds with others took longer.
"""
_UNTOLD = 12
"""The wait while the other end has not yet timed this pair and others: two minutes of 10 s epochs.
It times an echo only in rounds that it leads, and meets others only between the extra rounds.
"""
_STARVED = 30
"""The wait if the other end has tried to time an echo, but an agent waited for a CPU. Also the wait
if others' echoes to the peer are slow too.
"""
_UNHEARD = 4
"""The wait for any report about the peer; with packet loss it takes longer until one arrives."""
_DOUBTED = 16
"""The wait if the peer reported that a round with another member failed too. If the peer cannot be
reached, that report may be older than the fault; it expires within the wait.
"""
_HEARINGS = 4
"""Witnesses to consult; a peer on which so many settle nothing is called ambiguous, not dead."""
_STALE = 6
"""Epochs without a round after which a suspicion of a peer is dropped."""
_LEAF_GONE = 3
"""Members of a leaf that must be gone, with none of it well, to accuse the leaf."""


class Links:
    """This node's conclusions on its links, and on nodes that cannot report for themselves."""

    def __init__(
        self, peer_history: PeerHistory, *, high: float, confirmations: int, hold: int
    ) -> None:
        """`high` is the ratio from which a round counts as slow. `hold` is the number of epochs for
        which a node stays accused without new evidence.
        """
        self._peer_history = peer_history
        self._high = high
        self._enough = confirmations + SLOW_MORE
        self._hold = hold
        self._gone: dict[str, tuple[Suspect, int]] = {}
        """Accused nodes: the accusation, and the epoch of the last evidence."""
        self._back: set[str] = set()

    @property
    def gone(self) -> frozenset[str]:
        """Nodes that are accused of being gone."""
        return frozenset(self._gone)

    @property
    def back(self) -> frozenset[str]:
        """Accused nodes that have called since this node last failed to call them."""
        return frozenset(self._back)

    def suspects(self) -> list[Suspect]:
        """Return the accusations of nodes that are gone, or of their leaves."""
        return [suspect for suspect, _ in self._gone.values()]

    def keep(self, names: Iterable[str]) -> None:
        """Forget nodes that are not in `names`."""
        self._gone = {name: self._gone[name] for name in names if name in self._gone}
        self._back &= self._gone.keys()

    def met(self, name: str, epoch: int, *, well: bool, led: bool) -> None:
        """Withdraw the accusation of a node that has answered a call. If the node itself called,
        whether it can be called is still to be verified. A failed call of this node renews the
        accusation.
        """
        if name not in self._gone:
            return
        if well and not led:
            self._back.add(name)
            return
        self._back.discard(name)
        if well:
            del self._gone[name]
        elif led:
            self._gone[name] = self._gone[name][0], epoch

    def expire(self, epoch: int) -> None:
        """Drop accusations that are too old; members that meet the node now will judge it anew."""
        self._gone = {
            name: (suspect, since)
            for name, (suspect, since) in self._gone.items()
            if 0 <= epoch - since <= self._hold
        }
        self._back &= self._gone.keys()

    def review(
        self, history: SignalHistory, epoch: int, around: Surroundings, silent: Collection[str]
    ) -> None:
        """Decide on a signal's suspected pairs, and drop those without recent rounds. `silent` are
        the members that do not answer this node. Their reports on others do not count: whoever
        refuses calls and makes some could have fewer witnesses suffice.
        """
        for peer, pair in list(history.pairs.items()):
            if history.track.timed and pair.accused and pair.reason == AMBIGUOUS:
                self._weigh(history, pair, epoch)  # the other end may have reported more by now
            if pair.accused:
                continue
            if not 0 <= epoch - pair.touched <= _STALE:
                del history.pairs[peer]
            elif history.track.timed:
                self._weigh(history, pair, epoch)
            elif pair.bads >= HARD_BADS and epoch != pair.first.round.epoch:
                # In the epoch of the first bad round, others' reports may predate the fault.
                self._hear(history, pair, epoch, around, silent)

    def _weigh(self, history: SignalHistory, pair: PeerSuspicion, epoch: int) -> None:
        """Accuse the link of a slow pair if both ends are well with others and find the pair slow.
        If they keep disagreeing, accuse it as ambiguous.
        """
        if pair.bads < self._enough or not mostly_well(pair):
            return
        # Only the leader of an echo knows its time; the other end knows only that it answered.
        echo = history.track.family == Kind.LIGHT.value
        opinion = self._peer_history.opinion(pair.peer, calls=echo)
        agrees = (
            self._peer_history.timed_slow(pair.peer, self._high, epoch)
            if echo
            else opinion is not None and opinion >= self._high
        )
        least = pair.least if opinion is None else min(pair.least, opinion)
        high = max(self._high, least / FAR_BELOW)
        slow = echo and self._peer_history.slow_for_others(pair.peer, high, epoch)
        if agrees and not slow and self._peer_history.verified_by_peers(pair.peer, high):
            pair.accuse(SLOW)
            return
        if slow:  # the peer will find that out itself, once it has led rounds
            wait = _STARVED
        elif opinion is not None and self._peer_history.tells_of_others(pair.peer):
            pair.dispute(epoch)
            wait = _EPOCHS if pair.disputes >= _DISPUTES else _UNTOLD
        else:
            wait = _STARVED if self._peer_history.starves(pair.peer, epoch) else _UNTOLD
        if pair.bads >= _MOST and epoch > pair.first.round.epoch + wait:
            pair.accuse(AMBIGUOUS)

    def _hear(
        self,
        history: SignalHistory,
        pair: PeerSuspicion,
        epoch: int,
        around: Surroundings,
        silent: Collection[str],
    ) -> None:
        """Distinguish a dead peer from a broken link, by the reports of the peer and of others."""
        if pair.since is None:
            return
        since, began = pair.since.round.at, pair.since.round.epoch
        reason = pair.newest.reason
        speaks = self._peer_history.spoke(pair.peer, since)
        if speaks and not (history.track == REACH and pair.first.round.led):
            if mostly_well(pair) and self._peer_history.verified_by_peers(pair.peer, HARD):
                pair.accuse(reason)
            elif pair.bads >= _MOST and epoch > pair.first.round.epoch + _EPOCHS:
                pair.accuse(AMBIGUOUS)
            return
        # A peer that calls others may still be one that nobody can call, so others' own calls to it
        # count first. A peer that has long been silent does not call anybody: then any round of
        # others with it counts.
        known = self._peer_history.opinions(
            pair.peer, since, began, silent, calls=True, timed=history.track != REACH
        )
        if not known and not speaks and (history.track != REACH or epoch > began + _EPOCHS):
            known = self._peer_history.opinions(pair.peer, since, began, silent)
        gone = bool(known) and unanswered(known)
        if gone and len(known) >= around.witnesses({*silent, pair.peer}):
            del history.pairs[pair.peer]
            self._accuse(pair.peer, reason, since, epoch)
        elif known and not gone and (history.track != REACH or self._is_link(pair, known, epoch)):
            pair.accuse(reason)
        elif pair.hearings >= _HEARINGS and epoch > began + (
            _DOUBTED if gone or self._peer_history.fails_with_others(pair.peer, epoch) else _UNHEARD
        ):
            pair.accuse(AMBIGUOUS)

    def _is_link(self, pair: PeerSuspicion, known: Iterable[float], epoch: int) -> bool:
        """Return whether calls fail between two ends that both reach others. If one end fails with
        others too, that end loses packets, and finds that out itself by its outages or an
        investigation. `known` has the ratios that others report for the peer.
        """
        return (
            calls_missing(pair) == 0
            and pair.well >= max(_OTHERS, _OTHERS_RATIO * pair.ill)
            and all(ratio < HARD for ratio in known)
            and not self._peer_history.fails_with_others(pair.peer, epoch)
            and not (pair.since and self._peer_history.uncalled(pair.peer, pair.since.round.epoch))
        )

    def _accuse(self, name: str, reason: str, since: float, epoch: int) -> None:
        """Accuse a node that others do not reach either, or its leaf if several are gone."""
        self._gone[name] = Suspect(Part.NODE, name, reason), epoch
        self._back.discard(name)
        leaf = self._peer_history.leaves.get(name, "")
        gone = [other for other in self._gone if self._peer_history.leaves.get(other) == leaf]
        if (
            leaf
            # If its own leaf were gone, this node would be cut off itself and could not know.
            and leaf != self._peer_history.leaf
            and len(gone) >= _LEAF_GONE
            and not self._peer_history.well(leaf, since)
        ):
            for other in gone:
                self._gone[other] = Suspect(Part.LEAF, leaf, reason), self._gone[other][1]


def accused_links(me: str, every: Iterable[SignalHistory]) -> Iterator[Suspect]:
    """Yield the accused links, which have the same name at both ends."""
    for history in every:
        for pair in history.pairs.values():
            if pair.accused:
                yield link(me, pair.peer, pair.reason)


def link(one: str, other: str, reason: str) -> Suspect:
    """Return the accusation of the link between two nodes."""
    return Suspect(Part.LINK, "--".join(sorted((one, other))), reason)


def calls_missing(pair: PeerSuspicion) -> int:
    """Return how many more failed calls are needed before the path to a peer can be blamed."""
    needed = _FLAPPING_BADS if pair.earlier or pair.goods else _CUT_BADS
    return max(0, needed - pair.bads - pair.earlier)


def mostly_well(pair: PeerSuspicion) -> bool:
    """Return whether rounds with others were mostly good since the pair's first bad one."""
    return pair.well > max(1, 2 * pair.ill)
