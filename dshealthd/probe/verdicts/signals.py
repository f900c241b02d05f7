"""Signals: the things that rounds measure, and what this node's last rounds say of each."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from dshealthd.probe.observation import (
    FAR_BELOW,
    HARD,
    Observation,
    Outcome,
    PeerReport,
    RoundKind,
    Stage,
)

WINDOW = 3
SUSPECT = 2
"""Flagged rounds among the last WINDOW that make a signal suspicious."""
KEPT = 16
"""Maximum rounds of an investigation; the newest count."""


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

    @property
    def local(self) -> bool:
        """Whether it is measured within this node, without a peer."""
        return self.family in {"local", OWN_NODE.family}


REACH = Signal("reach", "", "", 0, "")
"""Whether agents reach and accept each other."""
RUN = Signal("run", "", "", 0, "")
"""Whether collectives between nodes complete, with the right sum."""
OWN_NODE = Signal("home", "", "", 0, "")
"""Whether collectives among the GPUs of one node complete, with the right sum."""


def hard_signal(observation: Observation) -> Signal:
    """Return the signal on which a failed round is evidence."""
    if observation.kind is RoundKind.LOCAL:
        return OWN_NODE
    unreached = {Outcome.UNREACHABLE, Outcome.REFUSED}
    return (
        REACH
        if observation.outcome in unreached
        or observation.kind is RoundKind.LIGHT
        or observation.stage is Stage.INVITE
        else RUN
    )


def accuses_itself(
    told: PeerReport | None, signal: Signal, high: float, ratio: float = 1.0
) -> bool:
    """Return whether a peer takes the blame for a bad round of a signal, with this ratio. False if
    it has made no report.
    """
    if told is None:
        return False
    least = max(high, ratio / FAR_BELOW) if signal.timed else HARD
    return (told.node is not None and told.node >= least) or (
        signal.timed and signal.word in told.parts
    )


@dataclass(frozen=True, slots=True)
class ObservedRound:
    """The properties that all measurements of one observation share."""

    number: int
    """Rounds that this node has observed before."""
    epoch: int
    """The epoch in which it was run, even for an extra round."""
    at: float
    kind: RoundKind
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


class Cause(enum.Enum):
    """The cause of an investigation's bad rounds, or the round that is needed to find it."""

    NOTHING = "nothing"
    """It was chance, or is over."""
    MORE_NEAR = "more_near"
    """A round inside the leaf is needed."""
    MORE_FAR = "more_far"
    """A round with another leaf is needed."""
    SELF = "self"
    LEAF = "leaf"
    FABRIC = "fabric"
    """Everybody reports the same: it is more than a leaf, or the usual has changed everywhere."""
    UNCLEAR = "unclear"
    """This node or its leaf: the neighbors' reports do not settle it."""

    @property
    def decided(self) -> bool:
        """Whether it is a cause, not a round that is needed."""
        return self not in {Cause.MORE_NEAR, Cause.MORE_FAR}


@dataclass(slots=True, eq=False)
class Investigation:
    """The suspicion that bad rounds are due to this node, its part or its leaf."""

    first: tuple[Measurement, ...]
    """Those that opened it. Only later ones decide, as these were selected for being bad."""
    opened: float
    measurements: deque[Measurement] = field(default_factory=lambda: deque(maxlen=KEPT))
    asked: int = 0
    verdict: tuple[Cause, str] | None = None
    """Cause and reason, once they are decided."""
    decided: float = 0.0
    checked: int = -1
    """The epoch of the last local round requested to check whether the fault is over."""
    home_refused: bool = False
    """Whether a local round has been declined since."""

    @property
    def bads(self) -> list[Measurement]:
        """All bad measurements, with those that opened it."""
        return [entry for entry in (*self.first, *self.measurements) if entry.bad]


@dataclass(slots=True, eq=False)
class SignalHistory:
    """The recent rounds of one signal, and the investigation that they have led to."""

    signal: Signal
    recent: deque[Measurement] = field(default_factory=lambda: deque(maxlen=2 * WINDOW))
    """The last scheduled rounds that no peer explains, the newest with each peer: one bad pair must
    not count as two bad rounds of this node.
    """
    investigation: Investigation | None = None

    @property
    def window(self) -> list[Measurement]:
        """The last rounds."""
        return list(self.recent)[-WINDOW:]

    @property
    def far(self) -> list[Measurement]:
        """The last rounds that left the leaf."""
        return [entry for entry in self.recent if not entry.round.near][-WINDOW:]

    def suspicious(self) -> bool:
        """Return whether the last rounds make the signal suspicious."""
        return sum(entry.bad for entry in self.window) >= SUSPECT

    def uneasy(self) -> bool:
        """Return whether the signal's last rounds are above the usual, though not all flagged."""
        return sum(not entry.good for entry in self.window) >= SUSPECT

    def leaves_badly(self) -> bool:
        """Return whether the signal is bad in rounds that leave the leaf, and not inside it."""
        return sum(entry.bad for entry in self.far) >= SUSPECT and not any(
            entry.bad and entry.round.near for entry in self.window
        )

    def ratio(self) -> float | None:
        """Return the median of the signal's last rounds; None before the first."""
        ordered = sorted(entry.ratio for entry in self.window)
        # The lower of two values: one bad round must not decide the ratio.
        return ordered[(len(ordered) - 1) // 2] if ordered else None

    def add(self, measurement: Measurement) -> None:
        """Add a measurement to the window and the investigation."""
        round = measurement.round
        # Extra rounds run where something was bad: two of them would turn a single chance event
        # into a suspect. Local rounds count: they involve nobody else.
        if not measurement.explained and (not round.extra or self.signal.local):
            self._remove(round.peer)
            self.recent.append(measurement)
        if self.investigation:
            self.investigation.measurements.append(measurement)

    def explain(self, peer: str) -> None:
        """Withdraw evidence that is now known to be the fault of a peer."""
        self._remove(peer, bad=True)
        for entry in self.investigation.bads if self.investigation else ():
            entry.explained |= entry.round.peer == peer

    def forget(self) -> None:
        """Start the signal's history afresh, as the fault is over."""
        self.investigation = None
        self.recent.clear()

    def _remove(self, peer: str, *, bad: bool = False) -> None:
        for entry in [entry for entry in self.recent if entry.round.peer == peer != ""]:
            if entry.bad or not bad:
                self.recent.remove(entry)
