"""The planner of extra rounds: which one is needed next to confirm or clear a suspicion.

Pure functions of what the detector knows: they change nothing. The detector records what it
requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from dshealthd.probe.observation import RoundKind
from dshealthd.probe.verdicts.accusation import AMBIGUOUS, Verdicts, waits_for_home
from dshealthd.probe.verdicts.company import Company
from dshealthd.probe.verdicts.explanation import CONFIRMATIONS, PEERS, explain
from dshealthd.probe.verdicts.pairs import HARD_BADS, PairSuspicion
from dshealthd.probe.verdicts.signals import REACH, RUN, Cause, Investigation, Signal, SignalHistory

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
    """This node first, alone for a local round; or a member that is asked to call another."""
    kind: RoundKind


@dataclass(frozen=True, slots=True)
class ExtraRound:
    """An extra round, and the investigation or the pair that it concerns."""

    confirmation: Confirmation
    signal: Signal | None = None
    peer: str = ""


@dataclass(frozen=True, slots=True)
class PlanningInput:
    """What the detector knows when it plans."""

    company: Company
    history: Mapping[Signal, SignalHistory]
    pairs: Mapping[str, PairSuspicion]
    verdicts: Verdicts
    unreached: Collection[str]
    """Members that did not answer when last called, or are in maintenance: no round is planned with
    them.
    """
    epoch: int
    now: float


def plan(state: PlanningInput) -> Iterator[ExtraRound]:
    """Yield the extra rounds that are needed, the one that matters most first.

    Undecided investigations come first: extra rounds are limited, and an outdated accusation does
    less harm than an unknown fault.
    """
    me = state.company.me
    for signal, history in state.history.items():
        investigation = history.investigation
        if investigation and not investigation.verdict and not early(signal, state.history):
            yield from _for_case(signal, investigation, state)
    if waits_for_home(state.history, state.verdicts, state.now):
        yield ExtraRound(Confirmation((me,), RoundKind.LOCAL))
    for signal in state.verdicts:
        investigation = state.history[signal].investigation
        if investigation and signal.local and _due(investigation.checked, state.epoch):
            yield ExtraRound(Confirmation((me,), RoundKind.LOCAL), signal)
    for pair in state.pairs.values():
        if not any(
            history.investigation
            for signal, history in state.history.items()
            if signal in pair.signals
        ):
            yield from _for_pair(pair, state)


def early(signal: Signal, history: Mapping[Signal, SignalHistory]) -> bool:
    """Return whether it is too early to decide on a signal. It is if other parts turned slow in the
    last round as well. By chance this part has become suspicious one round before them: it cannot
    be told from the node yet, nor the node from its leaf.
    """
    alike = [
        other
        for key, other in history.items()
        if key != signal and key._replace(part=signal.part) == signal and other.recent
    ]
    return sum(not other.recent[-1].good and not other.uneasy() for other in alike) >= _SIBLINGS


def _due(checked: int, epoch: int) -> bool:
    """Return whether an accusation is due to be checked. It also is if the clock was set back."""
    return not 0 <= epoch - checked < _RECHECK


def _for_case(
    signal: Signal, investigation: Investigation, state: PlanningInput
) -> Iterator[ExtraRound]:
    """Plan a round with a reference peer asked least so far, on the side that needs it."""
    me = state.company.me
    if signal.local:
        yield ExtraRound(Confirmation((me,), RoundKind.LOCAL), signal)
        return
    cause = explain(investigation, signal, state.company)
    met = Counter(entry.round.peer for entry in investigation.measurements)
    asked = met + Counter(entry.round.peer for entry in investigation.first if entry.bad)
    accused = {pair.peer for pair in state.pairs.values() if pair.accused}
    # If nobody on the needed side can be asked, a round with the other side still counts.
    for near in (True, False) if cause is Cause.MORE_NEAR else (False, True):
        name = state.company.choose(
            near=near, asked=asked, ill=accused | {*state.unreached}, now=state.now
        )
        # More rounds with the same peer prove nothing, as it may be at fault itself. They would use
        # up the minute's extra rounds while the other peers are only busy for a moment.
        if name and met[name] < CONFIRMATIONS:
            kind = RoundKind.LIGHT if signal == REACH else investigation.first[-1].round.kind
            yield ExtraRound(Confirmation((me, name), kind), signal)
            return


def _for_pair(pair: PairSuspicion, state: PlanningInput) -> Iterator[ExtraRound]:
    company, epoch = state.company, state.epoch
    me, rests = company.me, company.rests(pair.peer, state.now)
    again = [] if rests else [ExtraRound(Confirmation((me, pair.peer), pair.kind), peer=pair.peer)]
    others = pair.others(company)
    out = {pair.peer, *state.unreached}
    begins = epoch == pair.first.epoch
    if pair.accused and not (pair.accused == AMBIGUOUS and REACH in pair.signals):
        if _due(pair.checked, epoch):
            yield from again
    elif REACH in pair.signals:
        if begins:
            # An echo is cheap and shows at once whether one packet was lost or none gets through.
            if pair.bads < HARD_BADS:
                yield from again
            return
        words = pair.words
        is_due = pair.checked != epoch
        if is_due and pair.sought > max((at for at, _ in words.values()), default=-1):
            yield from again  # who was asked last has not answered
        asked = {name for name, (at, _) in words.items() if at == epoch}
        if len(asked) < PEERS and others.ill <= _ILL:
            # Those that were asked before come first: what they say now counts.
            before = dict.fromkeys(words, -1)
            name = company.choose(near=None, asked=before, ill=out | asked, now=state.now)
            if name:
                yield ExtraRound(Confirmation((name, pair.peer), RoundKind.LIGHT), peer=pair.peer)
        # After others were asked: extra rounds are few, and the next epochs call it anyway.
        if is_due:
            yield from again
        agreed = words and all(well for _, well in words.values())
        if agreed and pair.missing > 0:
            yield from again
    elif RUN in pair.signals and len(pair.echoes(company)) < PEERS:
        # While it waited in vain, and others for it, both ends have met nobody else. Echoes with
        # others show at once which of the ends loses packets.
        known = out | pair.echoes(company).keys()
        if name := company.choose(near=None, asked={}, ill=known, now=state.now):
            yield ExtraRound(Confirmation((me, name), RoundKind.LIGHT))
    # What others know may be older than the fault in its first epoch, and until a good round with
    # another peer this node may be ill itself.
    if REACH in pair.signals or pair.accused or begins or not others.good or others.ill > _ILL:
        return
    if rests or pair.peer in state.unreached:
        return
    if pair.bads >= HARD_BADS:
        met, near = pair.met(company), company.near(pair.peer)
        name = company.choose(near=near, asked=met, ill=out, now=state.now)
        # With several: the peer counts with how many this node is well.
        if name and (not others.fine or (len(met) < PEERS and name not in met)):
            yield ExtraRound(Confirmation((me, name), pair.kind))
            return
    if pair.missing > 0:
        yield from again
    elif pair.checked != epoch:
        # More rounds of the pair add nothing, and keep its ends from others. What is still missing
        # is that both are well with these: an echo brings the peer's report.
        yield ExtraRound(Confirmation((me, pair.peer), RoundKind.LIGHT), peer=pair.peer)
