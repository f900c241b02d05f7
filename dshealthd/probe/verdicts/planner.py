"""The planner of extra rounds: which one is needed next to confirm or clear a suspicion.

Pure functions of what the detector knows: `plan` changes nothing, and returns what the detector has
to record when it requests the round.
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
"""Minimum epochs between rounds that check whether an accused link or GPU has recovered."""
_ILL = 2
"""Bad rounds with others beyond which no more rounds are run for a pair. The fault is then not the
pair's, or not the pair's alone.
"""
_SIBLINGS = 2
"""Other parts that turned slow in the last round that make it too early to decide."""


@dataclass(frozen=True, slots=True)
class Confirmation:
    """An extra round to run at once."""

    members: tuple[str, ...]
    """This node first; alone for a local round."""
    kind: Kind


class Purpose(enum.Enum):
    """The purpose of an extra round, which determines what is recorded about it."""

    CONFIRM = "confirm"
    """Add to an open investigation."""
    RECHECK = "recheck"
    """Check an accused part of this node for recovery, or measure a suspected pair again."""
    TELL_APART = "tell_apart"
    """Distinguish an adapter from its GPU, or this node from the pair: nothing is recorded."""
    HEAR = "hear"
    """Ask a witness what it knows of a peer."""
    ASK = "ask"
    """Ask another member to call a peer that this node cannot call, or hear whether it could."""
    SECOND = "second"
    """Time an echo to a peer that found its own to this node slow, or call one that another member
    cannot call.
    """


@dataclass(frozen=True, slots=True)
class ExtraRound:
    """An extra round and its purpose."""

    confirmation: Confirmation
    purpose: Purpose
    signal: Signal | None = None
    peer: str = ""
    """The other end of the pair that it concerns; empty if it concerns this node."""


@dataclass(frozen=True, slots=True)
class NextStep:
    """The next extra round, if any, and what was considered for it."""

    step: ExtraRound | None
    considered: tuple[Signal, ...]
    """Open investigations that asked for a round, even if no peer was left for it."""


@dataclass(frozen=True, slots=True)
class PlanningInput:
    """What the detector knows when it plans."""

    peers: PeerHistory
    history: Mapping[Signal, SignalHistory]
    verdicts: Verdicts
    gone: Collection[str]
    """Members that are accused of being gone."""
    back: Collection[str]
    """Those of them that have called since."""
    doubted: Collection[str]
    """Peers that this node should call itself; see `RecentRounds.doubts`."""
    around: Surroundings
    epoch: int
    now: float

    @property
    def unreached(self) -> set[str]:
        """Members that did not answer when last called, with whom no round is planned."""
        return unreached(self.history, self.gone)


def unreached(history: Mapping[Signal, SignalHistory], gone: Collection[str]) -> set[str]:
    """Return the members that did not answer when last called, those that are `gone` included."""
    pairs = history[REACH].pairs.values() if REACH in history else ()
    return {*gone, *(pair.peer for pair in pairs if pair.since is not None)}


def plan(state: PlanningInput) -> NextStep:
    """Return the extra round that matters most, if one is needed."""
    considered: list[Signal] = []
    # Undecided investigations come first: extra rounds are limited, and an outdated accusation does
    # less harm than an unknown fault. These are generators, so only the first round is computed.
    step = next(_undecided(state, considered), None) or next(_others(state), None)
    return NextStep(step, tuple(considered))


def _undecided(state: PlanningInput, considered: list[Signal]) -> Iterator[ExtraRound]:
    """Yield extra rounds for open investigations; add each one reached to `considered`."""
    for track, history in state.history.items():
        if (
            history.investigation
            and track not in state.verdicts
            and not early(track, state.history)
        ):
            considered.append(track)
            yield from _for_case(track, history.investigation, state)


def _others(state: PlanningInput) -> Iterator[ExtraRound]:
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
    # Last: a lying peer can provoke these rounds, and must not use up those that this node needs.
    for name in state.doubted:
        is_member = name in state.peers.leaves
        if is_member and name not in state.unreached and not state.peers.shuns(name, state.now):
            yield ExtraRound(Confirmation((me, name), Kind.LIGHT), Purpose.SECOND, None, name)


def _for_case(
    track: Signal, investigation: Investigation, state: PlanningInput
) -> Iterator[ExtraRound]:
    """Plan a round with a reference peer asked least so far, on the side that needs it."""
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
        entry.round.peer for entry in (*investigation.earlier, *investigation.measurements)
    )
    # If nobody on the needed side can be asked, a round with the other side still counts.
    met = Counter(entry.round.peer for entry in investigation.measurements)
    for near in (True, False) if cause is Cause.MORE_NEAR else (False, True):
        name = state.peers.choose(
            near=near, asked=asked, ill=accused | state.unreached, now=state.now
        )
        # More rounds with the same peer prove nothing, as it may be at fault itself. They would use
        # up the minute's extra rounds while the other peers are only busy for a moment.
        if name and met[name] < state.around.confirmations:
            asked_of = Confirmation((me, name), _kind(track, investigation.earlier[-1]))
            yield ExtraRound(asked_of, Purpose.CONFIRM, track)
            return


def _for_pair(
    history: SignalHistory, pair: PeerSuspicion, state: PlanningInput
) -> Iterator[ExtraRound]:
    """Plan a round for a suspected or accused pair. Except for rechecks of an accused pair and the
    first echo again, a good round with another peer must first have shown that this node is well.
    """
    me, track = state.peers.me, history.track
    kind = _kind(track, pair.first)
    again = ExtraRound(Confirmation((me, pair.peer), kind), Purpose.RECHECK, track, pair.peer)
    if state.peers.shuns(pair.peer, state.now) or (
        history.track != REACH and pair.peer in state.unreached
    ):
        return
    if pair.accused:
        # The lower bound keeps the rechecks going if the wall clock was set back.
        if not 0 <= state.epoch - pair.checked < _RECHECK:
            yield again
        return
    # A call that others asked for is not repeated: they have repeated their own.
    if history.track == REACH and not pair.first.round.extra:
        if pair.bads < HARD_BADS and state.epoch == pair.first.round.epoch:
            # An echo is cheap and shows at once whether one packet was lost or none gets through.
            yield again
            return
        if pair.first.round.led and pair.ill <= _ILL:
            yield from _ask_others(history, pair, state)
    # In the epoch of the first bad round, others' reports on the peer may predate the fault.
    if not pair.later or pair.ill > _ILL or state.epoch == pair.first.round.epoch:
        return
    # If this node cannot call the peer, the others report whether they can.
    uncalled = history.track == REACH and pair.first.round.led and pair.bads >= HARD_BADS
    speaks = history.track.timed or (
        not uncalled
        and pair.since is not None
        and state.peers.spoke(pair.peer, pair.since.round.at)
    )
    if speaks and pair.bads >= HARD_BADS and not mostly_well(pair):
        near = state.peers.near(pair.peer)
        if name := state.peers.choose(
            near=near, asked={}, ill={pair.peer, *state.unreached}, now=state.now
        ):
            yield ExtraRound(Confirmation((me, name), kind), Purpose.TELL_APART)
            return
    if speaks or pair.bads < HARD_BADS:
        # More than `enough` rounds of the pair add nothing. What is still missing then is that both
        # ends are well with others, which later epochs show.
        enough = state.around.confirmations + SLOW_MORE if history.track.timed else HARD_BADS + 1
        if pair.bads < enough or pair.checked != state.epoch:
            yield again
    elif pair.hearings and (state.epoch <= pair.first.round.epoch + 1 or state.epoch == pair.heard):
        # Another epoch is needed: good reports by others may predate the fault, and nobody knows
        # more by now.
        if history.track == REACH and calls_missing(pair):
            yield again
    elif name := state.peers.witness(pair.peer, state.epoch, state.now):
        yield ExtraRound(Confirmation((me, name), kind), Purpose.HEAR, track, pair.peer)


def _ask_others(
    history: SignalHistory, pair: PeerSuspicion, state: PlanningInput
) -> Iterator[ExtraRound]:
    """Plan an echo with another member, which then calls the peer, or has by now. The schedule
    provides one witness in each epoch, but a single one may lie.
    """
    silent, peers = state.unreached, state.peers
    asked = [name for name in pair.asked if name not in silent]
    names: list[str | None] = [
        name
        for name in asked
        if pair.asked[name] != state.epoch and not peers.shuns(name, state.now)
    ]
    if len(asked) < state.around.witnesses(silent):
        out = {*pair.asked, *silent}
        names += [
            peers.choose(near=near, asked={}, ill=out, now=state.now) for near in (True, False)
        ]
    for name in filter(None, names):
        echo = Confirmation((peers.me, name), Kind.LIGHT)
        yield ExtraRound(echo, Purpose.ASK, history.track, pair.peer)


def early(track: Signal, history: Mapping[Signal, SignalHistory]) -> bool:
    """Return whether it is too early to decide on a signal. It is if other parts turned slow in the
    last round as well. By chance this part has become suspicious one round before them: it cannot
    be told from the node yet, nor the node from its leaf.
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
    """Return the kind of a pair's round that repeats a measurement: an echo for reachability."""
    return Kind.LIGHT if track == REACH else measurement.round.kind
