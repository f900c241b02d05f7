"""What explains the bad rounds of a case: nothing, this node, its leaf, or something that cannot be told yet.

Pure functions of the rounds of one case. The larger cause is tried first: where nearly all neighbours on the leaf say the same of
themselves it is the leaf; where they do not, it is this node, or the part of it that was timed.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dshealthd.probe.observation import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dshealthd.probe.verdicts.evidence import Case, Item, Told, Track

_CUT_OFF = frozenset({Outcome.UNREACHABLE, Outcome.REFUSED, Outcome.UNAUTHORIZED})
_MOST = 12
"""Rounds of a case after which what cannot be told is called ambiguous."""
_LEAST_FAR = 3
_ALIKE = 1.15
_AGREED = 3
"""Neighbours that say the same, to each one that does not."""


class Cause(enum.Enum):
    """What is at the bottom of a case."""

    NOTHING = "nothing"
    """It was chance, or is over."""
    MORE_NEAR = "more_near"
    """A round inside the leaf is needed."""
    MORE_FAR = "more_far"
    """A round with another leaf is needed."""
    SELF = "self"
    LEAF = "leaf"
    FABRIC = "fabric"
    """Everybody says the same: more than a leaf, or what is usual has changed everywhere."""
    PEER = "peer"
    """There is one peer only: it, the way to it, or this node."""
    UNCLEAR = "unclear"
    """This node or its leaf: the neighbours could not be heard."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a case is judged in."""

    me: str
    neighbours: int
    """Other members on this node's leaf; 0 where the leaf is not known."""
    strangers: int
    """Members elsewhere."""
    high: float
    confirmations: int
    known_leaf: bool


@dataclass(slots=True)
class _Count:
    """The rounds of a case, counted."""

    bad: int = 0
    explained: int = 0
    good: int = 0
    near_bad: int = 0
    near_good: int = 0
    far_bad: int = 0
    far_good: int = 0

    @classmethod
    def of(cls, items: Iterable[Item]) -> _Count:
        count = cls()
        for item in items:
            near = item.round.near
            if item.explained:
                count.explained += 1
            elif item.bad:
                count.bad += 1
                count.near_bad += near
                count.far_bad += not near
            elif item.good:
                count.good += 1
                count.near_good += near
                count.far_good += not near
        return count


def reason_of(items: Iterable[Item]) -> str:
    """Return the most common reason among the bad items."""
    return Counter(item.reason for item in items if item.bad).most_common(1)[0][0]


def explain(case: Case, track: Track, around: Surroundings) -> Cause:
    """Return the cause of a case as far as its rounds tell it."""
    items = list(case.items)
    count = _Count.of(items)
    first = _Count.of(case.earlier)
    needed = around.confirmations if track.timed else (around.confirmations + 1) // 2
    cut_off = not track.timed and any(item.reason in _CUT_OFF for item in (*case.earlier, *items) if item.bad)
    if track.timed and _alike((*case.earlier, *items)):
        needed -= 1
    if cut_off:
        needed = around.confirmations  # several may be gone at once; nobody else can say that it is they
    if around.known_leaf and around.strangers and not first.near_bad + count.near_bad + count.explained and first.far_bad:
        return _way_out(items, track, count, around, needed)
    tolerated = 0 if cut_off else 1
    if count.good > tolerated:
        return Cause.NOTHING
    if count.bad + count.explained >= needed:
        return _inward(case, track, count, around, needed)
    return _next(items, around)


def _alike(items: Iterable[Item]) -> bool:
    """Tell whether a part is slow by the same ratio each time, as what chance has slowed is not."""
    ratios = [item.ratio for item in items if item.bad]
    return max(ratios) <= _ALIKE * min(ratios)


def _inward(case: Case, track: Track, count: _Count, around: Surroundings, needed: int) -> Cause:
    """Tell leaf and node apart, when rounds are bad wherever they lead."""
    items = list(case.items)
    spent = len(items) >= _MOST or case.asked >= 2 * _MOST
    near_high, near_low = _words(items, track, around, near=True)
    far_high, far_low = _words(items, track, around, near=False)
    agreed = len(near_high) >= max(1, min(2, around.neighbours)) and len(near_high) >= _AGREED * len(near_low)
    if around.neighbours and agreed:
        if around.strangers and not far_low and (len(far_high) < 2 and not spent):  # noqa: PLR2004 - one alone may be ill itself
            return Cause.MORE_FAR
        return Cause.FABRIC if len(far_high) > 1 and not far_low else Cause.LEAF
    if not around.known_leaf and len(far_high) >= _AGREED and not far_low:
        return Cause.FABRIC
    peers = {peer for item in items if item.bad and not item.explained for peer in item.round.peers}
    if track.family in {"local", "home"}:
        return Cause.SELF
    if count.bad >= needed and len(peers) > 1:
        unheard = around.neighbours and not near_high and not near_low
        if unheard and track.timed:
            return Cause.UNCLEAR if spent else Cause.MORE_NEAR
        if near_high and len(near_low) < len(near_high):
            return Cause.UNCLEAR if spent else Cause.MORE_NEAR
        return Cause.SELF
    if around.neighbours + around.strangers < 2:  # noqa: PLR2004 - with one peer nothing can be compared
        return Cause.PEER
    return Cause.UNCLEAR if spent else _next(items, around)


def _way_out(items: Sequence[Item], track: Track, count: _Count, around: Surroundings, needed: int) -> Cause:
    """Judge rounds that are bad only where they leave the leaf."""
    if count.far_good > 1 or (count.far_good and not track.timed):
        return Cause.NOTHING
    spent = len(items) >= _MOST
    peers = {peer for item in items if item.bad for peer in item.round.peers}
    if count.far_bad < needed or len(peers) < min(_LEAST_FAR, around.strangers):
        return Cause.UNCLEAR if spent else Cause.MORE_FAR
    if around.neighbours and count.near_good < min(2, around.neighbours):
        return Cause.UNCLEAR if spent else Cause.MORE_NEAR
    told = [(item.round.near, word) for item in items for word in item.round.told.values()]
    if any(not near and word.way_out for near, word in told):
        return Cause.FABRIC
    if any(near and _agrees(word, track, around.high) for near, word in told) or not around.neighbours:
        return Cause.LEAF
    return Cause.UNCLEAR if spent else Cause.MORE_NEAR


def _agrees(word: Told, track: Track, high: float) -> bool:
    return word.way_out or word.accuses_itself(track, high)


def _words(items: Iterable[Item], track: Track, around: Surroundings, *, near: bool) -> tuple[set[str], set[str]]:
    """Return who says the same of itself as this node finds, and who does not; the last word of each counts.

    Who finds itself well, and has had no more good rounds with others lately than bad ones, does not know yet.
    """
    words: dict[str, bool | None] = {}
    for item in items:
        if item.round.near is near:
            for peer, told in item.round.told.items():
                if told.node is not None:
                    same = told.accuses_itself(track, around.high)
                    words[peer] = same if same or told.is_well(around.me, around.high) else None
    return {peer for peer, word in words.items() if word}, {peer for peer, word in words.items() if word is False}


def _next(items: Sequence[Item], around: Surroundings) -> Cause:
    """Return on which side the next round is needed: the one that has been heard less."""
    near = sum(item.round.near for item in items)
    if not around.neighbours:
        return Cause.MORE_FAR
    if not around.strangers:
        return Cause.MORE_NEAR
    return Cause.MORE_NEAR if near <= len(items) - near else Cause.MORE_FAR
