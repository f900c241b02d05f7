"""The detector: what one agent concludes from its own rounds and from its peers' reports.

A part that is flagged with two of the last three peers becomes suspicious. Extra rounds with
members known to be well confirm it. Then the cause that explains most is accused: the leaf, if the
neighbors report the same about themselves; otherwise a rail, a GPU or the node; the link, if one
pair is bad and both its ends are well with others. Each agent accuses its own node and its own
links, and other nodes only if they cannot report for themselves. Rounds that are declined,
unauthorized or inconclusive accuse nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from statistics import median

from dshealthd.probe.observation import (
    HARD,
    ON_DEMAND,
    Observation,
    Outcome,
    Part,
    PeerReport,
    RoundKind,
    Suspect,
)
from dshealthd.probe.verdicts.accusation import AMBIGUOUS, Verdicts, accusations
from dshealthd.probe.verdicts.baseline import Baselines, TimingClass
from dshealthd.probe.verdicts.company import Company, Met
from dshealthd.probe.verdicts.explanation import explain, reason_of
from dshealthd.probe.verdicts.pairs import PairSuspicion, PairVerdict
from dshealthd.probe.verdicts.planner import Confirmation, PlanningInput, early, plan
from dshealthd.probe.verdicts.signals import (
    OWN_NODE,
    REACH,
    RUN,
    Cause,
    Investigation,
    Measurement,
    ObservedRound,
    Signal,
    SignalHistory,
    accuses_itself,
    hard_signal,
)

BUSY = "already_testing"
"""The reason of a round that was declined because another one was in progress."""
INTERMITTENT = "intermittent"
"""The reason of an accusation because of short outages."""
SLOW = "slow"
_ANSWERS = frozenset({Outcome.DECLINED, Outcome.UNAUTHORIZED})
"""Outcomes that show that a peer is reached, and accuse nobody: it has other work, or the two are
set up differently.
"""
_SILENCES = frozenset({Outcome.UNREACHABLE, Outcome.HUNG})
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
_BOOT = 600.0
"""Seconds for which an agent that nobody has answered yet does not blame its node: servers that are
switched on together, as after a power cut, boot within ten minutes of each other.
"""
_HELD = 4
"""Epochs for which another node stays a suspect without new evidence: others meet it meanwhile."""


class Detector:
    """The verdicts of one agent; only the baselines survive a restart."""

    def __init__(
        self,
        me: str,
        leaves: Mapping[str, str],
        baselines: Baselines,
        wall: Callable[[], float],
        absent: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """`leaves` has every member, with "" if its leaf is not known. `wall` returns Unix time in
        seconds, `absent` the members in maintenance: they are not asked, and no link to them is
        suspected.
        """
        self._me = me
        self._baselines = baselines
        self._wall, self._absent = wall, absent
        self._high = 1 + baselines.slow_ratio
        self._company = Company(me, leaves, self._high)
        self._history: dict[Signal, SignalHistory] = {}
        self._pairs: dict[str, PairSuspicion] = {}
        self._ended: dict[str, PairSuspicion] = {}
        """The last suspicion of each peer that good rounds ended."""
        self._gone: dict[str, tuple[Suspect, int]] = {}
        """Nodes that nobody reaches: the accusation, and the epoch of the last evidence."""
        self._pending: dict[tuple[str, ...], float] = {}
        """Members of the requested extra rounds, and the time of each request."""
        self._begun = wall()
        self._answered = False
        """Whether any other member has answered this agent yet."""
        self._epoch = -1
        self._number = 0

    def apply_members(self, leaves: Mapping[str, str]) -> None:
        """Apply a new list of members; removed ones are no longer suspects."""
        self._company.apply_members(leaves)
        for known in (self._pairs, self._ended, self._gone):
            for name in known.keys() - leaves.keys():
                del known[name]

    def observe(
        self, observation: Observation, *, requested: bool = False
    ) -> tuple[Confirmation, ...]:
        """Evaluate a round; return the extra round to run at once, if one is needed. A round that
        another member `requested` is evidence for that member, and raises no suspicion here.
        """
        members, scheduled = observation.members, observation.epoch != ON_DEMAND
        if self._me not in members:
            return self._record_word(observation)
        peer = next((member for member in members if member != self._me), "")
        led = members[0] == self._me
        # Keyed by members, whoever led: a round of the same pair that the peer led tells as much.
        requested_here = self._pending.pop(tuple(sorted(members)), None) is not None
        if scheduled:
            # Even if it is lower: the clock was wrong and has been corrected.
            self._epoch = observation.epoch
        if peer and observation.outcome not in {*_SILENCES, Outcome.INCONCLUSIVE}:
            self._answered = True
        if observation.outcome in {*_ANSWERS, Outcome.INCONCLUSIVE}:
            if peer:
                self._company.rest(peer, observation.at, busy=observation.reason == BUSY)
                if observation.outcome in _ANSWERS and led:
                    self._clear_unreached(peer)
            else:
                # The policy denied the GPUs to the local round that distinguishes an adapter from
                # its GPU: an investigation that waits for it must be decided without it.
                for history in self._history.values():
                    if history.investigation:
                        history.investigation.home_refused = True
            return self._request()
        self._number += 1
        round = ObservedRound(
            number=self._number,
            epoch=self._epoch,
            at=observation.at,
            kind=observation.kind,
            peer=peer,
            near=self._company.near(peer),
            extra=not scheduled,
            led=led,
            told=observation.told,
        )
        found = list(self._items(observation, round))
        for history, measurement in found:
            if measurement.explained:
                # This covers earlier rounds too: a peer takes some rounds to find itself at fault,
                # and until then its bad rounds counted against this node.
                history.explain(peer)
            history.add(measurement)
        if peer:
            opens = scheduled or (led and not requested_here and not requested)
            self._record_round(observation, round, found, opens=opens)
        self._consider(round)
        return self._request()

    def withdraw(self, confirmation: Confirmation) -> None:
        """Record that an extra round is not run after all. After the next observation the detector
        asks for what is needed then.
        """
        self._pending.pop(tuple(sorted(confirmation.members)), None)
        if confirmation.members[0] != self._me:
            self._company.rest(confirmation.members[0], self._wall())

    def _clear_unreached(self, peer: str) -> None:
        self._gone.pop(peer, None)
        if peer in self._pairs and REACH in self._pairs[peer].signals:
            del self._pairs[peer]

    def _record_word(self, observation: Observation) -> tuple[Confirmation, ...]:
        """Record whether a member that was asked could call another, and what that reported."""
        asked, peer = observation.members
        self._pending.pop(tuple(sorted(observation.members)), None)
        pair = self._pairs.get(peer)
        if pair is not None and observation.outcome is not Outcome.INCONCLUSIVE:
            told = observation.told
            self._company.record_report(
                replace(pair.first, number=self._number, epoch=self._epoch, told=told)
            )
            well = observation.outcome in {Outcome.OK, *_ANSWERS}
            pair.words[asked] = self._epoch, well
            if accuses_itself(told, REACH, self._high):
                del self._pairs[peer]
            else:
                self._judge(pair)
        return self._request()

    # What a round measured

    def _items(
        self, observation: Observation, round: ObservedRound
    ) -> Iterator[tuple[SignalHistory, Measurement]]:
        """Yield each of a round's measurements with the history of its signal. Timings are learnt
        as usual if nothing in the round hints at a fault.
        """
        ok, hard, told = observation.outcome is Outcome.OK, hard_signal(observation), round.told
        refused = observation.outcome is Outcome.REFUSED
        local = observation.kind is RoundKind.LOCAL
        for signal in (OWN_NODE,) if local else (REACH,) if hard == REACH else (REACH, RUN):
            bad = not ok and signal == hard
            blamed = accuses_itself(told, signal, self._high)
            yield (
                self._of(signal),
                Measurement(
                    round,
                    HARD if bad else 1.0,
                    bad,
                    not bad,
                    str(observation.outcome),
                    # If the peer was late, the round says nothing against this node. A refusal
                    # has come from the peer, so the network between the two works.
                    bad
                    and (
                        blamed or (observation.late == (round.peer,) and (signal == RUN or refused))
                    ),
                ),
            )
        family = (
            str(observation.kind)
            if observation.kind in {RoundKind.LOCAL, RoundKind.LIGHT}
            else "fabric"
        )
        for timing in observation.timings:
            what = observation.backend, timing.op, timing.size, timing.part
            series = TimingClass(observation.kind, *what, bool(round.peer) and not round.near)
            signal = Signal(family, *what)
            measurement = self._timed(round, series, timing.seconds)
            # No history is started before enough is known to judge.
            history = self._history.get(signal) if measurement is None else self._of(signal)
            bad = False
            blamed = accuses_itself(told, signal, self._high)
            if measurement is not None and history is not None:
                bad = measurement.bad
                measurement.explained = bad and accuses_itself(
                    told, signal, self._high, measurement.ratio
                )
                yield history, measurement
            if (
                # Learn only if nothing hints at a fault: an extra round runs because something may
                # be wrong, an open investigation may concern a fault that does not flag every
                # round, and a peer that is slow by its own account slows this timing too.
                not (bad or blamed or round.extra)
                and (history is None or history.investigation is None)
            ):
                self._baselines.update(series, timing.seconds, round.at)

    def _timed(
        self, round: ObservedRound, series: TimingClass, seconds: float
    ) -> Measurement | None:
        """Return the measurement of a time; None if too little is known to judge it."""
        found = self._baselines.ratio(series, seconds)
        if found is None:
            return None
        return Measurement(
            round,
            found.ratio,
            found.ratio >= found.limit,
            found.ratio < 1 + (found.limit - 1) * _CALM,
            SLOW,
        )

    def _of(self, signal: Signal) -> SignalHistory:
        return self._history.setdefault(signal, SignalHistory(signal))

    def _record_round(
        self,
        observation: Observation,
        round: ObservedRound,
        found: list[tuple[SignalHistory, Measurement]],
        *,
        opens: bool,
    ) -> None:
        """Record a round with a peer as a whole, and what it says of the pair."""
        peer, late = round.peer, observation.late
        bads = {history.signal: entry for history, entry in found if entry.bad}
        hard = next((signal for signal in (REACH, RUN) if signal in bads), None)
        bad = frozenset(bads)
        ratios = [entry.ratio for entry in bads.values()]
        # What is not bad is usual, by this node's own measure, however much its timings vary.
        light, ratio = observation.kind is RoundKind.LIGHT, max(ratios, default=1.0)
        silent = hard == REACH and observation.outcome in _SILENCES and late == (peer,)
        told, pair = round.told, self._pairs.get(peer)
        self._company.record_report(round)
        explained = any(entry.explained for entry in bads.values())
        if (observation.outcome is Outcome.REFUSED or not explained) and not (
            bad and peer in self._gone
        ):
            # A round that the peer is to blame for says nothing of this node; but that a peer
            # refuses after a silence shows that it was booted.
            self._company.log.append(Met(round, light, ratio, bad, silent))
        if observation.outcome is Outcome.OK and round.led:
            self._gone.pop(peer, None)
        elif peer in self._gone and hard == REACH and round.led:
            self._gone[peer] = self._gone[peer][0], self._epoch
        concerned = pair.signals if pair else bad
        # A peer that blames one of its rails does not explain that all of them are slow.
        if concerned and all(
            accuses_itself(told, signal, self._high, pair.least if pair else ratio)
            for signal in concerned
        ):
            self._pairs.pop(peer, None)
            self._ended.pop(peer, None)
            return
        opinion = None if told is None or pair is None else pair.opinion(told, self._me)
        if pair is not None and opinion is not None:
            if opinion < self._high and not pair.accused:
                del self._pairs[peer]  # usual for the peer: the two are unlike
                return
            pair.agreed += opinion >= self._high
        if late == (self._me,) and hard == RUN:
            return  # the peer waited for this node
        reason = reason_of(bads.values()) if bads else ""
        measured = {history.signal: entry.good for history, entry in found}
        if pair is None:
            if bad and opens and peer not in self._gone:
                before = self._ended.pop(peer, None)
                self._pairs[peer] = PairSuspicion.begin(round, bad, ratio, reason, before)
        elif pair.update(round, bad, ratio, reason, measured):
            self._ended[peer] = self._pairs.pop(peer)

    # What it means

    @property
    def _verdicts(self) -> Verdicts:
        return {
            signal: history.investigation.verdict
            for signal, history in self._history.items()
            if history.investigation and history.investigation.verdict
        }

    def _consider(self, round: ObservedRound) -> None:
        # With occasional packet loss, good rounds come between the bad ones and the window never
        # becomes suspicious: such a fault is counted separately, by its short outages.
        reach = self._of(REACH)
        if not (reach.investigation and reach.investigation.verdict) and (
            self._company.is_intermittent(self._epoch)
        ):
            reach.investigation = Investigation((), round.at, verdict=(Cause.SELF, INTERMITTENT))
        for signal, history in self._history.items():
            investigation = history.investigation
            if investigation is None:
                if self._is_suspicious(history):
                    history.investigation = Investigation(tuple(history.window), round.at)
                continue
            if investigation.verdict:
                self._review(history, investigation)
                continue
            cause = explain(investigation, signal, self._company)
            if cause is Cause.NOTHING:
                history.forget()
            elif cause.decided and not early(signal, self._history):
                investigation.verdict = cause, reason_of(investigation.bads)
                investigation.decided = round.at
        for pair in list(self._pairs.values()):
            self._judge(pair)
        self._gone = {
            name: (suspect, since)
            for name, (suspect, since) in self._gone.items()
            if 0 <= self._epoch - since <= _HELD
        }

    def _is_suspicious(self, history: SignalHistory) -> bool:
        """Return whether a signal's last rounds make it suspicious: not while nobody has answered
        this agent yet, because the others may still be booting.
        """
        boots = not self._answered and 0 <= self._wall() - self._begun < _BOOT
        return history.suspicious() and not (boots and history.signal == REACH)

    def _review(self, history: SignalHistory, investigation: Investigation) -> None:
        """Clear a suspect, or correct the accusation."""
        assert investigation.verdict is not None  # noqa: S101 - what is reviewed
        cause, reason = investigation.verdict
        # A faulty uplink does not affect rounds inside the leaf, so good ones there clear nothing.
        leaf_alone = cause in {Cause.LEAF, Cause.FABRIC} and not any(
            entry.bad and entry.round.near for entry in investigation.measurements
        )
        enough = _STEADY if reason == INTERMITTENT else _CLEARED
        telling = [
            entry for entry in investigation.measurements if not (leaf_alone and entry.round.near)
        ][-enough:]
        if len(telling) == enough and all(entry.good for entry in telling):
            history.forget()
            if history.signal == REACH:
                self._company.log.clear()  # its outages
            # This fault explains the bad rounds with peers.
            for pair in [p for p in self._pairs.values() if history.signal in p.signals]:
                del self._pairs[pair.peer]
            self._ended.clear()
        else:
            cause = explain(investigation, history.signal, self._company)
            if cause in {Cause.SELF, Cause.LEAF, Cause.FABRIC}:
                investigation.verdict = cause, reason_of(investigation.bads)

    def _judge(self, pair: PairSuspicion) -> None:
        """Accuse a pair's link, or its other end, or this node, if that is known by now."""
        if (
            pair.is_stale(self._epoch)
            or pair.peer in self._absent()
            or (not pair.hard and pair.is_one_of_many(self._company))
        ):
            del self._pairs[pair.peer]
            return
        if any(self._of(signal).investigation for signal in pair.signals) or (
            pair.accused not in {"", AMBIGUOUS}
        ):
            return
        found = pair.find(self._company, self._unreached(), self._epoch)
        if found is PairVerdict.LINK:
            pair.accused = pair.reason
        elif found is PairVerdict.AMBIGUOUS:
            pair.accused = AMBIGUOUS
        elif found is PairVerdict.SELF:
            now, verdict = self._wall(), (Cause.SELF, pair.reason)
            self._of(RUN).investigation = Investigation((), now, verdict=verdict)
        elif found is PairVerdict.PEER:
            del self._pairs[pair.peer]
            self._gone[pair.peer] = Suspect(Part.NODE, pair.peer, pair.reason), self._epoch
            self._company.record_gone(pair.peer)

    def _unreached(self) -> set[str]:
        silent = (pair.peer for pair in self._pairs.values() if pair.unreached)
        return {*self._gone, *silent, *self._absent()}

    def _request(self) -> tuple[Confirmation, ...]:
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
            self._company,
            self._history,
            self._pairs,
            self._verdicts,
            self._unreached(),
            self._epoch,
            now,
        )
        step = next(plan(state), None)
        for history in self._history.values():
            if history.investigation:
                history.investigation.asked += 1
        if step is None:
            return ()
        if step.peer and step.confirmation.members[0] == self._me:
            self._pairs[step.peer].checked = self._epoch
        elif step.peer:
            self._pairs[step.peer].sought = self._epoch
        elif step.signal is not None and (case := self._history[step.signal].investigation):
            case.checked = self._epoch
        self._pending[tuple(sorted(step.confirmation.members))] = now
        return (step.confirmation,)

    # What is reported

    def suspects(self) -> tuple[Suspect, ...]:
        """Return the current accusations; each agent exports its own."""
        found = list(
            accusations(self._me, self._company.leaf, self._history, self._verdicts, self._wall())
        )
        # A faulty node sees all its links bad, so they are not accused as well.
        if not any(suspect.part in {Part.NODE, Part.LEAF} for suspect in found):
            found += [
                Suspect(Part.LINK, "--".join(sorted((self._me, pair.peer))), pair.accused)
                for pair in self._pairs.values()
                if pair.accused
            ]
        found += [suspect for suspect, _ in self._gone.values()]
        return tuple(dict.fromkeys(found))

    def score(self, *, flagged: bool = False) -> float | None:
        """Return this node's own score: the median over its parts of their recent ratios. HARD if
        its rounds fail; None before the first round. With `flagged`, what is within the usual of
        its class counts as 1: where timings vary by a fifth, one that is a tenth above is not slow.
        """
        for signal in (REACH, RUN, OWN_NODE):
            history = self._history.get(signal)
            if history is not None and (
                self._is_suspicious(history)
                or (history.investigation and history.investigation.verdict)
            ):
                return HARD
        parts: dict[str, float] = {}
        for signal, history in self._history.items():
            # The worst over operations and sizes, without echoes.
            if signal.timed and signal.family != "light" and (ratio := history.ratio()) is not None:
                ratio = ratio if history.uneasy() or not flagged else 1.0
                parts[signal.part] = max(parts.get(signal.part, 0.0), ratio)
        return median(parts.values()) if parts else (1.0 if REACH in self._history else None)

    def report(self) -> PeerReport:
        """Return what to report to peers: this node's own score, its slow parts and uplink, and the
        ratios of its last pairs.
        """
        histories = self._history.values()
        slow = [one.signal.word for one in histories if one.investigation]
        return PeerReport(
            self.score(flagged=True),
            tuple(word for word in dict.fromkeys(slow) if word),
            any(entry.leaves_badly() for entry in histories),
            *self._company.told(self._epoch),
        )
