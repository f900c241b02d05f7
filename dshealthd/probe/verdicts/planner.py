"""The planner of extra rounds: which is needed next, to confirm a suspicion or see it end.

Pure functions of what the detector knows: `plan` changes nothing, and says what the detector has to
note where it asks for the round.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dshealthd.probe.observation import Kind
from dshealthd.probe.verdicts.accusation import LOCAL, Verdicts, waits_for_home
from dshealthd.probe.verdicts.explanation import Cause, Surroundings, explain
from dshealthd.probe.verdicts.links import HARD_BADS, SLOW_MORE, calls_missing, mostly_well
from dshealthd.probe.verdicts.peer_history import PeerHistory
from dshealthd.probe.verdicts.signals import (
    OWN_NODE,
    REACH,
    Investigation,
    Measurement,
    PeerSuspicion,
    Signal,
    SignalHistory,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


_RECHECK = 3
"""Epochs between two rounds that see whether an accused link or GPU has recovered."""
_ILL = 2
"""Bad rounds with others after which a pair is left alone.

It is not the pair, or not the pair alone.
"""
_SIBLINGS = 2
"""Other parts that turned slow in the last round, from which on it is too early to tell."""


@dataclass(frozen=True, slots=True)
class Confirmation:
    """An extra round to run at once."""

    members: tuple[str, ...]
    """This node first; alone for a local round."""
    kind: Kind


class Purpose(enum.Enum):
    """What an extra round is for, and so what is to be noted of it."""

    CONFIRM = "confirm"
    """It adds to an open investigation."""
    RECHECK = "recheck"
    """It sees whether the accused part of this node, or pair, has recovered."""
    TELL_APART = "tell_apart"
    """It tells an adapter from its GPU, or this node from the pair: nothing is noted."""
    HEAR = "hear"
    """It asks a witness what it knows of a peer."""
    SECOND = "second"
    """It times an echo to a peer that found its own to this node slow, or calls one that another
    cannot call.
    """


@dataclass(frozen=True, slots=True)
class ExtraRound:
    """An extra round, and what it is for."""

    confirmation: Confirmation
    purpose: Purpose
    signal: Signal | None = None
    peer: str = ""
    """The other end of the pair that it concerns; empty where it concerns this node."""


@dataclass(frozen=True, slots=True)
class NextStep:
    """What is to be done next."""

    step: ExtraRound | None
    considered: tuple[Signal, ...]
    """Open investigations that asked for a round, also where nobody was left to have it with."""


@dataclass(frozen=True, slots=True)
class PlanningInput:
    """What the detector knows when it plans."""

    peers: PeerHistory
    history: Mapping[Signal, SignalHistory]
    verdicts: Verdicts
    gone: Collection[str]
    """Members that are not worth asking."""
    back: Collection[str]
    """Those of them that have called since."""
    doubted: Collection[str]
    """Peers that found their echoes to this node slow, or that another cannot call, which this node
    has not called itself since.
    """
    around: Surroundings
    epoch: int
    now: float

    @property
    def unreached(self) -> set[str]:
        """Members with whom no round is planned: they did not answer when they were called last.

        Nothing else can be learnt of them now.
        """
        pairs = self.history[REACH].pairs.values() if REACH in self.history else ()
        return {*self.gone, *(pair.peer for pair in pairs if pair.since is not None)}


def plan(state: PlanningInput) -> NextStep:
    """Return the extra round to plan that matters most, if one is needed."""
    considered: list[Signal] = []
    # What is not decided yet comes first: extra rounds are limited, and an accusation that may be
    # over does less harm than a fault that nobody knows of. Generators: only the first round is
    # worked out.
    step = next(_undecided(state, considered), None) or next(_others(state), None)
    return NextStep(step, tuple(considered))


def _undecided(state: PlanningInput, considered: list[Signal]) -> Iterator[ExtraRound]:
    """Yield extra rounds for open investigations; `considered` takes those that were come to."""
    for track, history in state.history.items():
        if (
            history.investigation
            and track not in state.verdicts
            and not early(track, state.history)
        ):
            considered.append(track)
            yield from _for_case(track, history.investigation, state)


def _others(state: PlanningInput) -> Iterator[ExtraRound]:
    """Yield extra rounds for what is decided, and for pairs."""
    me = state.peers.me
    if waits_for_home(state.history, state.verdicts, state.now):
        yield ExtraRound(Confirmation((me,), Kind.LOCAL), Purpose.TELL_APART)
    for track in state.verdicts:
        investigation = state.history[track].investigation
        if (
            investigation
            and track.family in {LOCAL, OWN_NODE.family}
            and not 0 <= state.epoch - investigation.checked < _RECHECK
        ):
            yield ExtraRound(Confirmation((me,), Kind.LOCAL), Purpose.RECHECK, track)
    for name in state.back:
        yield ExtraRound(Confirmation((me, name), Kind.LIGHT), Purpose.TELL_APART)
    for history in state.history.values():
        if not history.investigation:
            for pair in history.pairs.values():
                yield from _for_pair(history, pair, state)
    # Last: a peer that lies can ask for these, and must not use up what this node needs itself.
    for name in state.doubted:
        is_member = name in state.peers.leaves
        if is_member and name not in state.unreached and not state.peers.shuns(name, state.now):
            yield ExtraRound(Confirmation((me, name), Kind.LIGHT), Purpose.SECOND, None, name)


def _for_case(
    track: Signal, investigation: Investigation, state: PlanningInput
) -> Iterator[ExtraRound]:
    """Plan a round with a reference not asked yet, on the side from which less is known."""
    me = state.peers.me
    if track.family in {LOCAL, OWN_NODE.family}:
        yield ExtraRound(Confirmation((me,), Kind.LOCAL), Purpose.CONFIRM, track)
        return
    cause = explain(investigation, track, state.around)
    accused = {
        pair.peer
        for history in state.history.values()
        for pair in history.pairs.values()
        if pair.accused
    }
    asked = Counter(
        peer
        for measurement in (*investigation.earlier, *investigation.measurements)
        for peer in measurement.round.peers
    )
    # Where nobody on the side that is needed can be asked, a round with the other one still counts.
    met = Counter(peer for entry in investigation.measurements for peer in entry.round.peers)
    for near in (True, False) if cause is Cause.MORE_NEAR else (False, True):
        name = state.peers.choose(
            near=near, asked=asked, ill=accused | state.unreached, now=state.now
        )
        # More rounds with the same peer prove nothing: it may be at fault itself. They would use up
        # the minute's extra rounds while the others are busy for a moment.
        if name and met[name] < state.around.confirmations:
            asked_of = Confirmation((me, name), _kind(track, investigation.earlier[-1]))
            yield ExtraRound(asked_of, Purpose.CONFIRM, track)
            return


def _for_pair(
    history: SignalHistory, pair: PeerSuspicion, state: PlanningInput
) -> Iterator[ExtraRound]:
    """Plan a round with a peer: only when this node is known to be well, by one with another."""
    me, track = state.peers.me, history.track
    kind = _kind(track, pair.first)
    again = ExtraRound(Confirmation((me, pair.peer), kind), Purpose.RECHECK, track, pair.peer)
    if state.peers.shuns(pair.peer, state.now) or (
        history.track != REACH and pair.peer in state.unreached
    ):
        return
    if pair.accused:
        # Not below 0: a wall clock that was set back would stop the rechecks.
        if not 0 <= state.epoch - pair.checked < _RECHECK:
            yield again
        return
    if history.track == REACH and pair.bads < HARD_BADS and state.epoch == pair.first.round.epoch:
        # An echo is cheap, and tells at once whether a packet was lost or none gets through.
        yield again
        return
    # In the epoch of the first bad round, what others say of the peer may be older than the fault.
    if not pair.later or pair.ill > _ILL or state.epoch == pair.first.round.epoch:
        return
    # Others tell whether they can call it.
    uncalled = history.track == REACH and pair.first.round.led and pair.bads >= HARD_BADS
    speaks = history.track.timed or (
        not uncalled
        and pair.since is not None
        and state.peers.spoke(pair.peer, pair.since.round.at)
    )
    if speaks and pair.bads >= HARD_BADS and not mostly_well(pair):
        near = state.peers.near([pair.peer])
        if name := state.peers.choose(
            near=near, asked={}, ill={pair.peer, *state.unreached}, now=state.now
        ):
            yield ExtraRound(Confirmation((me, name), kind), Purpose.TELL_APART)
            return
    if speaks or pair.bads < HARD_BADS:
        # More of the same says no more; what is missing then is that both ends are well with
        # others, which other epochs tell.
        enough = state.around.confirmations + SLOW_MORE if history.track.timed else HARD_BADS + 1
        if pair.bads < enough or pair.checked != state.epoch:
            yield again
    elif pair.hearings and (state.epoch <= pair.first.round.epoch + 1 or state.epoch == pair.heard):
        # another epoch is needed: that they were well with it may be older than what is wrong,
        # and nobody knows more by now
        if history.track == REACH and calls_missing(pair):
            yield again
    elif name := state.peers.witness(pair.peer, state.epoch, state.now):
        yield ExtraRound(Confirmation((me, name), kind), Purpose.HEAR, track, pair.peer)


def early(track: Signal, history: Mapping[Signal, SignalHistory]) -> bool:
    """Tell whether an extra round is too early: other parts were slow in the last one too, and not
    before.

    Chance has made this part suspect one round before them: it is too early to tell it from the
    node, or the node from its leaf.
    """
    alike = [
        other
        for key, other in history.items()
        if key != track and key._replace(part=track.part) == track
    ]
    return (
        sum(
            bool(other.window) and not other.window[-1].good and not other.uneasy()
            for other in alike
        )
        >= _SIBLINGS
    )


def _kind(track: Signal, measurement: Measurement) -> Kind:
    """Return the kind of the extra round that measures the same again, with two nodes.

    An echo where only reach is in question.
    """
    if track == REACH:
        return Kind.LIGHT
    return Kind.PAIR if measurement.round.kind is Kind.GROUP else measurement.round.kind
