"""What a judge knows of one thing that rounds measure: the last rounds, and the cases that are open on them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from dshealthd.probe.observation import Kind, Observation, Outcome, Stage

if TYPE_CHECKING:
    from collections.abc import Iterable

HARD = 1000.0
"""The ratio of a round that gave no time at all."""
WINDOW = 3
SUSPECT = 2
"""Flagged rounds among the last WINDOW that make a suspect."""
KEPT = 16
"""Rounds of a case that are looked at: the newest."""
_LEAF = "leaf"


class Track(NamedTuple):
    """One thing that rounds measure: a timing of one part, or whether rounds end well at all."""

    family: str
    """`fabric` for what crosses nodes, `local`, `light`; `reach` and `run` for how rounds end."""
    backend: str
    op: str
    size: int
    part: str

    @property
    def word(self) -> str:
        """What a node says to its peers where it finds it slow; empty where its score says so."""
        return self.part or (self.family if self.family == "light" else "")

    @property
    def timed(self) -> bool:
        """Whether it is a timing, which can be out of the usual by chance."""
        return self.family not in {REACH.family, RUN.family, HOME.family}


REACH = Track("reach", "", "", 0, "")
"""Whether agents reach each other and accept each other."""
RUN = Track("run", "", "", 0, "")
"""Whether collectives between nodes complete, with the right sum."""
HOME = Track("home", "", "", 0, "")
"""The same on the GPUs of one node."""


@dataclass(frozen=True, slots=True)
class Told:
    """What one peer said in a round about itself and about the peers that it has just met."""

    node: float | None = None
    """Its own score."""
    parts: frozenset[str] = frozenset()
    """Parts of its own that it finds slow."""
    way_out: bool = False
    """Whether what leaves its leaf is slow for it, and what stays inside is not."""
    pairs: Mapping[str, float] = field(default_factory=dict)
    """The ratios of its last rounds, by peer."""
    calls: Mapping[str, float] = field(default_factory=dict)
    """The same of those that it led: a member that calls others may still be one that nobody can call."""

    def accuses_itself(self, track: Track, high: float) -> bool:
        """Tell whether it takes on itself what is wrong with a round."""
        if not track.timed:
            return self.node is not None and self.node >= HARD
        return (self.node is not None and self.node >= high) or track.word in self.parts

    def is_well(self, but: str, high: float) -> bool:
        """Tell whether most of its last rounds with others `but` one were good; True if it tells of none."""
        rounds = [value < high for peer, value in self.pairs.items() if peer != but]
        return not rounds or 2 * sum(rounds) > len(rounds)


def listen(observation: Observation, peers: Iterable[str]) -> dict[str, Told]:
    """Return what the peers told in a round."""
    told: dict[str, Told] = {}
    for peer in peers:
        node, parts, way_out, pairs, calls = None, set(), False, {}, {}
        for component, value in observation.scores:
            if component == peer:
                node = value
            elif component.startswith(f"{peer}/"):
                part = component[len(peer) + 1 :]
                way_out |= part == _LEAF
                parts.add(part)
            elif component.startswith(f"{peer}--"):
                pairs[component[len(peer) + 2 :]] = value
            elif component.startswith(f"{peer}->"):
                calls[component[len(peer) + 2 :]] = value
        if node is not None or parts or pairs or calls:
            told[peer] = Told(node, frozenset(parts - {_LEAF}), way_out, pairs, calls)
    return told


def tell(me: str, told: Told, parts: Mapping[str, float], way_out: float) -> tuple[tuple[str, float], ...]:
    """Return the scores that `listen` understands: what this node tells its peers in each round."""
    scores = [] if told.node is None else [(me, told.node)]
    scores += [(f"{me}/{part}", value) for part, value in parts.items()]
    scores += [(f"{me}/{_LEAF}", way_out)] if told.way_out else []
    scores += [(f"{me}--{peer}", value) for peer, value in told.pairs.items()]
    scores += [(f"{me}->{peer}", value) for peer, value in told.calls.items()]
    return tuple((component, min(round(value, 4), HARD)) for component, value in scores)


@dataclass(frozen=True, slots=True)
class Round:
    """What all items of one observation share."""

    epoch: int
    """The epoch it was run in, also where it is an extra round."""
    at: float
    kind: Kind
    peers: tuple[str, ...]
    near: bool
    """Whether all of it is on this node's leaf."""
    extra: bool
    """Whether it was not in the schedule: to be used for what it was run for, and not for what is usual."""
    led: bool
    """Whether this node has called the others, and not they this node."""
    told: Mapping[str, Told]


@dataclass(slots=True, eq=False)
class Item:
    """One measurement of a track."""

    round: Round
    ratio: float
    bad: bool
    good: bool
    """Well within the usual: what ends an accusation. An item may be neither bad nor good."""
    reason: str
    explained: bool = False
    """Whether a peer takes it on itself."""
    late: tuple[str, ...] = ()
    """Members that a collective waited for; the others are not to blame."""


@dataclass(slots=True, eq=False)
class Case:
    """The suspicion that what is bad has to do with this node, its part or its leaf."""

    items: deque[Item]
    """Since it was opened."""
    opened: float
    earlier: tuple[Item, ...]
    """The items that opened it."""
    asked: int = 0
    decided: float = 0.0
    checked: int = -1
    """The epoch of the last local round that was asked to see whether it is over."""
    home_refused: bool = False
    """Whether a local round was asked since and declined."""

    @classmethod
    def open(cls, window: Iterable[Item], at: float) -> Case:
        """Open a case on the rounds that made the suspect."""
        return cls(deque(maxlen=KEPT), at, tuple(window))


