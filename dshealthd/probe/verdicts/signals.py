"""Signals: what the detector knows of each thing that rounds measure.

The last rounds, the open investigations of this node, and the suspicions of peers.
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
"""The ratio of a failed round, which gave no time at all."""
UNTIMED = 0.0
"""The reported ratio of a call that was declined, or answered while an agent waited for a CPU. It
shows that the peer can be reached, but not how long that takes.
"""
WINDOW = 3
SUSPECT = 2
"""Flagged rounds among the last WINDOW that make a signal suspicious."""
KEPT = 16
"""Maximum rounds of an investigation; the newest count."""
FAR_BELOW = 4
"""Factor by which a bad ratio with others lies below a pair's, so as not to explain the pair's.
Busy CPUs make the collectives of all pairs take several times as long; meanwhile a slow link is
accused only if it is slower by far.
"""
_FLAPS = 36
"""Epochs for which bad rounds with a peer are remembered after good ones ended the suspicion. Six
minutes of 10 s epochs: a pair among 32 nodes meets once in five minutes.
"""
_LEAF = "leaf"


class Signal(NamedTuple):
    """One thing that rounds measure: a timing of one part, or whether rounds succeed at all."""

    family: str
    """`fabric` for timings between nodes, `local`, `light`; `reach`, `run`, `home` for outcomes."""
    backend: str
    op: str
    size: int
    part: str

    @property
    def word(self) -> str:
        """The part to report if the signal is slow; empty if the node's score covers it."""
        return self.part or (self.family if self.family == "light" else "")

    @property
    def timed(self) -> bool:
        """Whether the signal is a timing, which can be unusual by chance."""
        return self.family not in {REACH.family, RUN.family, OWN_NODE.family}


REACH = Signal("reach", "", "", 0, "")
"""Whether agents reach and accept each other."""
RUN = Signal("run", "", "", 0, "")
"""Whether collectives between nodes complete, with the right sum."""
OWN_NODE = Signal("home", "", "", 0, "")
"""Whether collectives among the GPUs of one node complete, with the right sum."""


@dataclass(frozen=True, slots=True)
class PeerReport:
    """A peer's report in a round: on itself, and on the peers that it has just met."""

    node: float | None = None
    """Its own score."""
    parts: frozenset[str] = frozenset()
    """Parts of its own that it finds slow."""
    uplink: bool = False
    """Whether its rounds are slow if they leave its leaf, and not if they stay inside."""
    pairs: Mapping[str, float] = field(default_factory=dict)
    """The ratios of its last rounds, by peer."""
    calls: Mapping[str, float] = field(default_factory=dict)
    """The same for rounds that it led: a member that calls others may still be one that nobody can
    call. UNTIMED for a call that was answered but gave no time.
    """

    def accuses_itself(self, track: Signal, high: float) -> bool:
        """Return whether the peer takes the blame for a bad round of a signal."""
        if not track.timed:
            return self.node is not None and self.node >= HARD
        return (self.node is not None and self.node >= high) or track.word in self.parts

    def is_well(self, but: str, high: float) -> bool:
        """Return whether most rounds in the report, except those with `but`, were good. True if
        there are none.
        """
        rounds = [value < high for peer, value in self.pairs.items() if peer != but]
        return not rounds or 2 * sum(rounds) > len(rounds)


def decode_scores(observation: Observation, peer: str) -> PeerReport | None:
    """Return a peer's report, decoded from a round's scores; None if it has made none."""
    node: float | None = None
    parts: set[str] = set()
    pairs: dict[str, float] = {}
    calls: dict[str, float] = {}
    for component, value in observation.scores:
        if component == peer:
            node = value
        elif component.startswith(f"{peer}/"):
            parts.add(component[len(peer) + 1 :])
        elif component.startswith(f"{peer}--"):
            pairs[component[len(peer) + 2 :]] = value
        elif component.startswith(f"{peer}->"):
            calls[component[len(peer) + 2 :]] = value
    if node is None and not (parts or pairs or calls):
        return None
    return PeerReport(node, frozenset(parts - {_LEAF}), _LEAF in parts, pairs, calls)


