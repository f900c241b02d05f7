"""Which extra round is needed next, to confirm what is suspected or to see whether it is over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dshealthd.probe.observation import Kind
from dshealthd.probe.verdicts.accusation import LOCAL, Verdicts, waits_for_home
from dshealthd.probe.verdicts.evidence import HOME, REACH, Case, Evidence, Item, Pair, Track
from dshealthd.probe.verdicts.explanation import Cause, Surroundings, explain
from dshealthd.probe.verdicts.links import HARD_BADS, SLOW_MORE, mostly_well

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.probe.verdicts.references import References

_PENDING = 30.0
"""Seconds after which an extra round that was asked and never came is given up."""
_RECHECK = 3
"""Epochs between two rounds that see whether an accused link or GPU has recovered."""
_ILL = 2
"""Bad rounds with others after which a pair is left alone: it is not the pair, or not the pair alone."""
_ALIKE = 2


@dataclass(frozen=True, slots=True)
class Confirmation:
    """An extra round to run at once."""

    members: tuple[str, ...]
    """This node first; alone for a local round."""
    kind: Kind


@dataclass(frozen=True, slots=True)
class State:
    """What a judge knows when it asks."""

    evidence: Mapping[Track, Evidence]
    verdicts: Verdicts
    gone: Collection[str]
    """Members that are not worth asking."""
    back: Collection[str]
    """Those of them that have called since."""
    around: Surroundings
    epoch: int
    now: float

    @property
    def unreached(self) -> set[str]:
        """Members that did not answer when they were called last: nothing else can be learnt of them now."""
        pairs = self.evidence[REACH].pairs.values() if REACH in self.evidence else ()
        return {*self.gone, *(pair.peer for pair in pairs if pair.since is not None)}


class Enquiry:
    """Asks for one extra round at a time."""

    def __init__(self, references: References) -> None:
        self._references = references
        self._me = references.me
        self._pending: dict[frozenset[str], float] = {}

    def answered(self, members: Collection[str]) -> None:
        """Note that a round of these members was run, or will not be."""
        self._pending.pop(frozenset(members), None)

    def next(self, state: State) -> tuple[Confirmation, ...]:
        """Return the extra round that matters most, if none is under way and one is needed."""
        self._pending = {members: at for members, at in self._pending.items() if 0 <= state.now - at < _PENDING}
        wanted = None if self._pending else next(self._wanted(state), None)
        if wanted is None:
            return ()
        self._pending[frozenset(wanted.members)] = state.now
        return (wanted,)

    def _wanted(self, state: State) -> Iterator[Confirmation]:
        for track, evidence in state.evidence.items():
            if evidence.case and track not in state.verdicts and not early(track, state.evidence):
                yield from self._for_case(track, evidence.case, state)
        if waits_for_home(state.evidence, state.verdicts, state.now):
            yield Confirmation((self._me,), Kind.LOCAL)
        for track in state.verdicts:
            case = state.evidence[track].case
            if case and track.family in {LOCAL, HOME.family} and not 0 <= state.epoch - case.checked < _RECHECK:
                case.checked = state.epoch
                yield Confirmation((self._me,), Kind.LOCAL)
        for name in state.back:
            yield Confirmation((self._me, name), Kind.LIGHT)
        for evidence in state.evidence.values():
            if not evidence.case:
                for pair in evidence.pairs.values():
                    yield from self._for_pair(evidence, pair, state)

    def _for_case(self, track: Track, case: Case, state: State) -> Iterator[Confirmation]:
        """Ask for a reference that has not been asked yet, on the side from which less is known."""
        case.asked += 1
        if track.family in {LOCAL, HOME.family}:
            yield Confirmation((self._me,), Kind.LOCAL)
            return
        cause = explain(case, track, state.around)
        accused = {pair.peer for evidence in state.evidence.values() for pair in evidence.pairs.values() if pair.accused}
        asked = Counter(peer for item in (*case.earlier, *case.items) for peer in item.round.peers)
        for near in (True, False) if cause is Cause.MORE_NEAR else (False, True):
            name = self._references.choose(near=near, asked=asked, ill=accused | state.unreached, now=state.now)
            if name:
                yield Confirmation((self._me, name), _kind(track, case.earlier[-1]))
                return

    def _for_pair(self, evidence: Evidence, pair: Pair, state: State) -> Iterator[Confirmation]:
        """See to a peer: only when this node is known to be well, by a later round with somebody else."""
        kind = _kind(evidence.track, pair.first)
        again = Confirmation((self._me, pair.peer), kind)
        if self._references.shuns(pair.peer, state.now) or (evidence.track != REACH and pair.peer in state.unreached):
            return
        if pair.accused:
            if not 0 <= state.epoch - pair.checked < _RECHECK:
                pair.checked = state.epoch
                yield again
            return
        if not pair.later or pair.ill > _ILL or state.epoch == pair.first.round.epoch:
            return
        uncalled = evidence.track == REACH and pair.first.round.led and pair.bads >= HARD_BADS  # others tell whether they can call it
        speaks = evidence.track.timed or (
            not uncalled and pair.since is not None and self._references.spoke(pair.peer, pair.since.round.at)
        )
        if speaks and pair.bads >= HARD_BADS and not mostly_well(pair):
            near = self._references.near([pair.peer])
            if name := self._references.choose(near=near, asked={}, ill={pair.peer, *state.unreached}, now=state.now):
                yield Confirmation((self._me, name), kind)
                return
        if speaks or pair.bads < HARD_BADS:
            # More of the same says no more; what is missing then is that both ends are well with others, which other epochs tell.
            enough = state.around.confirmations + SLOW_MORE if evidence.track.timed else HARD_BADS + 1
            if pair.bads < enough or pair.checked != state.epoch:
                pair.checked = state.epoch
                yield again
        elif pair.hearings and (state.epoch <= pair.first.round.epoch + 1 or state.epoch == pair.heard):
            return  # another epoch is needed: that they were well with it may be older than what is wrong, and nobody knows more by now
        elif name := self._references.witness(pair.peer, state.epoch, state.now):
            pair.hearings, pair.heard = pair.hearings + 1, state.epoch
            yield Confirmation((self._me, name), kind)


def early(track: Track, evidence: Mapping[Track, Evidence]) -> bool:
    """Tell whether other parts were slow in the last round too, and not before.

    Chance has made this part suspect one round before them: it is too early to tell it from the node, or the node from its leaf.
    """
    alike = [other for key, other in evidence.items() if key != track and key._replace(part=track.part) == track]
    return sum(bool(other.window) and not other.window[-1].good and not other.uneasy() for other in alike) >= _ALIKE


def _kind(track: Track, item: Item) -> Kind:
    """Return the kind of round that measures the same again, with two nodes; an echo where only reach is in question."""
    if track == REACH:
        return Kind.LIGHT
    return Kind.PAIR if item.round.kind is Kind.GROUP else item.round.kind