@dataclass(slots=True, eq=False)
class Pair:
    """The suspicion that what is bad has to do with one peer, or the way to it."""

    peer: str
    first: Item
    touched: int
    """The epoch of the last item."""
    since: Item | None
    """The first bad item after the last good one; None after a good one."""
    bads: int = 1
    goods: int = 0
    accused: bool = False
    reason: str = ""
    """Of the accusation."""
    later: int = 0
    """Rounds with others since the first item that were good."""
    well: int = 0
    """Those of them that say something of the way to the peer: for one on another leaf, only what leaves the leaf does."""
    ill: int = 0
    """Rounds with others that were bad."""
    hearings: int = 0
    """Rounds with others that were asked to learn what they know of the peer."""
    heard: int = -1
    """The epoch of the last of them."""
    checked: int = -1
    """The epoch of the last extra round that was asked."""

    def accuse(self, reason: str) -> None:
        """Make it an accusation."""
        self.accused, self.reason = True, reason


@dataclass(slots=True, eq=False)
class Evidence:
    """All about one track."""

    track: Track
    window: deque[Item] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """The last scheduled rounds that no peer explains."""
    far: deque[Item] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Those of them that left the leaf."""
    case: Case | None = None
    pairs: dict[str, Pair] = field(default_factory=dict)
    _bads: int = 0
    _median: float | None = None

    def suspicious(self) -> bool:
        """Tell whether the last rounds make a suspect."""
        return self._bads >= SUSPECT

    def uneasy(self) -> bool:
        """Tell whether the last rounds are above the usual, if not all so far that they are flagged."""
        return sum(not item.good for item in self.window) >= SUSPECT

    def leaves_badly(self) -> bool:
        """Tell whether what leaves the leaf is bad, and what stays inside is not."""
        return sum(item.bad for item in self.far) >= SUSPECT and not any(item.bad and item.round.near for item in self.window)

    def ratio(self) -> float | None:
        """Return the median of the last rounds; None before the first."""
        if self._median is None and self.window:
            ordered = sorted(item.ratio for item in self.window)
            self._median = ordered[(len(ordered) - 1) // 2]
        return self._median

    def forget(self) -> None:
        """Start afresh, as what was found is over."""
        self.case = None
        self.window.clear()
        self.far.clear()
        self._count()

    def _count(self) -> None:
        self._median = None
        self._bads = sum(item.bad for item in self.window)

    def add(self, item: Item, me: str, high: float) -> None:
        """Put an item to what it is evidence for."""
        told = item.round.told
        guilty = [peer for peer in item.round.peers if peer in told and told[peer].accuses_itself(self.track, high)]
        item.explained = item.bad and bool(guilty)
        if guilty:
            self._explain(guilty)
        if item.late and me not in item.late:
            item.explained = True
            if len(item.late) == 1 and not guilty:
                self._add_to_pair(item, item.late[0])
            return
        if not item.explained and (not item.round.extra or self.track.family in {"local", HOME.family}):
            self.window.append(item)
            if not item.round.near:
                self.far.append(item)
        if item.bad or self._bads:
            self._count()
        self._median = None
        if self.case:
            self.case.items.append(item)
        if len(item.round.peers) == 1 and not item.explained and me not in item.late:
            self._add_to_pair(item, item.round.peers[0])

    def _explain(self, guilty: list[str]) -> None:
        """Take back what is now known to be a peer's."""
        for item in (*self.window, *(self.case.items if self.case else ())):
            if item.bad and not set(guilty).isdisjoint(item.round.peers):
                item.explained = True
        for items in (self.window, self.far):
            for item in [item for item in items if item.explained]:
                items.remove(item)
        self._count()
        for peer in guilty:
            self.pairs.pop(peer, None)

    def _add_to_pair(self, item: Item, peer: str) -> None:
        for other in self.pairs.values():
            if other.peer != peer:
                other.later += item.good
                other.well += item.good and (other.first.round.near or not item.round.near or not self.track.timed)
                other.ill += item.bad
        pair = self.pairs.get(peer)
        if pair is None:
            if item.bad:
                self.pairs[peer] = Pair(peer, item, item.round.epoch, item)
            return
        pair.touched = item.round.epoch
        if item.good and self.track == REACH and pair.first.round.led and not item.round.led:
            return  # that it calls does not mean that it can be called
        if item.bad:
            pair.bads += 1
            pair.goods = 0 if pair.accused else pair.goods
            pair.since = pair.since or item
        elif item.good or not pair.accused:
            pair.goods += 1
            pair.since = None
        if pair.goods >= (2 if pair.bads > 1 else 1):
            del self.pairs[peer]


def hard_track(observation: Observation) -> Track:
    """Return the track on which a round that did not end well is evidence."""
    if observation.kind is Kind.LOCAL:
        return HOME
    unreached = {Outcome.UNREACHABLE, Outcome.REFUSED, Outcome.UNAUTHORIZED}
    return REACH if observation.outcome in unreached or observation.kind is Kind.LIGHT or observation.stage is Stage.INVITE else RUN
