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
from dshealthd.probe.accusation import AMBIGUOUS, LOCAL, Verdicts, accusations, waits_for_home
from dshealthd.probe.baseline import Series
from dshealthd.probe.evidence import HARD, HOME, REACH, RUN, Case, Evidence, Item, Pair, Round, Told, Track, hard_track, listen, tell
from dshealthd.probe.explanation import Cause, Surroundings, explain, reason_of
from dshealthd.probe.observation import Kind, Observation, Outcome, Part, Suspect
from dshealthd.probe.references import References, unanswered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dshealthd.probe.baseline import Baselines

SLOW = "slow"
_CALM = 0.6
"""The share of the way to the limit below which a timing counts as well: what ends an accusation lies below what starts one."""
_CLEARED = 3
"""Good rounds in a row that clear."""
_LEAF_GONE = 3
"""Members of a leaf that are gone, and none that is well, make it the leaf."""
_STALE = 6
"""Epochs after which a suspicion of a peer that was not followed up is dropped."""
_RECHECK = 3
"""Epochs between two rounds that see whether an accused link has recovered."""
_LINK_BADS = 2
"""A link needs so many flagged rounds more than confirmations: each single flagged round opens a case on one."""
_LINK_MOST = 12
"""Flagged rounds of a pair after which it is called ambiguous, if the ends do not agree."""
_LINK_HARD = 2
"""The first and one that was asked; then others are heard."""
_ALIKE = 2
_HEARINGS = 4
_PENDING = 30.0
"""Seconds after which an extra round that was asked and never came is given up."""
_LATEST = 6
"""Pairs that are told to peers, if they are of this epoch or the last one."""


@dataclass(frozen=True, kw_only=True)
class VerdictOptions:
    """How much it takes to accuse."""

    confirmations: int = option(4, "Extra rounds that must be flagged, with at most one that is not, before a part is accused.", minimum=2)
    told_ratio: float = option(0.07, "The own score, above 1, from which on a node takes a bad round on itself.", minimum=0.01)
    hold_epochs: int = option(4, "How many epochs an accusation of another node stands without new evidence.", minimum=2)


