"""The detector: what one agent concludes from its own rounds and from its peers' reports.

A part that is flagged in two of three scheduled rounds becomes suspicious. Extra rounds with
members known to be well confirm it. Then the cause that explains most is accused: the leaf, if the
neighbors report the same about themselves; otherwise a rail, a GPU or the node; the link, if one
pair is bad and both its ends are well with others. Each agent accuses its own node and its own
links, and other nodes only if they cannot report for themselves. Declined and inconclusive rounds
accuse nobody.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from dshealthd.probe.observation import Kind, Observation, Outcome, Part, Suspect
from dshealthd.probe.verdicts.accusation import AMBIGUOUS, Verdicts, accusations
from dshealthd.probe.verdicts.baseline import TimingClass
from dshealthd.probe.verdicts.explanation import Cause, Surroundings, blamed, explain, reason_of
from dshealthd.probe.verdicts.links import SLOW, Links, accused_links, link
from dshealthd.probe.verdicts.peer_history import INTERMITTENT, SILENCES, Outages, PeerHistory
from dshealthd.probe.verdicts.planner import (
    Confirmation,
    NextStep,
    PlanningInput,
    Purpose,
    early,
    plan,
    unreached,
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
    from collections.abc import Callable, Iterator, Mapping

    from dshealthd.probe.options import VerdictOptions
    from dshealthd.probe.verdicts.baseline import Baselines

__all__ = ["Confirmation", "Detector"]

BUSY = "already_testing"
"""The reason of a round that was declined because another one was in progress."""
_CALM = 0.6
"""Share of the way from 1 to the limit below which a timing counts as good. The threshold that ends
an accusation is thus lower than the one that starts it.
"""
_CLEARED = 3
"""Consecutive good rounds that clear a suspect."""
_STEADY = 8
"""The same for an intermittent fault, where good rounds and bad ones alternate."""
_PENDING = 30.0
"""Seconds after which an extra round that has not taken place is given up."""


class Detector:
    """The verdicts of one agent; only the baselines survive a restart."""

    def __init__(
        self,
        me: str,
        leaves: Mapping[str, str],
        baselines: Baselines,
        options: VerdictOptions,
        wall: Callable[[], float],
    ) -> None:
        """`leaves` has every member, with "" if its leaf is not known. `wall` returns Unix time in
        seconds.
        """
        self._me = me
        self._baselines = baselines
        self._options = options
        self._wall = wall
        self._high = 1 + baselines.slow_ratio
        self._peer_history = PeerHistory(me, leaves)
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
        """Members of the requested extra rounds, and the time of each request."""
        self._recent = RecentRounds(me, self._high)
        self._outages = Outages()
        self._epoch = -1
        self._led_by_other = -1
        """Epoch of the last scheduled round that the other node led."""
        self._told: tuple[tuple[str, float], ...] | None = None

    def take_members(self, leaves: Mapping[str, str]) -> None:
        """Apply a new list of members; removed ones are no longer suspects."""
        self._peer_history.take_members(leaves, self._epoch)
        self._keep_company()

    def _keep_company(self) -> None:
        company = self._peer_history.leaves
        self._around = self._surroundings()
        self._links.keep(company)
        self._recent.keep(company)
        self._outages.keep(company)
        for history in self._history.values():
            for pairs in (history.pairs, history.ended):
                for peer in pairs.keys() - company.keys():
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
        """Evaluate a round; return the extra round to run at once, if one is needed."""
        peer = next((member for member in observation.members if member != self._me), "")
        # Keyed by members, whoever led: a round of the same pair that the peer led tells as much.
        self._pending.pop(frozenset(observation.members), None)
        led = observation.members[0] == self._me
        scheduled = self._is_scheduled(observation, peer)
        if scheduled:
            # Even if it is lower: the clock was wrong and has been corrected.
            self._epoch = observation.epoch
            if self._peer_history.turn_to(self._epoch):
                self._keep_company()
        self._peer_history.admit(peer)
        if observation.outcome in {Outcome.DECLINED, Outcome.INCONCLUSIVE}:
            if peer:
                self._peer_history.declined(peer, observation.at, busy=observation.reason == BUSY)
                if observation.outcome is Outcome.DECLINED and led:
                    self._reached(peer)
                    self._recent.declined(peer, self._epoch)
                    self._told = None
            else:
                # The policy denied the GPUs to the local round that distinguishes an adapter from
                # its GPU: an investigation that waits for it must be decided without it.
                for history in self._history.values():
                    if history.investigation:
                        history.investigation.home_refused = True
            return self._ask()
        told = decode_scores(observation, peer)
        round = ObservedRound(
            epoch=self._epoch,
            at=observation.at,
            kind=observation.kind,
            peer=peer,
            near=self._peer_history.near(peer),
            extra=not scheduled,
            led=led,
            told=told,
        )
        if told is not None:
            self._peer_history.heard(peer, observation.at, self._epoch, told)
        found = list(self._items(observation, round))
        for history, measurement in found:
            history.add(measurement, self._high)
        self._note_outages(observation, round)
        self._remember(observation, round, found)
        self._told = None
        self._consider(round)
        return self._ask()

    def _is_scheduled(self, observation: Observation, peer: str) -> bool:
        """Return whether the schedule asked for a round, rather than the member that led it. A
        member that leads any other round, or leads one again, has chosen this node.
        """
        epoch = observation.epoch
        if epoch < 0 or not peer or observation.members[0] == self._me:
            # This node itself chose whom to lead; only the choices of others can be aimed at it.
            return epoch >= 0
        if not self._peer_history.scheduled(observation.members, epoch):
            return False
        if observation.outcome is Outcome.DECLINED:
            return True  # the leader tries again if a member is in another round
        # Only the first such round of an epoch counts, so that the peer cannot add evidence by
        # leading more of them.
        first, self._led_by_other = self._led_by_other != epoch, epoch
        return first

    def withdraw(self, confirmation: Confirmation) -> None:
        """Note that an extra round is not run after all. After the next observation the detector
        asks for what is needed then.
        """
        self._pending.pop(frozenset(confirmation.members), None)

    def _reached(self, peer: str) -> None:
        """Drop the suspicion that a peer is unreachable: it has answered."""
        self._links.met(peer, self._epoch, well=True, led=True)
        if REACH in self._history:
            self._history[REACH].pairs.pop(peer, None)

    # What a round measured

    def _items(
        self, observation: Observation, round: ObservedRound
    ) -> Iterator[tuple[SignalHistory, Measurement]]:
        """Yield each of a round's measurements with the history of its signal. Timings are learnt
        as usual if nothing in the round hints at a fault.
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
                continue  # the round did not get that far
            late = "".join(observation.late) if track == RUN and bad else ""
            ratio, reason = HARD if bad else 1.0, str(observation.outcome)
            yield self._of(track), Measurement(round, ratio, bad, not bad, reason, late=late)
        if not ok:
            return
        family = str(observation.kind) if observation.kind in {Kind.LOCAL, Kind.LIGHT} else "fabric"
        for op, size, part, least, most in _times(observation):
            series = TimingClass(
                observation.kind,
                observation.backend,
                op,
                size,
                part,
                bool(round.peer) and not round.near,
            )
            track = Signal(family, observation.backend, op, size, part)
            measurement = self._timed(round, series, least, most)
            # No history is started before enough is known to judge.
            history = self._history.get(track) if measurement is None else self._of(track)
            is_exact, bad = least == most, False
            if measurement is not None and history is not None:
                bad = measurement.bad
                if is_exact or bad or measurement.good:
                    yield history, measurement
            if (
                # Learn only if nothing hints at a fault: an extra round runs because something may
                # be wrong, an open investigation may concern a fault that does not flag every
                # round, and a peer that is slow by its own account slows this timing too.
                is_exact
                and not bad
                and not round.extra
                and (history is None or history.investigation is None)
                and not self._accuses_itself(track, round)
            ):
                self._baselines.update(series, least, round.at, round.peer)

    def _timed(
        self, round: ObservedRound, series: TimingClass, least: float, most: float
    ) -> Measurement | None:
        """Return the measurement of a time with bounds; None if too little is known to judge it."""
        low = self._baselines.ratio(series, least)
        high = low if least == most else self._baselines.ratio(series, most)
        if low is None or high is None:
            return None
        return Measurement(
            round,
            # The possible ratio that is nearest to the usual.
            min(max(1.0, low.ratio), high.ratio),
            low.ratio >= low.limit,
            high.ratio < 1 + (high.limit - 1) * _CALM,
            SLOW,
        )

    def _accuses_itself(self, track: Signal, round: ObservedRound) -> bool:
        return round.told is not None and round.told.accuses_itself(track, self._high)

    def _of(self, track: Signal) -> SignalHistory:
        history = self._history.get(track)
        if history is None:
            history = self._history[track] = SignalHistory(track)
        return history

    def _note_outages(self, observation: Observation, round: ObservedRound) -> None:
        """Note whether the peer was silent or answered, unless it accuses itself."""
        if observation.outcome is Outcome.OK:
            self._outages.answered(round.peer, self._epoch)
        elif (
            observation.outcome in SILENCES
            and hard_track(observation) == REACH
            and round.peer in observation.late
        ):
            self._outages.silent(round.peer, self._epoch)
        if self._accuses_itself(REACH, round):
            self._outages.explained(round.peer)

    def _remember(
        self,
        observation: Observation,
        round: ObservedRound,
        found: list[tuple[SignalHistory, Measurement]],
    ) -> None:
        if not round.peer:
            return
        measurements = [measurement for _, measurement in found]
        well = not any(measurement.bad for measurement in measurements)
        self._peer_history.met(round.peer, round.at, well=well)
        self._links.met(
            round.peer, self._epoch, well=observation.outcome is Outcome.OK, led=round.led
        )
        timings = sum(history.track.timed for history, _ in found)
        self._recent.note(round, measurements, timings, self._epoch)

    # What it means

    def _consider(self, round: ObservedRound) -> None:
        # With occasional packet loss, good rounds come between the bad ones and the window never
        # becomes suspicious: such a fault is counted separately, by its short outages.
        if REACH not in self._verdicts and self._outages.many(self._epoch, self._around.liars):
            reach = self._of(REACH)
            reach.investigation = Investigation.open(reach.window, round.at)
            self._verdicts[REACH] = Cause.SELF, INTERMITTENT
        silent = unreached(self._history, self._links.gone)
        for track, history in self._history.items():
            if history.investigation is None:
                if not history.suspicious():
                    if history.pairs:
                        self._links.review(history, self._epoch, self._around, silent)
                    continue
                # Only later rounds decide: those that opened the investigation were selected for
                # being bad.
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
        """Clear a suspect, or correct the accusation."""
        assert history.investigation is not None  # noqa: S101 - a verdict has a case
        # A faulty uplink does not affect rounds inside the leaf, so good ones there clear nothing.
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
            history.pairs.clear()  # this fault explains the bad rounds with peers
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
        """Return the extra round that the detector needs next, unless one is pending."""
        now = self._wall()
        self._pending = {
            # The lower bound also ends the wait if the wall clock was set back.
            members: at
            for members, at in self._pending.items()
            if 0 <= now - at < _PENDING
        }
        # One at a time: its result decides whether another one is needed at all.
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
        if step.purpose is Purpose.ASK and pair is not None:
            pair.asked[step.confirmation.members[-1]] = self._epoch
        elif step.purpose is Purpose.HEAR and pair is not None:
            pair.hearings, pair.heard = pair.hearings + 1, self._epoch
        elif step.purpose is Purpose.RECHECK and pair is not None:
            pair.checked = self._epoch
        elif step.purpose is Purpose.RECHECK and history.investigation is not None:
            history.investigation.checked = self._epoch

    # What is reported

    def suspects(self) -> tuple[Suspect, ...]:
        """Return all current suspects."""
        found = list(
            accusations(
                self._me, self._peer_history.leaf, self._history, self._verdicts, self._wall()
            )
        )
        own = any(suspect.part in {Part.NODE, Part.LEAF} for suspect in found)
        # A faulty node sees all its links bad, so they are not accused as well.
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
        """Return this node's own score: the median over its parts of their recent ratios. HARD if
        its rounds fail; None before the first round.
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
        """Return the scores to report in a round, for `Observation.scores` of all its members. They
        are this node's own score, its slow parts and uplink, and the ratios of its last pairs.
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
        """Return each part's ratio, the worst over its operations and sizes, without echoes."""
        ratios: dict[str, float] = {}
        for track, history in self._history.items():
            if track.timed and track.family != "light" and (ratio := history.ratio()) is not None:
                ratios[track.part] = max(ratios.get(track.part, 0.0), ratio)
        return ratios


def _times(observation: Observation) -> Iterator[tuple[str, int, str, float, float]]:
    for timing in observation.timings:
        yield timing.op, timing.size, timing.part, timing.seconds, timing.seconds
    for bounds in observation.bounds:
        yield bounds.op, bounds.size, "", bounds.at_least, bounds.at_most
