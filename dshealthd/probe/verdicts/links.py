"""Links to peers with which rounds go badly: which are accused, of being slow or gone.

The way to them, or they themselves where they cannot say so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.probe.observation import Kind, Part, Suspect
from dshealthd.probe.verdicts.accusation import AMBIGUOUS
from dshealthd.probe.verdicts.peer_history import unanswered
from dshealthd.probe.verdicts.signals import FAR_BELOW, HARD, REACH

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dshealthd.probe.verdicts.peer_history import PeerHistory
    from dshealthd.probe.verdicts.signals import PeerSuspicion, SignalHistory

SLOW = "slow"
HARD_BADS = 2
"""The first round that gave no time and one that was asked; then others are heard."""
_CUT_BADS = 5
"""Failed calls after which a way between two agents counts as cut, where no other end fails.

A node that loses half of its packets fails so many times in a row with one peer in 1 of 16 cases.
Both ends count the calls of both, so the way is tried again in the time in which others are asked.
"""
_FLAPPING_BADS = 8
"""The same where good calls came between them.

A cut way lets none through; one that does flaps, or it is a node that loses packets.
"""
_OTHERS = 3
"""Good rounds with others that this node needs for that."""
_OTHERS_RATIO = 4
"""And as many to each one that failed: otherwise it may be this node that loses packets."""
SLOW_MORE = 2
"""A link needs so many flagged rounds more than confirmations.

Each single flagged round opens a case on one.
"""
_MOST = 12
"""Flagged rounds of a pair after which it is called ambiguous, if the ends do not agree."""
_EPOCHS = 2
"""Epochs that are waited for that.

Extra rounds follow each other at once, and it takes other epochs to hear others.
"""
_DISPUTES = 3
"""Epochs in which the other end disagrees, after which a slow pair is called ambiguous.

A single one may be chance: one of its rounds with others took longer.
"""
_UNTOLD = 12
"""The same where the other end has not yet timed this pair and others: two minutes of 10 s epochs.

It times an echo only in rounds that it leads, and meets others only between the extra rounds.
"""
_STARVED = 30
"""The same where it has tried, and its echoes did not count as an agent waited for a CPU; and where
echoes of others to it are slow too.
"""
_UNHEARD = 4
"""The same where nobody has told anything of the peer.

Where packets are lost it takes longer until somebody does.
"""
_DOUBTED = 16
"""The same where the peer said that a round with another failed too.

