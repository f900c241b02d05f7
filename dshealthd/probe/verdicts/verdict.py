"""What one agent concludes from its own rounds, and from what its peers tell in them.

A part that is flagged in two of three scheduled rounds is suspect. Extra rounds with members that are known to be well confirm it, and
then the cause that explains most is accused: the leaf, if the neighbours find the same of themselves; a rail, a GPU, or the node, if they
do not; the link, if one pair is bad and both ends are well with others. Each agent accuses its own node and its own links; of others only
those that cannot speak for themselves. Rounds that were declined or inconclusive accuse nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from dshealthd.options import option
from dshealthd.probe.observation import Kind, Observation, Outcome, Part, Suspect
from dshealthd.probe.verdicts.accusation import AMBIGUOUS, Verdicts, accusations
from dshealthd.probe.verdicts.baseline import Series
from dshealthd.probe.verdicts.enquiry import Confirmation, Enquiry, State, early
from dshealthd.probe.verdicts.evidence import HARD, HOME, REACH, RUN, Case, Evidence, Item, Round, Told, Track, hard_track, listen, tell
from dshealthd.probe.verdicts.explanation import Cause, Surroundings, explain, reason_of
from dshealthd.probe.verdicts.links import SLOW, Links, accused_links, link
from dshealthd.probe.verdicts.outages import INTERMITTENT, SILENCES, Outages
from dshealthd.probe.verdicts.references import References

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from dshealthd.probe.verdicts.baseline import Baselines

__all__ = ["Confirmation", "Judge", "VerdictOptions"]

BUSY = "already_testing"
"""The reason of a round that was declined for another one in progress."""
_CALM = 0.6
"""The share of the way to the limit below which a timing counts as well: what ends an accusation lies below what starts one."""
_CLEARED = 3
"""Good rounds in a row that clear."""
_STEADY = 8
"""The same where good rounds and bad ones took turns."""
_LATEST = 6
"""Pairs that are told to peers, if they are of this epoch or the last one."""


@dataclass(frozen=True, kw_only=True)
class VerdictOptions:
    """How much it takes to accuse."""

    confirmations: int = option(4, "Extra rounds that must be flagged, with at most one that is not, before a part is accused.", minimum=2)
    told_ratio: float = option(0.07, "The own score, above 1, from which on a node takes a bad round on itself.", minimum=0.01)
    hold_epochs: int = option(4, "How many epochs an accusation of another node stands without new evidence.", minimum=2)


class Judge:
    """The verdicts of one agent; nothing of them is kept over a restart but the baselines."""

    def __init__(
        self, me: str, leaves: Mapping[str, str], baselines: Baselines, options: VerdictOptions, wall: Callable[[], float]
    ) -> None:
        """`leaves` names every member, with "" where its leaf is not known; `wall` gives Unix time in seconds."""
        self._me = me
        self._baselines = baselines
        self._options = options
        self._wall = wall
        self._high = 1 + options.told_ratio
        self._references = References(me, leaves)
        self._around = self._surroundings()
        self._evidence: dict[Track, Evidence] = {}
        self._verdicts: Verdicts = {}
        self._links = Links(self._references, high=self._high, confirmations=options.confirmations, hold=options.hold_epochs)
        self._enquiry = Enquiry(self._references)
        self._latest: dict[str, tuple[int, float]] = {}
        self._calls: dict[str, tuple[int, float]] = {}
        self._outages = Outages()
        self._epoch = -1
        self._told: tuple[tuple[str, float], ...] | None = None

    def members(self, leaves: Mapping[str, str]) -> None:
        """Take over a new list of members; what concerns those that are gone is forgotten."""
        self._references.members(leaves)
        self._around = self._surroundings()
        self._links.keep(leaves)
        for evidence in self._evidence.values():
            evidence.pairs = {peer: pair for peer, pair in evidence.pairs.items() if peer in leaves}

    def _surroundings(self) -> Surroundings:
        known = self._references
        return Surroundings(
            self._me, known.neighbours, known.strangers, self._high, self._options.confirmations, known_leaf=bool(known.leaf)
        )

    def observe(self, observation: Observation) -> tuple[Confirmation, ...]:
        """Take a round into account; return the extra round that is to be run at once, if one is needed."""
        if self._me not in observation.members:
            return ()
        peers = tuple(member for member in observation.members if member != self._me)
        self._enquiry.answered(observation.members)
        if observation.epoch >= 0:
            self._epoch = observation.epoch  # also where it is lower: the clock was wrong, and is not any more
        if observation.outcome in {Outcome.DECLINED, Outcome.INCONCLUSIVE}:
            self._references.declined(peers, observation.at, busy=observation.reason == BUSY)
            if observation.outcome is Outcome.DECLINED and observation.members[0] == self._me:
                self._reached(peers)
            if not peers:
                self._refuse_home()
            return self._ask()
        told = listen(observation, peers)
        round = Round(
            epoch=self._epoch,
            at=observation.at,
            kind=observation.kind,
            peers=peers,
            near=self._references.near(peers),
            extra=observation.epoch < 0,
            led=observation.members[0] == self._me,
            told=told,
        )
        for peer, word in told.items():
            self._references.heard(peer, observation.at, self._epoch, word)
        found = list(self._items(observation, round))
        for evidence, item in found:
            evidence.add(item, self._me, self._high)
        self._note_outages(observation, round)
        self._remember(observation, round, [item for _, item in found])
        self._told = None
        self._consider(round)
        return self._ask()

    def withdraw(self, confirmation: Confirmation) -> None:
        """Note that an extra round is not run after all; the next round asks for what is then needed."""
        self._enquiry.answered(confirmation.members)

    def _refuse_home(self) -> None:
        for evidence in self._evidence.values():
            if evidence.case:
                evidence.case.home_refused = True

    def _reached(self, peers: Iterable[str]) -> None:
        """Take back that peers cannot be reached: they have answered, if only to decline."""
        for peer in peers:
            self._links.met(peer, self._epoch, well=True, led=True)
            if REACH in self._evidence:
                self._evidence[REACH].pairs.pop(peer, None)

    # What a round measured

    def _items(self, observation: Observation, round: Round) -> Iterator[tuple[Evidence, Item]]:
        """Yield what a round says on each track; timings of rounds in which nothing is wrong are learnt."""
        ok = observation.outcome is Outcome.OK
        hard = hard_track(observation)
        for track in (HOME,) if observation.kind is Kind.LOCAL else (REACH,) if observation.kind is Kind.LIGHT else (REACH, RUN):
            bad = not ok and track == hard
            if track == RUN and hard == REACH and not ok:
                continue  # it did not come so far
            late = observation.late if track == RUN and bad else ()
            yield self._of(track), Item(round, HARD if bad else 1.0, bad, not bad, str(observation.outcome), late=late)
        if not ok:
            return
        family = str(observation.kind) if observation.kind in {Kind.LOCAL, Kind.LIGHT} else "fabric"
        width = len(observation.members)
        for timing in observation.timings:
            series = Series(
                observation.kind, observation.backend, timing.op, timing.size, timing.part, width, bool(round.peers) and not round.near
            )
            reading = self._baselines.ratio(series, timing.seconds)
            track = Track(family, observation.backend, timing.op, timing.size, timing.part)
            evidence = self._evidence.get(track) if reading is None else self._of(track)
            bad = False
            if reading is not None and evidence is not None:
                bad = reading.ratio >= reading.limit
                item = Item(round, reading.ratio, bad, reading.ratio < 1 + (reading.limit - 1) * _CALM, SLOW)
                yield evidence, item
            if not bad and not round.extra and (evidence is None or evidence.case is None) and not self._accuse_themselves(track, round):
                self._baselines.update(series, timing.seconds, round.at)

    def _accuse_themselves(self, track: Track, round: Round) -> bool:
        return any(word.accuses_itself(track, self._high) for word in round.told.values())

    def _of(self, track: Track) -> Evidence:
        evidence = self._evidence.get(track)
        if evidence is None:
            evidence = self._evidence[track] = Evidence(track)
        return evidence

    def _note_outages(self, observation: Observation, round: Round) -> None:
        """Note which peers gave no answer, and which did, but for those that take it on themselves."""
        if observation.outcome is Outcome.OK:
            self._outages.answered(round.peers, self._epoch)
        elif observation.outcome in SILENCES and hard_track(observation) == REACH:
            self._outages.silent((name for name in observation.late if name != self._me), self._epoch)
        self._outages.explained(name for name, word in round.told.items() if word.accuses_itself(REACH, self._high))

    def _remember(self, observation: Observation, round: Round, items: list[Item]) -> None:
        """Keep who was met, and what is told about that to others."""
        bad = [item.ratio for item in items if item.bad]
        for peer in round.peers:
            self._references.met(peer, round.at, well=not bad)
            self._links.met(peer, self._epoch, well=observation.outcome is Outcome.OK, led=round.led)
        if len(round.peers) == 1:
            ratio = max(bad) if bad else sorted(item.ratio for item in items)[len(items) // 2]
            for store in (self._latest, self._calls) if round.led else (self._latest,):
                store.pop(round.peers[0], None)
                store[round.peers[0]] = self._epoch, ratio
                if len(store) > _LATEST:
                    del store[next(iter(store))]

    # What it means

    def _consider(self, round: Round) -> None:
        """Open, decide and close cases."""
        if REACH not in self._verdicts and self._outages.many(self._epoch):
            reach = self._of(REACH)
            reach.case = Case.open(reach.window, round.at)
            self._verdicts[REACH] = Cause.SELF, INTERMITTENT
        for track, evidence in self._evidence.items():
            if evidence.case is None:
                if not evidence.suspicious():
                    if evidence.pairs:
                        self._links.review(evidence, self._epoch)
                    continue
                evidence.case = Case.open(evidence.window, round.at)
                continue
            cause = explain(evidence.case, track, self._around)
            if track in self._verdicts:
                self._review(track, evidence, cause)
            elif cause is Cause.NOTHING:
                evidence.forget()
            elif cause not in {Cause.MORE_NEAR, Cause.MORE_FAR} and not early(track, self._evidence):
                self._verdicts[track] = (cause, reason_of((*evidence.case.earlier, *evidence.case.items)))
                evidence.case.decided = round.at
        self._links.expire(self._epoch)

    def _review(self, track: Track, evidence: Evidence, cause: Cause) -> None:
        """Clear an accusation, or correct it."""
        assert evidence.case is not None  # noqa: S101 - a verdict has a case
        leaf_alone = self._verdicts[track][0] in {Cause.LEAF, Cause.FABRIC} and not any(i.bad and i.round.near for i in evidence.case.items)
        enough = _STEADY if self._verdicts[track][1] == INTERMITTENT else _CLEARED
        telling = [item for item in evidence.case.items if not (leaf_alone and item.round.near)][-enough:]
        if len(telling) == enough and all(item.good for item in telling):
            evidence.forget()
            self._outages.forget()
            evidence.pairs.clear()  # what was bad with others was this
            del self._verdicts[track]
        elif cause in {Cause.SELF, Cause.LEAF, Cause.FABRIC} and any(item.bad for item in evidence.case.items):
            self._verdicts[track] = (cause, reason_of((*evidence.case.earlier, *evidence.case.items)))

    def _ask(self) -> tuple[Confirmation, ...]:
        state = State(self._evidence, self._verdicts, self._links.gone, self._links.back, self._around, self._epoch, self._wall())
        return self._enquiry.next(state)

    # What is told

    def suspects(self) -> tuple[Suspect, ...]:
        """Return all accusations that stand now."""
        if not self._verdicts and not self._links.gone and not any(evidence.pairs for evidence in self._evidence.values()):
            return ()
        found = list(accusations(self._me, self._references.leaf, self._evidence, self._verdicts, self._wall()))
        own = any(suspect.part in {Part.NODE, Part.LEAF} for suspect in found)
        if not own:
            found += accused_links(self._me, self._evidence.values())
        if any(cause is Cause.PEER for cause, _ in self._verdicts.values()):
            found += [link(self._me, name, AMBIGUOUS) for name in self._references.leaves if name != self._me]
        found += self._links.suspects()
        return tuple(sorted(set(found), key=lambda suspect: (suspect.part, suspect.component, suspect.reason)))

    def score(self) -> float | None:
        """Return this node's own score, the median of its parts' ratios over its recent peers; None before the first round."""
        if any(track in self._verdicts or self._evidence[track].suspicious() for track in (REACH, RUN, HOME) if track in self._evidence):
            return HARD
        parts = self._ratios()
        return median(parts.values()) if parts else (1.0 if REACH in self._evidence else None)

    def scores(self) -> tuple[tuple[str, float], ...]:
        """Return what to tell in a round, for `Observation.scores` of all: the own score, slow parts, the ratios of the last pairs."""
        if self._told is None:
            slow = {e.track.word: e.ratio() or 1.0 for e in self._evidence.values() if e.track.word and (e.suspicious() or e.case)}
            way_out = [e for e in self._evidence.values() if e.leaves_badly()]
            pairs, calls = (
                {peer: value for peer, (epoch, value) in store.items() if epoch >= self._epoch - 1} for store in (self._latest, self._calls)
            )
            worst = max((item.ratio for e in way_out for item in e.far), default=1.0)
            self._told = tell(self._me, Told(self.score(), way_out=bool(way_out), pairs=pairs, calls=calls), slow, worst)
        return self._told

    def _ratios(self) -> dict[str, float]:
        """Return the ratio of every part, the worst of its sizes."""
        ratios: dict[str, float] = {}
        for track, evidence in self._evidence.items():
            if track.timed and track.family != "light" and (ratio := evidence.ratio()) is not None:
                ratios[track.part] = max(ratios.get(track.part, 0.0), ratio)
        return ratios