def encode_scores(
    me: str, told: PeerReport, parts: Mapping[str, float], uplink: float
) -> tuple[tuple[str, float], ...]:
    """Return this node's report to its peers as scores, which `decode_scores` decodes. `parts` has
    the ratio of each slow part; `uplink` is the ratio of a slow uplink.
    """
    scores = [] if told.node is None else [(me, told.node)]
    scores += [(f"{me}/{part}", value) for part, value in parts.items()]
    scores += [(f"{me}/{_LEAF}", uplink)] if told.uplink else []
    scores += [(f"{me}--{peer}", value) for peer, value in told.pairs.items()]
    scores += [(f"{me}->{peer}", value) for peer, value in told.calls.items()]
    return tuple((component, min(round(value, 4), HARD)) for component, value in scores)


@dataclass(frozen=True, slots=True)
class ObservedRound:
    """The properties that all measurements of one observation share."""

    epoch: int
    """The epoch in which it was run, even for an extra round."""
    at: float
    kind: Kind
    peer: str
    """The other node; empty for a local round."""
    near: bool
    """Whether it stayed on this node's leaf."""
    extra: bool
    """Whether it was outside the schedule; it is not learnt as usual then."""
    led: bool
    """Whether this node called the other, rather than being called."""
    told: PeerReport | None
    """What the other said of itself."""

    @property
    def unasked(self) -> bool:
        """Whether a peer alone requested the round, neither this node nor the schedule."""
        return self.extra and not self.led


@dataclass(slots=True, eq=False)
class Measurement:
    """One measurement of a signal."""

    round: ObservedRound
    ratio: float
    bad: bool
    good: bool
    """Whether it is well within the usual, which ends accusations; it may be neither."""
    reason: str
    explained: bool = False
    """Whether the peer takes the blame, or was late."""
    late: str = ""
    """The node that a collective waited for; the other is not to blame."""


@dataclass(slots=True, eq=False)
class Investigation:
    """The suspicion that bad rounds are due to this node, its part or its leaf."""

    measurements: deque[Measurement]
    """Those made since it was opened."""
    opened: float
    earlier: tuple[Measurement, ...]
    """Those that opened it."""
    asked: int = 0
    decided: float = 0.0
    checked: int = -1
    """The epoch of the last local round requested to check whether the fault is over."""
    home_refused: bool = False
    """Whether a local round has been declined since."""

    def admits(self, round: ObservedRound) -> bool:
        """Return whether the investigation counts a round. Of the rounds that a peer alone
        requested, it counts one per peer: otherwise a peer could fill the investigation with rounds
        of its own.
        """
        return not round.unasked or not any(
            entry.round.unasked and entry.round.peer == round.peer for entry in self.measurements
        )

    @classmethod
    def open(cls, window: Iterable[Measurement], at: float) -> Investigation:
        """Open an investigation on the rounds that made the signal suspicious."""
        return cls(deque(maxlen=KEPT), at, tuple(window))


@dataclass(slots=True, eq=False)
class PeerSuspicion:
    """The suspicion that bad rounds are due to one peer, or the path to it."""

    peer: str
    first: Measurement
    """The bad measurement that raised it."""
    touched: int
    """The epoch of the last measurement."""
    since: Measurement | None
    """The first bad measurement after the last good one; None after a good one."""
    newest: Measurement
    """The last bad measurement: it shows what is wrong now, even if an agent first refused."""
    least: float
    """The lowest ratio of the bad measurements: chance makes some of them high, but not all."""
    bads: int = 1
    earlier: int = 0
    """Bad rounds of previous suspicions of this peer, which good rounds ended."""
    goods: int = 0
    accused: bool = False
    reason: str = ""
    """The reason of the accusation."""
    later: int = 0
    """Good rounds with others since the first measurement."""
    well: int = 0
    """Those of them that say something of the path: to another leaf, those that leave the leaf."""
    ill: int = 0
    """Bad rounds with others since the first measurement."""
    hearings: int = 0
    """Rounds requested to get reports of others on the peer."""
    heard: int = -1
    """The epoch of the last of them."""
    asked: dict[str, int] = field(default_factory=dict)
    """Others asked to call the peer themselves, and the epoch in which each was last spoken to."""
    checked: int = -1
    """The epoch of the last extra round requested for this pair."""
    disputes: int = 0
    """Epochs in which the other end reported on itself but did not confirm the suspicion."""
    disputed: int = -1
    """The last of them."""

    def dispute(self, epoch: int) -> None:
        """Note that the other end does not confirm the suspicion, at most once per epoch."""
        self.disputes += epoch != self.disputed
        self.disputed = epoch

    def accuse(self, reason: str) -> None:
        """Turn the suspicion into an accusation."""
        self.accused, self.reason = True, reason