@dataclass(frozen=True, slots=True)
class Confirmation:
    """An extra round to run at once."""

    members: tuple[str, ...]
    """This node first; alone for a local round."""
    kind: Kind


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
        self._others: dict[str, tuple[Suspect, int]] = {}
        """Other nodes that cannot speak for themselves, and the epoch of the last evidence."""
        self._pending: dict[frozenset[str], float] = {}
        self._latest: dict[str, tuple[int, float]] = {}
        self._epoch = -1
        self._told: tuple[tuple[str, float], ...] | None = None

    def members(self, leaves: Mapping[str, str]) -> None:
        """Take over a new list of members; what concerns those that are gone is forgotten."""
        self._references.members(leaves)
        self._around = self._surroundings()
        self._others = {name: other for name, other in self._others.items() if name in leaves}
        for evidence in self._evidence.values():
            evidence.pairs = {peer: pair for peer, pair in evidence.pairs.items() if peer in leaves}

    def _surroundings(self) -> Surroundings:
        known = self._references
        return Surroundings(known.neighbours, known.strangers, self._high, self._options.confirmations, known_leaf=bool(known.leaf))

    def observe(self, observation: Observation) -> tuple[Confirmation, ...]:
        """Take a round into account; return the extra round that is to be run at once, if one is needed."""
        if self._me not in observation.members:
            return ()
        peers = tuple(member for member in observation.members if member != self._me)
        self._pending.pop(frozenset(observation.members), None)
        self._epoch = max(self._epoch, observation.epoch)
        if observation.outcome in {Outcome.DECLINED, Outcome.INCONCLUSIVE}:
            self._references.declined(peers, observation.at)
            if not peers:
                self._refuse_home()
            return self._ask()
        told = listen(observation, peers)
        round = Round(self._epoch, observation.at, observation.kind, peers, self._references.near(peers), observation.epoch < 0, told)
        for peer, word in told.items():
            self._references.heard(peer, observation.at, word.pairs)
        found = list(self._items(observation, round))
        for evidence, item in found:
            evidence.add(item, self._me, self._high)
        self._remember(observation, round, [item for _, item in found])
        self._told = None
        self._consider(round)
        return self._ask()

    def withdraw(self, confirmation: Confirmation) -> None:
        """Note that an extra round is not run after all; the next round asks for what is then needed."""
        self._pending.pop(frozenset(confirmation.members), None)

    def _refuse_home(self) -> None:
        for evidence in self._evidence.values():
            if evidence.case:
                evidence.case.home_refused = True

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
            evidence = self._of(Track(family, observation.backend, timing.op, timing.size, timing.part))
            bad = False
            if reading is not None:
                bad = reading.ratio >= reading.limit
                item = Item(round, reading.ratio, bad, reading.ratio < 1 + (reading.limit - 1) * _CALM, SLOW)
                yield evidence, item
            if not bad and not round.extra and evidence.case is None and not self._accuse_themselves(evidence.track, round):
                self._baselines.update(series, timing.seconds, round.at)

    def _accuse_themselves(self, track: Track, round: Round) -> bool:
        return any(word.accuses_itself(track, self._high) for word in round.told.values())

    def _of(self, track: Track) -> Evidence:
        evidence = self._evidence.get(track)
        if evidence is None:
            evidence = self._evidence[track] = Evidence(track)
        return evidence

    def _remember(self, observation: Observation, round: Round, items: list[Item]) -> None:
        """Keep who was met, and what is told about that to others."""
        bad = [item.ratio for item in items if item.bad]
        for peer in round.peers:
            self._references.met(peer, round.at, well=not bad)
            if observation.outcome is Outcome.OK:
                self._others.pop(peer, None)
        if len(round.peers) == 1:
            peer = round.peers[0]
            self._latest.pop(peer, None)
            self._latest[peer] = self._epoch, max(bad) if bad else sorted(item.ratio for item in items)[len(items) // 2]
            if len(self._latest) > _LATEST:
                del self._latest[next(iter(self._latest))]

    # What it means

    def _consider(self, round: Round) -> None:
        """Open, decide and close cases."""
        for track, evidence in self._evidence.items():
            if evidence.case is None:
                if not evidence.suspicious():
                    if evidence.pairs:
                        self._age(evidence)
                    continue
                evidence.case = Case.open(evidence.window, round.at)
                continue
            cause = explain(evidence.case, track, self._around)
            if track in self._verdicts:
                self._review(track, evidence, cause)
            elif cause is Cause.NOTHING:
                evidence.forget()
            elif cause not in {Cause.MORE_NEAR, Cause.MORE_FAR} and not self._early(track):
                self._verdicts[track] = (cause, reason_of((*evidence.case.earlier, *evidence.case.items)))
                evidence.case.decided = round.at
        self._others = {
            name: (suspect, epoch) for name, (suspect, epoch) in self._others.items() if self._epoch - epoch <= self._options.hold_epochs
        }

    def _early(self, track: Track) -> bool:
        """Tell whether other parts were slow in the last round too, and not before.

        Chance has made this part suspect one round before them: it is too early to tell it from the node, or the node from its leaf.
        """
        alike = [other for key, other in self._evidence.items() if key != track and key._replace(part=track.part) == track]
        return sum(bool(other.window) and not other.window[-1].good and not other.uneasy() for other in alike) >= _ALIKE

    def _review(self, track: Track, evidence: Evidence, cause: Cause) -> None:
        """Clear an accusation, or correct it."""
        assert evidence.case is not None  # noqa: S101 - a verdict has a case
        leaf_alone = self._verdicts[track][0] in {Cause.LEAF, Cause.FABRIC} and not any(i.bad and i.round.near for i in evidence.case.items)
        telling = [item for item in evidence.case.items if not (leaf_alone and item.round.near)][-_CLEARED:]
        if len(telling) == _CLEARED and all(item.good for item in telling):
            evidence.forget()
            evidence.pairs.clear()  # what was bad with others was this
            del self._verdicts[track]
        elif cause in {Cause.SELF, Cause.LEAF, Cause.FABRIC}:
            self._verdicts[track] = (cause, reason_of((*evidence.case.earlier, *evidence.case.items)))

    def _age(self, evidence: Evidence) -> None:
        """Decide on peers, and drop what was not followed up."""
        for peer, pair in list(evidence.pairs.items()):
            if pair.accused:
                continue
            if self._epoch - pair.touched > _STALE:
                del evidence.pairs[peer]
            elif evidence.track.timed:
                self._weigh(pair)
            elif pair.bads >= _LINK_HARD:
                self._hear(evidence, pair)

    def _weigh(self, pair: Pair) -> None:
        """Accuse the link of a slow pair, if both ends are well with others and both find the pair slow."""
        if pair.bads < self._options.confirmations + _LINK_BADS or not _mostly_well(pair):
            return
        opinion = self._references.opinion(pair.peer)
        if opinion is not None and opinion >= self._high and self._references.vouched(pair.peer, self._high):
            pair.accused, pair.reason = True, SLOW
        elif pair.bads >= _LINK_MOST:
            pair.accused, pair.reason = True, AMBIGUOUS

    def _hear(self, evidence: Evidence, pair: Pair) -> None:
        """Tell a peer that is gone from a way that is gone, by what others know of the peer."""
        if self._epoch == pair.first.round.epoch:
            return  # what others have met until now may be older than the fault
        since, reason = pair.first.round.at, pair.first.reason
        known = self._references.opinions(pair.peer, since)
        if self._references.spoke(pair.peer, since) or (known and not unanswered(known)):
            pair.accused, pair.reason = True, reason
        elif known:
            del evidence.pairs[pair.peer]
            self._accuse(pair.peer, reason, since)
        elif pair.hearings >= _HEARINGS:
            pair.accused, pair.reason = True, AMBIGUOUS

    def _accuse(self, name: str, reason: str, since: float) -> None:
        """Accuse a node that others do not reach either; or its leaf, where several are gone and none is well."""
        self._others[name] = Suspect(Part.NODE, name, reason), self._epoch
        leaf = self._references.leaves.get(name, "")
        gone = [other for other in self._others if self._references.leaves.get(other) == leaf]
        if leaf and leaf != self._references.leaf and len(gone) >= _LEAF_GONE and not self._references.well(leaf, since):
            for other in gone:
                self._others[other] = Suspect(Part.LEAF, leaf, reason), self._others[other][1]

    # What to run next

    def _ask(self) -> tuple[Confirmation, ...]:
        """Return the next extra round, if none is under way."""
        now = self._wall()
        self._pending = {members: at for members, at in self._pending.items() if 0 <= now - at < _PENDING}
        wanted = None if self._pending else next(self._wanted(now), None)
        if wanted is None:
            return ()
        self._pending[frozenset(wanted.members)] = now
        return (wanted,)

    def _wanted(self, now: float) -> Iterator[Confirmation]:
        """Yield the extra rounds that are needed, the one that matters most first."""
        for track, evidence in self._evidence.items():
            if evidence.case and track not in self._verdicts and not self._early(track):
                yield from self._for_case(track, evidence.case, now)
        if waits_for_home(self._evidence, self._verdicts, now):
            yield Confirmation((self._me,), Kind.LOCAL)
        for evidence in self._evidence.values():
            if not evidence.case:
                for pair in evidence.pairs.values():
                    yield from self._for_pair(evidence, pair, now)

    def _for_case(self, track: Track, case: Case, now: float) -> Iterator[Confirmation]:
        cause = explain(case, track, self._around)
        if track.family in {LOCAL, HOME.family}:
            case.asked += 1
            yield Confirmation((self._me,), Kind.LOCAL)
            return
        ill = {pair.peer for evidence in self._evidence.values() for pair in evidence.pairs.values() if pair.accused} | self._others.keys()
        avoid = {peer for item in (*case.earlier, *case.items) for peer in item.round.peers}
        for near in (True, False) if cause is Cause.MORE_NEAR else (False, True):
            name = self._references.choose(near=near, avoid=avoid, ill=ill, now=now)
            if name:
                case.asked += 1
                yield Confirmation((self._me, name), Kind.LIGHT if track == REACH else _kind(case.earlier[-1]))
                return

    def _for_pair(self, evidence: Evidence, pair: Pair, now: float) -> Iterator[Confirmation]:
        """See to a peer: only when this node is known to be well, by a later round with somebody else."""
        kind = Kind.LIGHT if evidence.track == REACH else _kind(pair.first)
        again = Confirmation((self._me, pair.peer), kind)
        if pair.accused:
            if self._epoch - pair.checked >= _RECHECK:
                pair.checked = self._epoch
                yield again
            return
        if not pair.well or self._epoch == pair.first.round.epoch:
            return
        if evidence.track.timed and pair.bads >= _LINK_HARD and not _mostly_well(pair):
            name = self._references.choose(near=self._references.near([pair.peer]), avoid={pair.peer}, ill={pair.peer}, now=now)
            if name:
                yield Confirmation((self._me, name), kind)
                return
        if evidence.track.timed or pair.bads < _LINK_HARD:
            yield again
            return
        witness = self._references.witness(pair.peer, self._epoch, now)
        if witness:
            pair.hearings += 1
            yield Confirmation((self._me, witness), kind)

    # What is told

    def suspects(self) -> tuple[Suspect, ...]:
        """Return all accusations that stand now."""
        if not self._verdicts and not self._others and not any(evidence.pairs for evidence in self._evidence.values()):
            return ()
        found = list(accusations(self._me, self._references.leaf, self._evidence, self._verdicts, self._wall()))
        own = any(suspect.part in {Part.NODE, Part.LEAF} for suspect in found)
        links = [(pair.peer, pair.reason) for evidence in self._evidence.values() for pair in evidence.pairs.values() if pair.accused]
        if any(cause is Cause.PEER for cause, _ in self._verdicts.values()):
            links += [(name, AMBIGUOUS) for name in self._references.leaves if name != self._me]
        found += [Suspect(Part.LINK, "--".join(sorted((self._me, peer))), reason) for peer, reason in links if not own]
        found += [suspect for suspect, _ in self._others.values()]
        return tuple(sorted(set(found), key=lambda suspect: (suspect.part, suspect.component, suspect.reason)))

    def score(self) -> float | None:
        """Return this node's own score, the median of its parts' ratios over its recent peers; None before the first round."""
        if any(self._evidence[track].suspicious() for track in (REACH, RUN, HOME) if track in self._evidence):
            return HARD
        parts = self._ratios()
        return median(parts.values()) if parts else (1.0 if REACH in self._evidence else None)

    def scores(self) -> tuple[tuple[str, float], ...]:
        """Return what to tell in a round, for `Observation.scores` of all: the own score, slow parts, the ratios of the last pairs."""
        if self._told is None:
            slow = {e.track.part: e.ratio() or 1.0 for e in self._evidence.values() if e.track.part and (e.suspicious() or e.case)}
            way_out = [e for e in self._evidence.values() if e.leaves_badly()]
            pairs = {peer: value for peer, (epoch, value) in self._latest.items() if epoch >= self._epoch - 1}
            worst = max((item.ratio for e in way_out for item in e.far), default=1.0)
            self._told = tell(self._me, Told(self.score(), way_out=bool(way_out), pairs=pairs), slow, worst)
        return self._told

    def _ratios(self) -> dict[str, float]:
        """Return the ratio of every part, the worst of its sizes."""
        ratios: dict[str, float] = {}
        for track, evidence in self._evidence.items():
            if track.timed and track.family != "light" and (ratio := evidence.ratio()) is not None:
                ratios[track.part] = max(ratios.get(track.part, 0.0), ratio)
        return ratios


def _mostly_well(pair: Pair) -> bool:
    """Tell whether this node has been well with others since the pair was bad first."""
    return pair.well > max(1, 2 * pair.ill)


def _kind(item: Item) -> Kind:
    """Return the kind of round that measures the same again, with two nodes."""
    return Kind.PAIR if item.round.kind is Kind.GROUP else item.round.kind
