"""Signals: what a judge knows of each thing that rounds measure, and what suspects it.

The last rounds, and the cases that are open on them.
"""

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
UNTIMED = 0.0
"""What a node tells of a call that was declined, or answered while an agent waited for a CPU.

It says that the peer can be reached, and nothing of how long that takes.
"""
WINDOW = 3
SUSPECT = 2
"""Flagged rounds among the last WINDOW that make a suspect."""
KEPT = 16
"""Rounds of a case that are looked at: the newest."""
FAR_BELOW = 4
"""Times by which a bad ratio lies below a pair's, so that it is not what is wrong with the pair.

Busy CPUs make collectives of any pair take several times as long; a slow link is named meanwhile
only if it is slower by far.
"""
_FLAPS = 36
"""Epochs for which bad rounds with a peer are remembered that good ones followed.

Six minutes of 10 s epochs: a pair among 32 nodes meets once in five.
"""
_LEAF = "leaf"


class Signal(NamedTuple):
    """One thing that rounds measure: a timing of one part, or whether rounds end well at all."""

    family: str
    """`fabric` for what crosses nodes, `local`, `light`; `reach` and `run` for how rounds end."""
    backend: str
    op: str
    size: int
    part: str

    @property
    def word(self) -> str:
        """What a node says to peers where a signal is slow; empty where its score says so."""
        return self.part or (self.family if self.family == "light" else "")

    @property
    def timed(self) -> bool:
        """Whether the signal is a timing, which can be out of the usual by chance."""
        return self.family not in {REACH.family, RUN.family, OWN_NODE.family}


REACH = Signal("reach", "", "", 0, "")
"""Whether agents reach each other and accept each other."""
RUN = Signal("run", "", "", 0, "")
"""Whether collectives between nodes complete, with the right sum."""
OWN_NODE = Signal("home", "", "", 0, "")
"""The same on the GPUs of one node."""


@dataclass(frozen=True, slots=True)
class PeerReport:
    """What one peer said in a round about itself and about the peers that it has just met."""

    node: float | None = None
    """Its own score."""
    parts: frozenset[str] = frozenset()
    """Parts of its own that it finds slow."""
    uplink: bool = False
    """Whether what leaves its leaf is slow for it, and what stays inside is not."""
    pairs: Mapping[str, float] = field(default_factory=dict)
    """The ratios of its last rounds, by peer."""
    calls: Mapping[str, float] = field(default_factory=dict)
    """The same of those that it led: a member that calls others may still be one that nobody can
    call. UNTIMED where one was answered, and tells no time.
    """

    def accuses_itself(self, track: Signal, high: float) -> bool:
        """Tell whether a peer's report takes on itself what is wrong with a round."""
        if not track.timed:
            return self.node is not None and self.node >= HARD
        return (self.node is not None and self.node >= high) or track.word in self.parts

    def is_well(self, but: str, high: float) -> bool:
        """Tell whether most rounds in a peer's report, with others `but` one, were good.

        True if it tells of none.
        """
        rounds = [value < high for peer, value in self.pairs.items() if peer != but]
        return not rounds or 2 * sum(rounds) > len(rounds)


def decode_scores(observation: Observation, peers: Iterable[str]) -> dict[str, PeerReport]:
    """Return the signals' scores that the peers told in a round."""
    told: dict[str, PeerReport] = {}
    for peer in peers:
        node, parts, uplink, pairs, calls = None, set(), False, {}, {}
        for component, value in observation.scores:
            if component == peer:
                node = value
            elif component.startswith(f"{peer}/"):
                part = component[len(peer) + 1 :]
                uplink |= part == _LEAF
                parts.add(part)
            elif component.startswith(f"{peer}--"):
                pairs[component[len(peer) + 2 :]] = value
            elif component.startswith(f"{peer}->"):
                calls[component[len(peer) + 2 :]] = value
        if node is not None or parts or pairs or calls:
            told[peer] = PeerReport(node, frozenset(parts - {_LEAF}), uplink, pairs, calls)
    return told


def encode_scores(
    me: str, told: PeerReport, parts: Mapping[str, float], uplink: float
) -> tuple[tuple[str, float], ...]:
    """Return the signals' scores that `decode_scores` understands.

    What this node tells its peers in each round.
    """
    scores = [] if told.node is None else [(me, told.node)]
    scores += [(f"{me}/{part}", value) for part, value in parts.items()]
    scores += [(f"{me}/{_LEAF}", uplink)] if told.uplink else []
    scores += [(f"{me}--{peer}", value) for peer, value in told.pairs.items()]
    scores += [(f"{me}->{peer}", value) for peer, value in told.calls.items()]
    return tuple((component, min(round(value, 4), HARD)) for component, value in scores)


