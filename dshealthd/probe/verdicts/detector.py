"""The detector of suspects: what one agent concludes from its own rounds, and what its peers tell.

A part that is flagged in two of three scheduled rounds is suspect. Extra rounds with members that
are known to be well confirm it, and then the cause that explains most is accused: the leaf, if the
neighbours find the same of themselves; a rail, a GPU, or the node, if they do not; the link, if one
pair is bad and both ends are well with others. Each agent accuses its own node and its own links;
of others only those that cannot speak for themselves. Rounds that were declined or inconclusive
accuse nobody.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from dshealthd.probe.members.schedule import PAIR
from dshealthd.probe.observation import Kind, Observation, Outcome, Part, Suspect
from dshealthd.probe.verdicts.accusation import AMBIGUOUS, Verdicts, accusations
from dshealthd.probe.verdicts.baseline import TimingClass
from dshealthd.probe.verdicts.explanation import Cause, Surroundings, blamed, explain, reason_of
from dshealthd.probe.verdicts.links import SLOW, Links, accused_links, link
from dshealthd.probe.verdicts.outages import INTERMITTENT, SILENCES, Outages
from dshealthd.probe.verdicts.peer_history import PeerHistory
from dshealthd.probe.verdicts.planner import (
    Confirmation,
    NextStep,
    PlanningInput,
    Purpose,
    early,
    plan,
)
from dshealthd.probe.verdicts.recent_rounds import RecentRounds
from dshealthd.probe.verdicts.signals import (
    HARD,
    OWN_NODE,
    REACH,
    RUN,
    Investigation,
    Measurement,
    ObservedRound,
    PeerReport,
    Signal,
    SignalHistory,
    decode_scores,
    encode_scores,
    hard_track,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from dshealthd.probe.options import VerdictOptions
    from dshealthd.probe.verdicts.baseline import Baselines

__all__ = ["Confirmation", "Detector"]

BUSY = "already_testing"
"""The reason of a round that was declined for another one in progress."""
_CALM = 0.6
"""The share of the way to the limit below which a timing counts as well.