@dataclass(slots=True, eq=False)
class SignalHistory:
    """The recent rounds, the investigation and the suspected peers of one signal."""

    track: Signal
    window: deque[Measurement] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """The last scheduled rounds that no peer explains."""
    far: deque[Measurement] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Those of them that left the leaf."""
    investigation: Investigation | None = None
    pairs: dict[str, PeerSuspicion] = field(default_factory=dict)
    ended: dict[str, PeerSuspicion] = field(default_factory=dict)
    """The last suspicion of each peer that good rounds ended."""
    _bads: int = 0
    _median: float | None = None

    def suspicious(self) -> bool:
        """Return whether the last rounds make the signal suspicious."""
        return self._bads >= SUSPECT

    def uneasy(self) -> bool:
        """Return whether the signal's last rounds are above the usual, though not all flagged."""
        return sum(not measurement.good for measurement in self.window) >= SUSPECT

    def leaves_badly(self) -> bool:
        """Return whether the signal is bad in rounds that leave the leaf, and not inside it."""
        return sum(measurement.bad for measurement in self.far) >= SUSPECT and not any(
            measurement.bad and measurement.round.near for measurement in self.window
        )

    def ratio(self) -> float | None:
        """Return the median of the signal's last rounds; None before the first."""
        if self._median is None and self.window:
            ordered = sorted(measurement.ratio for measurement in self.window)
            # The lower of two values: one bad round must not decide the ratio.
            self._median = ordered[(len(ordered) - 1) // 2]
        return self._median

    def forget(self) -> None:
        """Start the signal's history afresh, as the fault is over."""
        self.investigation = None
        self.window.clear()
        self.far.clear()
        self._count()

    def _count(self) -> None:
        self._median = None
        self._bads = sum(measurement.bad for measurement in self.window)

    def add(self, measurement: Measurement, high: float) -> None:
        """Add a measurement as evidence to the window, the investigation and the pair."""
        told, peer = measurement.round.told, measurement.round.peer
        guilty = told is not None and told.accuses_itself(self.track, high)
        measurement.explained = measurement.bad and guilty
        # This covers earlier rounds too: a peer takes some rounds to find itself at fault, and
        # until then its bad rounds counted against this node.
        if guilty:
            self._explain(peer)
        # The peer was late, so the round says nothing against this node.
        if measurement.late and measurement.late == peer:
            measurement.explained = True
            if not guilty:
                self._add_to_pair(measurement, peer)
            return
        if not measurement.explained and (
            # Extra rounds run where something was bad: two of them would turn a single chance event
            # into a suspect. Local rounds count: they involve nobody else, and no peer can cause
            # them.
            not measurement.round.extra or self.track.family in {"local", OWN_NODE.family}
        ):
            self.window.append(measurement)
            if not measurement.round.near:
                self.far.append(measurement)
        # Checked first, as this runs for every timing of every round and most change nothing.
        if measurement.bad or self._bads:
            self._count()
        self._median = None
        if self.investigation and self.investigation.admits(measurement.round):
            self.investigation.measurements.append(measurement)
        if peer and not measurement.explained and not measurement.late:
            self._add_to_pair(measurement, peer)

    def _explain(self, peer: str) -> None:
        """Withdraw evidence that is now known to be the fault of a peer."""
        for measurement in (
            *self.window,
            *(self.investigation.measurements if self.investigation else ()),
        ):
            if measurement.bad and measurement.round.peer == peer:
                measurement.explained = True
        for measurements in (self.window, self.far):
            for measurement in [
                measurement for measurement in measurements if measurement.explained
            ]:
                measurements.remove(measurement)
        self._count()
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
            return  # a peer that calls is not necessarily one that can be called
        pair.touched = measurement.round.epoch
        if measurement.bad:
            pair.bads += 1
            pair.newest = measurement
            pair.least = min(pair.least, measurement.ratio)
            # An accusation ends only after consecutive good rounds; a suspicion also if chance
            # mixes in bad ones.
            pair.goods = 0 if pair.accused else pair.goods
            pair.since = pair.since or measurement
        elif measurement.good or not pair.accused:
            pair.goods += 1
            pair.since = None
        # A single bad round may be chance, so one good round refutes it.
        if pair.goods >= (2 if pair.bads > 1 else 1):
            self.ended[peer] = self.pairs.pop(peer)


def hard_track(observation: Observation) -> Signal:
    """Return the signal on which a failed round is evidence."""
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