@dataclass(frozen=True, slots=True)
class ObservedRound:
    """What all items of one observation share."""

    epoch: int
    """The epoch it was run in, also where it is an extra round."""
    at: float
    kind: Kind
    peers: tuple[str, ...]
    near: bool
    """Whether all of it is on this node's leaf."""
    extra: bool
    """Whether it was not in the schedule.

    To be used for what it was run for, and not for what is usual.
    """
    led: bool
    """Whether this node has called the others, and not they this node."""
    told: Mapping[str, PeerReport]

    @property
    def unasked(self) -> bool:
        """Whether a peer alone has asked for the observed round, not this node or the schedule."""
        return self.extra and not self.led


@dataclass(slots=True, eq=False)
class Measurement:
    """One measurement of a track."""

    round: ObservedRound
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
class Investigation:
    """The suspicion that what is bad has to do with this node, its part or its leaf."""

    measurements: deque[Measurement]
    """Since it was opened."""
    opened: float
    earlier: tuple[Measurement, ...]
    """The items that opened it."""
    asked: int = 0
    decided: float = 0.0
    checked: int = -1
    """The epoch of the last local round that was asked to see whether it is over."""
    home_refused: bool = False
    """Whether a local round was asked since and declined."""

    def admits(self, round: ObservedRound) -> bool:
        """Tell whether an investigation counts a round: of those that a peer has asked for, one.

        Else a peer could fill the investigation with rounds of its own.
        """
        return not round.unasked or not any(
            entry.round.unasked and not set(round.peers).isdisjoint(entry.round.peers)
            for entry in self.measurements
        )

    @classmethod
    def open(cls, window: Iterable[Measurement], at: float) -> Investigation:
        """Open a case on the rounds that made the signal suspect."""
        return cls(deque(maxlen=KEPT), at, tuple(window))


@dataclass(slots=True, eq=False)
class PeerSuspicion:
    """The suspicion that what is bad has to do with one peer, or the way to it."""

    peer: str
    first: Measurement
    touched: int
    """The epoch of the last item."""
    since: Measurement | None
    """The first bad item after the last good one; None after a good one."""
    newest: Measurement
    """The last bad item: it says what is wrong now, where an agent refused while it started."""
    least: float
    """The lowest ratio of the bad items: chance makes some of them high, and not all."""
    bads: int = 1
    earlier: int = 0
    """Bad rounds of the suspicions before it, which good rounds ended."""
    goods: int = 0
    accused: bool = False
    reason: str = ""
    """Of the accusation."""
    later: int = 0
    """Rounds with others since the first item that were good."""
    well: int = 0
    """Those of them that say something of the way to the peer.

    For one on another leaf, only what leaves the leaf does.
    """
    ill: int = 0
    """Rounds with others that were bad."""
    hearings: int = 0
    """Rounds with others that were asked to learn what they know of the peer."""
    heard: int = -1
    """The epoch of the last of them."""
    checked: int = -1
    """The epoch of the last extra round that was asked."""
    disputes: int = 0
    """Epochs in which the other end told of itself and did not bear the suspicion out."""
    disputed: int = -1
    """The last of them."""

    def dispute(self, epoch: int) -> None:
        """Note that the other end does not bear the suspicion of a peer out, once an epoch."""
        self.disputes += epoch != self.disputed
        self.disputed = epoch

    def accuse(self, reason: str) -> None:
        """Make the suspicion of a peer an accusation."""
        self.accused, self.reason = True, reason