Of a peer that cannot be reached that may be older than what is wrong, and is forgotten by then.
"""
_HEARINGS = 4
"""Witnesses that are asked; who is in reach of none of so many is ambiguous, not dead."""
_STALE = 6
"""Epochs after which a suspicion of a peer that was not followed up is dropped."""
_LEAF_GONE = 3
"""Members of a leaf that are gone, and none that is well, make it the leaf."""


class Links:
    """What this node says of others: its links, and nodes that cannot speak for themselves."""

    def __init__(
        self, peer_history: PeerHistory, *, high: float, confirmations: int, hold: int
    ) -> None:
        """`high` is the ratio from which on a round counts as slow.

        `hold` the epochs for which a node stays accused.
        """
        self._peer_history = peer_history
        self._high = high
        self._enough = confirmations + SLOW_MORE
        self._hold = hold
        self._gone: dict[str, tuple[Suspect, int]] = {}
        """Other nodes, and the epoch of the last evidence."""
        self._back: set[str] = set()

    @property
    def gone(self) -> frozenset[str]:
        """Nodes whose links are gone and that are accused."""
        return frozenset(self._gone)

    @property
    def back(self) -> frozenset[str]:
        """Accused nodes that have called since this node last failed to: links may be well again."""
        return frozenset(self._back)

    def suspects(self) -> list[Suspect]:
        """Return the nodes, or their leaves, that are accused by their links."""
        return [suspect for suspect, _ in self._gone.values()]

    def keep(self, names: Iterable[str]) -> None:
        """Forget links to nodes that are no members."""
        self._gone = {name: self._gone[name] for name in names if name in self._gone}
        self._back &= self._gone.keys()

    def met(self, name: str, epoch: int, *, well: bool, led: bool) -> None:
        """Take back an accusation of a link, if the node has answered a call.

        Where it has called itself, that is still to be seen.
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
        """Let go of old accusations of links: who meets the node now says what it is like."""
        self._gone = {
            name: (suspect, since)
            for name, (suspect, since) in self._gone.items()
            if 0 <= epoch - since <= self._hold
        }
        self._back &= self._gone.keys()

    def review(self, history: SignalHistory, epoch: int) -> None:
        """Decide on the links of a track's pairs, and drop what was not followed up."""
        for peer, pair in list(history.pairs.items()):
            if history.track.timed and pair.accused and pair.reason == AMBIGUOUS:
                self._weigh(history, pair, epoch)  # the other end may have told more by now
            if pair.accused:
                continue
            if not 0 <= epoch - pair.touched <= _STALE:
                del history.pairs[peer]
            elif history.track.timed:
                self._weigh(history, pair, epoch)
            elif pair.bads >= HARD_BADS and epoch != pair.first.round.epoch:
                # In the epoch of the first round, what others have met may be older than the fault.
                self._hear(history, pair, epoch)

    def _weigh(self, history: SignalHistory, pair: PeerSuspicion, epoch: int) -> None:
        """Accuse the link of a slow pair, if both ends are well with others and both find the pair
        slow.
        """
        if pair.bads < self._enough or not mostly_well(pair):
            return
        # Of an echo only the leader knows the time: a member's word on it is that it was answered.
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
        if slow:  # it will find out itself, once it has led rounds
            wait = _STARVED
        elif opinion is not None and self._peer_history.tells_of_others(pair.peer):
            pair.dispute(epoch)
            wait = _EPOCHS if pair.disputes >= _DISPUTES else _UNTOLD
        else:
            wait = _STARVED if self._peer_history.starves(pair.peer, epoch) else _UNTOLD
        if pair.bads >= _MOST and epoch > pair.first.round.epoch + wait:
            pair.accuse(AMBIGUOUS)

    def _hear(self, history: SignalHistory, pair: PeerSuspicion, epoch: int) -> None:
        """Tell a peer that is gone from a link that is gone, by what it says itself, or what others
        know of it.
        """
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
        # Who calls others may still be one that nobody can call. Who has been silent for long is no
        # such one: whoever meets it will do.
        known = self._peer_history.opinions(
            pair.peer, since, began, calls=True, timed=history.track != REACH
        )
        if not known and not speaks and (history.track != REACH or epoch > began + _EPOCHS):
            known = self._peer_history.opinions(pair.peer, since, began)
        if known and unanswered(known):
            del history.pairs[pair.peer]
            self._accuse(pair.peer, reason, since, epoch)
        elif known and (history.track != REACH or self._is_link(pair, known, epoch)):
            pair.accuse(reason)
        elif pair.hearings >= _HEARINGS and epoch > began + (
            _DOUBTED if self._peer_history.fails_with_others(pair.peer, epoch) else _UNHEARD
        ):
            pair.accuse(AMBIGUOUS)

    def _is_link(self, pair: PeerSuspicion, known: Iterable[float], epoch: int) -> bool:
        """Tell whether calls fail between two ends that both reach others.

        Where one end fails with others too, it is this end that loses packets: it finds that out
        itself, by its outages or an investigation. `known` is what others tell of the peer.
        """
        return (
            calls_missing(pair) == 0
            and pair.well >= max(_OTHERS, _OTHERS_RATIO * pair.ill)
            and all(ratio < HARD for ratio in known)
            and not self._peer_history.fails_with_others(pair.peer, epoch)
            and not (pair.since and self._peer_history.uncalled(pair.peer, pair.since.round.epoch))
        )

    def _accuse(self, name: str, reason: str, since: float, epoch: int) -> None:
        """Accuse a node, or the links to it, that others do not reach either.

        Or its leaf, where several are gone and none is well.
        """
        self._gone[name] = Suspect(Part.NODE, name, reason), epoch
        self._back.discard(name)
        leaf = self._peer_history.leaves.get(name, "")
        gone = [other for other in self._gone if self._peer_history.leaves.get(other) == leaf]
        if (
            leaf
            # With its own leaf gone this node would be cut off itself, and could not know.
            and leaf != self._peer_history.leaf
            and len(gone) >= _LEAF_GONE
            and not self._peer_history.well(leaf, since)
        ):
            for other in gone:
                self._gone[other] = Suspect(Part.LEAF, leaf, reason), self._gone[other][1]


def accused_links(me: str, every: Iterable[SignalHistory]) -> Iterator[Suspect]:
    """Yield the links that are accused, named the same from both ends."""
    for history in every:
        for pair in history.pairs.values():
            if pair.accused:
                yield link(me, pair.peer, pair.reason)


def link(one: str, other: str, reason: str) -> Suspect:
    """Return the accusation of the link, or way, between two nodes."""
    return Suspect(Part.LINK, "--".join(sorted((one, other))), reason)


def calls_missing(pair: PeerSuspicion) -> int:
    """Return how many more failed calls it takes until the way to a peer can be to blame."""
    needed = _FLAPPING_BADS if pair.earlier or pair.goods else _CUT_BADS
    return max(0, needed - pair.bads - pair.earlier)


def mostly_well(pair: PeerSuspicion) -> bool:
    """Tell whether this node was well with others since the link was bad first."""
    return pair.well > max(1, 2 * pair.ill)