What ends an accusation lies below what starts one.
"""
_CLEARED = 3
"""Good rounds in a row that clear."""
_STEADY = 8
"""The same where good rounds and bad ones took turns."""
_PENDING = 30.0
"""Seconds after which an extra round that was asked for and never came is given up."""


class Detector:
    """The verdicts of one agent; nothing of them is kept over a restart but the baselines."""

    def __init__(
        self,
        me: str,
        leaves: Mapping[str, str],
        baselines: Baselines,
        options: VerdictOptions,
        wall: Callable[[], float],
        group_size: int = PAIR,
    ) -> None:
        """`leaves` names every member, with "" where its leaf is not known.

        `wall` gives Unix time in seconds, `group_size` the nodes of a scheduled round.
        """
        self._me = me
        self._baselines = baselines
        self._options = options
        self._wall = wall
        self._high = 1 + options.told_ratio
        self._peer_history = PeerHistory(me, leaves, group_size)
        self._around = self._surroundings()
        self._history: dict[Signal, SignalHistory] = {}
        self._verdicts: Verdicts = {}
        self._links = Links(
            self._peer_history,
            high=self._high,
            confirmations=options.confirmations,
            hold=options.hold_epochs,
        )
        self._pending: dict[frozenset[str], float] = {}
        """Members of the extra rounds that are under way, and when they were asked for."""
        self._recent = RecentRounds(me, self._high)
        self._outages = Outages()
        self._epoch = -1
        self._scheduled: tuple[int, set[str]] = -1, set()
        """The epoch of the last scheduled round that another node led, and with whom."""
        self._told: tuple[tuple[str, float], ...] | None = None

    def take_members(self, leaves: Mapping[str, str]) -> None:
        """Take over a new list of members; those that are gone are no suspects."""
        self._peer_history.take_members(leaves)
        self._around = self._surroundings()
        self._links.keep(leaves)
        self._recent.keep(leaves)
        for history in self._history.values():
            for pairs in (history.pairs, history.ended):
                for peer in pairs.keys() - leaves.keys():
                    del pairs[peer]

    def _surroundings(self) -> Surroundings:
        known = self._peer_history
        return Surroundings(
            self._me,
            known.intra_leaf,
            known.inter_leaf,
            self._high,
            self._options.confirmations,
            known_leaf=bool(known.leaf),
        )

    def observe(self, observation: Observation) -> tuple[Confirmation, ...]:
        """Take a round into account for suspects; return the extra round that is to be run at once,
        if one is needed.
        """
        if self._me not in observation.members:
            return ()
        peers = tuple(member for member in observation.members if member != self._me)
        # By members, whoever led: a round of the same pair that the peer began answers as much.
        self._pending.pop(frozenset(observation.members), None)
        led = observation.members[0] == self._me
        scheduled = self._is_scheduled(observation, peers)
        if scheduled:
            # Also where it is lower: the clock was wrong, and is not any more.
            self._epoch = observation.epoch
        if observation.outcome in {Outcome.DECLINED, Outcome.INCONCLUSIVE}:
            # Of a round that another one led, its word alone says who else has declined.
            who = peers if led else observation.members[:1]
            self._peer_history.declined(who, observation.at, busy=observation.reason == BUSY)
            if observation.outcome is Outcome.DECLINED and led:
                self._reached(peers)
                for peer in peers:
                    self._recent.declined(peer, self._epoch)
                self._told = None
            if not peers:
                # Policy keeps the GPUs from the round that would tell an adapter from its GPU: a
                # case that waits for it must be decided without.
                self._refuse_home()
            return self._ask()
        told = decode_scores(observation, peers)
        round = ObservedRound(
            epoch=self._epoch,
            at=observation.at,
            kind=observation.kind,
            peers=peers,
            near=self._peer_history.near(peers),
            extra=not scheduled,
            led=led,
            told=told,
        )
        for peer, word in told.items():
            self._peer_history.heard(peer, observation.at, self._epoch, word)
        found = list(self._items(observation, round))
        for history, measurement in found:
            history.add(measurement, self._me, self._high)
        self._note_outages(observation, round)
        self._remember(observation, round, found)
        self._told = None
        self._consider(round)
        return self._ask()

    def _is_scheduled(self, observation: Observation, peers: tuple[str, ...]) -> bool:
        """Tell whether the schedule asked for a round, and not the member that led it.

        Who else leads a round, or leads one again, has chosen this node: what it then sees is
        evidence on the two of them alone.
        """
        epoch = observation.epoch
        if epoch < 0 or not peers or observation.members[0] == self._me:
            # Whom this node leads is its own choice, a substitute's too; only a choice of others
            # can be aimed at it.
            return epoch >= 0
        if not self._peer_history.scheduled(observation.members, epoch):
            return False
        if observation.outcome is Outcome.DECLINED:
            return True  # a member that is in another round tries again
        if self._scheduled[0] != epoch:
            self._scheduled = epoch, set()
        if self._scheduled[1] & set(peers):
            return False
        # The first round with a peer in an epoch counts, so that it cannot add evidence by running
        # more of them.
        self._scheduled[1].update(peers)
        return True

    def withdraw(self, confirmation: Confirmation) -> None:
        """Note for the detector that an extra round is not run after all.

        The next round asks for what is then needed.
        """
        self._pending.pop(frozenset(confirmation.members), None)

    def _refuse_home(self) -> None:
        for history in self._history.values():
            if history.investigation:
                history.investigation.home_refused = True

    def _reached(self, peers: Iterable[str]) -> None:
        """Take back the suspicion of peers that cannot be reached: they have answered."""
        for peer in peers:
            self._links.met(peer, self._epoch, well=True, led=True)
            if REACH in self._history:
                self._history[REACH].pairs.pop(peer, None)

    # What a round measured

    def _items(
        self, observation: Observation, round: ObservedRound
    ) -> Iterator[tuple[SignalHistory, Measurement]]:
        """Yield what a round says to the detector on each track.

        Timings of rounds in which nothing is wrong are learnt.
        """
        ok = observation.outcome is Outcome.OK
        hard = hard_track(observation)
        for track in (
            (OWN_NODE,)
            if observation.kind is Kind.LOCAL
            else (REACH,)
            if observation.kind is Kind.LIGHT
            else (REACH, RUN)
        ):
            bad = not ok and track == hard
            if track == RUN and hard == REACH and not ok:
                continue  # it did not come so far
            late = observation.late if track == RUN and bad else ()
            yield (
                self._of(track),
                Measurement(
                    round, HARD if bad else 1.0, bad, not bad, str(observation.outcome), late=late
                ),
            )
        if not ok:
            return
        family = str(observation.kind) if observation.kind in {Kind.LOCAL, Kind.LIGHT} else "fabric"
        width = len(observation.members)
        for op, size, part, least, most in _times(observation):
            series = TimingClass(
                observation.kind,
                observation.backend,
                op,
                size,
                part,
                width,
                bool(round.peers) and not round.near,
            )
            track = Signal(family, observation.backend, op, size, part)
            measurement = self._timed(round, series, least, most)
            # While too little is known to judge, there is nothing to keep a history of.
            history = self._history.get(track) if measurement is None else self._of(track)
            is_exact, bad = least == most, False
            if measurement is not None and history is not None:
                bad = measurement.bad
                if is_exact or bad or measurement.good:
                    yield history, measurement
            if (
                # Learn only where nothing hints at a fault: an extra round is run because something
                # may be wrong, an open case may be a fault that does not flag each round, and a
                # peer that is slow by its own account slows this timing as well.
                is_exact
                and not bad
                and not round.extra
                and (history is None or history.investigation is None)
                and not self._accuse_themselves(track, round)
            ):
                self._baselines.update(series, least, round.at, round.peers)

    def _timed(
        self, round: ObservedRound, series: TimingClass, least: float, most: float
    ) -> Measurement | None:
        """Return what a time between `least` and `most` seconds says; None if too little is known
        to judge.
        """
        low = self._baselines.ratio(series, least)
        high = low if least == most else self._baselines.ratio(series, most)
        if low is None or high is None:
            return None
        return Measurement(
            round,
            # Of what is possible, what is nearest to the usual.
            min(max(1.0, low.ratio), high.ratio),
            low.ratio >= low.limit,
            high.ratio < 1 + (high.limit - 1) * _CALM,
            SLOW,
        )

    def _accuse_themselves(self, track: Signal, round: ObservedRound) -> bool:
        return any(word.accuses_itself(track, self._high) for word in round.told.values())

    def _of(self, track: Signal) -> SignalHistory:
        history = self._history.get(track)
        if history is None:
            history = self._history[track] = SignalHistory(track)
        return history

    def _note_outages(self, observation: Observation, round: ObservedRound) -> None:
        """Note for the detector which peers were silent, which answered, save the self-accused."""
        if observation.outcome is Outcome.OK:
            self._outages.answered(round.peers, self._epoch)
        elif observation.outcome in SILENCES and hard_track(observation) == REACH:
            self._outages.silent(
                (name for name in observation.late if name != self._me), self._epoch
            )
        self._outages.explained(
            name for name, word in round.told.items() if word.accuses_itself(REACH, self._high)
        )

    def _remember(
        self,
        observation: Observation,
        round: ObservedRound,
        found: list[tuple[SignalHistory, Measurement]],
    ) -> None:
        """Keep for later suspicions who was met, and what is told about that to others."""
        well = not any(measurement.bad for _, measurement in found)
        for peer in round.peers:
            self._peer_history.met(peer, round.at, well=well)
            self._links.met(
                peer, self._epoch, well=observation.outcome is Outcome.OK, led=round.led
            )
        if len(round.peers) == 1:
            measurements = [measurement for _, measurement in found]
            timings = sum(history.track.timed for history, _ in found)
            self._recent.note(round, measurements, timings, self._epoch)

    # What it means

    def _consider(self, round: ObservedRound) -> None:
        """Open, decide and close cases of suspects."""
        # Where packets are lost now and then, good rounds come between the bad ones and the window
        # never makes a suspect: such a fault is counted apart.
        if REACH not in self._verdicts and self._outages.many(self._epoch, self._around.liars):
            reach = self._of(REACH)
            reach.investigation = Investigation.open(reach.window, round.at)
            self._verdicts[REACH] = Cause.SELF, INTERMITTENT
        for track, history in self._history.items():
            if history.investigation is None:
                if not history.suspicious():
                    if history.pairs:
                        self._links.review(history, self._epoch)
                    continue
                # Decided by later rounds only: those that opened the case were picked for being
                # bad.
                history.investigation = Investigation.open(history.window, round.at)
                continue
            cause = explain(history.investigation, track, self._around)
            if track in self._verdicts:
                self._review(track, history, cause)
            elif cause is Cause.NOTHING:
                history.forget()
            elif cause not in {Cause.MORE_NEAR, Cause.MORE_FAR} and not early(track, self._history):
                self._verdicts[track] = (
                    cause,
                    reason_of(
                        (*history.investigation.earlier, *history.investigation.measurements)
                    ),
                )
                history.investigation.decided = round.at
        self._links.expire(self._epoch)

    def _review(self, track: Signal, history: SignalHistory, cause: Cause) -> None:
        """Clear a suspect, or correct what it is accused of."""
        assert history.investigation is not None  # noqa: S101 - a verdict has a case
        # A faulty uplink does not show inside the leaf, so good rounds there clear nothing.
        leaf_alone = self._verdicts[track][0] in {Cause.LEAF, Cause.FABRIC} and not any(
            i.bad and i.round.near for i in history.investigation.measurements
        )
        enough = _STEADY if self._verdicts[track][1] == INTERMITTENT else _CLEARED
        telling = [
            measurement
            for measurement in history.investigation.measurements
            if not (leaf_alone and measurement.round.near)
        ][-enough:]
        if len(telling) == enough and all(measurement.good for measurement in telling):
            history.forget()
            self._outages.forget()
            history.pairs.clear()  # what was bad with others was this
            history.ended.clear()
            del self._verdicts[track]
        elif cause in {Cause.SELF, Cause.LEAF, Cause.FABRIC} and any(
            measurement.bad for measurement in history.investigation.measurements
        ):
            self._verdicts[track] = (
                cause,
                reason_of((*history.investigation.earlier, *history.investigation.measurements)),
            )

    def _ask(self) -> tuple[Confirmation, ...]:
        """Return the extra round that the detector needs next, unless one is under way."""
        now = self._wall()
        self._pending = {
            # The lower bound ends the wait too where the wall clock was set back.
            members: at
            for members, at in self._pending.items()
            if 0 <= now - at < _PENDING
        }
        # One at a time: what it shows decides whether another one is needed at all.
        if self._pending:
            return ()
        state = PlanningInput(
            self._peer_history,
            self._history,
            self._verdicts,
            self._links.gone,
            self._links.back,
            self._recent.doubts(self._epoch),
            self._around,
            self._epoch,
            now,
        )
        planned = plan(state)
        self._note_plan(planned)
        if planned.step is None:
            return ()
        confirmation = planned.step.confirmation
        self._pending[frozenset(confirmation.members)] = now
        return (confirmation,)

    def _note_plan(self, planned: NextStep) -> None:
        """Note what the detector asked for, so that it is not asked for again at once."""
        for signal in planned.considered:
            if investigation := self._history[signal].investigation:
                investigation.asked += 1
        step = planned.step
        if step is not None and step.purpose is Purpose.SECOND:
            self._recent.second(step.peer, self._epoch)
        if step is None or step.signal is None:
            return
        history = self._history[step.signal]
        pair = history.pairs.get(step.peer)
        if step.purpose is Purpose.HEAR and pair is not None:
            pair.hearings, pair.heard = pair.hearings + 1, self._epoch
        elif step.purpose is Purpose.RECHECK and pair is not None:
            pair.checked = self._epoch
        elif step.purpose is Purpose.RECHECK and history.investigation is not None:
            history.investigation.checked = self._epoch

    # What is told

    def suspects(self) -> tuple[Suspect, ...]:
        """Return all suspects now: the accusations that stand."""
        if (
            not self._verdicts
            and not self._links.gone
            and not any(history.pairs for history in self._history.values())
        ):
            return ()
        found = list(
            accusations(
                self._me, self._peer_history.leaf, self._history, self._verdicts, self._wall()
            )
        )
        own = any(suspect.part in {Part.NODE, Part.LEAF} for suspect in found)
        # A node that is at fault finds all its links bad.
        if not own:
            found += accused_links(self._me, self._history.values())
        for track, (cause, _) in self._verdicts.items():
            investigation = self._history[track].investigation
            if cause is Cause.PEER and investigation is not None:
                found += [
                    link(self._me, name, AMBIGUOUS) for name in blamed(investigation, self._around)
                ]
        found += self._links.suspects()
        return tuple(
            sorted(
                set(found), key=lambda suspect: (suspect.part, suspect.component, suspect.reason)
            )
        )

    def score(self) -> float | None:
        """Return this node's own score, the median of its parts' ratios over its recent peers.

        None before the first round.
        """
        if any(
            track in self._verdicts or self._history[track].suspicious()
            for track in (REACH, RUN, OWN_NODE)
            if track in self._history
        ):
            return HARD
        parts = self._ratios()
        return median(parts.values()) if parts else (1.0 if REACH in self._history else None)

    def scores(self) -> tuple[tuple[str, float], ...]:
        """Return the detector's scores to tell in a round, for `Observation.scores` of all.

        The own score, slow parts, the ratios of the last pairs.
        """
        if self._told is None:
            slow = {
                e.track.word: e.ratio() or 1.0
                for e in self._history.values()
                if e.track.word and (e.suspicious() or e.investigation)
            }
            uplink = [e for e in self._history.values() if e.leaves_badly()]
            pairs, calls = self._recent.told(self._epoch)
            worst = max((measurement.ratio for e in uplink for measurement in e.far), default=1.0)
            self._told = encode_scores(
                self._me,
                PeerReport(self.score(), uplink=bool(uplink), pairs=pairs, calls=calls),
                slow,
                worst,
            )
        return self._told

    def _ratios(self) -> dict[str, float]:
        """Return the ratio of every part that may be a suspect, the worst of its sizes."""
        ratios: dict[str, float] = {}
        for track, history in self._history.items():
            if track.timed and track.family != "light" and (ratio := history.ratio()) is not None:
                ratios[track.part] = max(ratios.get(track.part, 0.0), ratio)
        return ratios


def _times(observation: Observation) -> Iterator[tuple[str, int, str, float, float]]:
    """Yield operation, size and part of each time of a round, and between which seconds it lies."""
    for timing in observation.timings:
        yield timing.op, timing.size, timing.part, timing.seconds, timing.seconds
    for bounds in observation.bounds:
        yield bounds.op, bounds.size, "", bounds.at_least, bounds.at_most