@dataclass(slots=True, eq=False)
class SignalHistory:
    """All about one track."""

    track: Signal
    window: deque[Measurement] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """The last scheduled rounds that no peer explains."""
    far: deque[Measurement] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Those of them that left the leaf."""
    investigation: Investigation | None = None
    pairs: dict[str, PeerSuspicion] = field(default_factory=dict)
    ended: dict[str, PeerSuspicion] = field(default_factory=dict)
    """The last suspicion of each peer that good rounds have ended."""
    _bads: int = 0
    _median: float | None = None

    def suspicious(self) -> bool:
        """Tell whether the last rounds make the signal suspect."""
        return self._bads >= SUSPECT

    def uneasy(self) -> bool:
        """Tell whether the signal's last rounds are above the usual, if not all so far that they
        are flagged.
        """
        return sum(not measurement.good for measurement in self.window) >= SUSPECT

    def leaves_badly(self) -> bool:
        """Tell whether the signal is bad in what leaves the leaf, and not in what stays inside."""
        return sum(measurement.bad for measurement in self.far) >= SUSPECT and not any(
            measurement.bad and measurement.round.near for measurement in self.window
        )

    def ratio(self) -> float | None:
        """Return the median of the signal's last rounds; None before the first."""
        if self._median is None and self.window:
            ordered = sorted(measurement.ratio for measurement in self.window)
            # Of two values the lower: one bad round must not make a ratio.
            self._median = ordered[(len(ordered) - 1) // 2]
        return self._median

    def forget(self) -> None:
        """Start the signal's history afresh, as what was found is over."""
        self.investigation = None
        self.window.clear()
        self.far.clear()
        self._count()

    def _count(self) -> None:
        self._median = None
        self._bads = sum(measurement.bad for measurement in self.window)

    def add(self, measurement: Measurement, me: str, high: float) -> None:
        """Put an item to the signal that it is evidence for."""
        told = measurement.round.told
        guilty = [
            peer
            for peer in measurement.round.peers
            if peer in told and told[peer].accuses_itself(self.track, high)
        ]
        measurement.explained = measurement.bad and bool(guilty)
        # Also for earlier rounds: it takes a peer some rounds to find itself at fault, and until
        # then its bad rounds stood against this node.
        if guilty:
            self._explain(guilty)
        # Who was waited for is known, so the round says nothing against this node. Of several that
        # were late, one may have kept the others, and no pair is blamed.
        if measurement.late and me not in measurement.late:
            measurement.explained = True
            if len(measurement.late) == 1 and not guilty:
                self._add_to_pair(measurement, measurement.late[0])
            return
        if not measurement.explained and (
            # Extra rounds are run where something was bad: two of them would make a suspect out of
            # a single chance. A local round involves nobody else, and none can be aimed by a peer.
            not measurement.round.extra or self.track.family in {"local", OWN_NODE.family}
        ):
            self.window.append(measurement)
            if not measurement.round.near:
                self.far.append(measurement)
        # This runs for every timing of every round; most change nothing.
        if measurement.bad or self._bads:
            self._count()
        self._median = None
        if self.investigation and self.investigation.admits(measurement.round):
            self.investigation.measurements.append(measurement)
        if (
            len(measurement.round.peers) == 1
            and not measurement.explained
            and me not in measurement.late
        ):
            self._add_to_pair(measurement, measurement.round.peers[0])

    def _explain(self, guilty: list[str]) -> None:
        """Take back from a signal what is now known to be a peer's."""
        for measurement in (
            *self.window,
            *(self.investigation.measurements if self.investigation else ()),
        ):
            if measurement.bad and not set(guilty).isdisjoint(measurement.round.peers):
                measurement.explained = True
        for measurements in (self.window, self.far):
            for measurement in [
                measurement for measurement in measurements if measurement.explained
            ]:
                measurements.remove(measurement)
        self._count()
        for peer in guilty:
            self.pairs.pop(peer, None)
            self.ended.pop(peer, None)

    def _add_to_pair(self, measurement: Measurement, peer: str) -> None:
        for other in self.pairs.values():
            if other.peer != peer:
                below = measurement.bad and FAR_BELOW * measurement.ratio <= other.least
                other.later += measurement.good or below
                other.well += (measurement.good or below) and (
                    other.first.round.near or not measurement.round.near or not self.track.timed
                )
                other.ill += measurement.bad and not below
        pair = self.pairs.get(peer)
        if pair is None:
            if measurement.bad:
                epoch, before = measurement.round.epoch, self.ended.pop(peer, None)
                self.pairs[peer] = PeerSuspicion(
                    peer,
                    measurement,
                    epoch,
                    since=measurement,
                    newest=measurement,
                    least=measurement.ratio,
                )
                if before and 0 <= epoch - before.touched <= _FLAPS:
                    self.pairs[peer].earlier = before.bads + before.earlier
            return
        if (
            measurement.good
            and self.track == REACH
            and pair.first.round.led
            and not measurement.round.led
        ):
            return  # that it calls does not mean that it can be called
        pair.touched = measurement.round.epoch
        if measurement.bad:
            pair.bads += 1
            pair.newest = measurement
            pair.least = min(pair.least, measurement.ratio)
            # An accusation ends after good rounds in a row; a suspicion also where chance mixes
            # them with bad ones.
            pair.goods = 0 if pair.accused else pair.goods
            pair.since = pair.since or measurement
        elif measurement.good or not pair.accused:
            pair.goods += 1
            pair.since = None
        # A single bad round may be chance, and one good round says so.
        if pair.goods >= (2 if pair.bads > 1 else 1):
            self.ended[peer] = self.pairs.pop(peer)


def hard_track(observation: Observation) -> Signal:
    """Return the signal's track on which a round that did not end well is evidence."""
    if observation.kind is Kind.LOCAL:
        return OWN_NODE
    unreached = {Outcome.UNREACHABLE, Outcome.REFUSED, Outcome.UNAUTHORIZED}
    return (
        REACH
        if observation.outcome in unreached
        or observation.kind is Kind.LIGHT
        or observation.stage is Stage.INVITE
        else RUN
    )
