"""The conclusion of a round: the results of all its workers, put together into one observation.

Every member does so itself, from what each other member has told it directly: nobody is believed
about anybody else. Where all tell the truth, all come to the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dshealthd.linux.starvation import STARVED
from dshealthd.probe.observation import FLOOR, Bounds, Observation, Outcome, Stage, Timing
from dshealthd.probe.rounds.plan import PAIR
from dshealthd.probe.workers.job import OWN, STAGES, RankResult, late

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dshealthd.probe.rounds.plan import RoundPlan

SILENT = "silent"
"""The reason of a round in which a member's agent said nothing more."""

IMPLAUSIBLE = "implausible"
"""The reason of a round in which a member told times that cannot be."""
_TIMED = frozenset({"connection_lost", "store", "timeout"})
"""Reasons of an error that a deadline of this node may have caused."""
FASTEST = 1e13
"""Bytes in a second that no collective comes to: five times NVLink's bandwidth of a B200."""

Scores = tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class MemberResult:
    """What one member's workers gave."""

    ranks: tuple[RankResult, ...]
    scores: Scores = ()

    @property
    def well(self) -> bool:
        """Whether all of the member's workers went through."""
        return all(rank.outcome is Outcome.OK for rank in self.ranks)

    @property
    def own_finding(self) -> bool:
        """Whether one of the member's workers says what is wrong with itself."""
        return any(rank.own_finding for rank in self.ranks)

    @property
    def plausible(self) -> bool:
        """Whether the member's times are such as a transport can have."""
        return all(
            timing.seconds >= max(FLOOR, timing.size / FASTEST)
            for rank in self.ranks
            for timing in rank.timings
        )

    def message(self) -> dict[str, Any]:
        """Return the fields of the message that tells the root a member's result."""
        return {
            "ranks": [
                {
                    name: getattr(rank, name)
                    for name in ("rank", "outcome", "stage", "reason", "entered", "left")
                }
                for rank in self.ranks
            ],
            "timings": timing_fields(merge(self.ranks)),
            "scores": score_fields(self.scores),
        }

    @classmethod
    def told(cls, body: Mapping[str, Any], sender: str) -> MemberResult:
        """Return a member's result from its message.

        A node's timings are all on its first rank then.
        """
        ranks = [RankResult(**fields) for fields in body["ranks"]]
        if ranks:
            ranks[0] = replace(ranks[0], timings=timings_of(body["timings"]))
        return cls(tuple(ranks), scores_of(body, sender))


@dataclass(frozen=True, slots=True)
class RoundResult:
    """How a round ended, without what is known from its plan."""

    outcome: Outcome
    stage: Stage
    timings: tuple[Timing, ...] = ()
    late: tuple[str, ...] = ()
    reason: str = ""
    bounds: tuple[Bounds, ...] = ()

    def unless_starved(self, *, starved: bool) -> RoundResult:
        """Return this result; unknown instead, where this node was starved and may have seen
        nothing but its own delay.

        What refuses a connection, is stopped or computes a wrong sum is so for all observers.
        """
        by_time = (
            self.outcome is Outcome.HUNG
            or (self.outcome is Outcome.UNREACHABLE and self.reason != "no_route")
            or (self.outcome is Outcome.FAILED and self.reason in _TIMED)
        )
        if not starved or not by_time or self.reason in OWN:
            return self
        return RoundResult(Outcome.INCONCLUSIVE, self.stage, reason=STARVED)

    def observation(self, plan: RoundPlan, scores: Scores, at: float) -> Observation:
        """Return the round's result as an observation, the record of it."""
        return Observation(
            plan.epoch,
            plan.kind,
            plan.backend,
            plan.members,
            self.outcome,
            self.stage,
            self.timings,
            self.late,
            self.reason,
            scores,
            at,
            self.bounds,
        )


def without(silent: Mapping[str, tuple[Outcome, str]], stage: Stage) -> RoundResult:
    """Return the conclusion of a round without some members, by what calls to them said.

    Those of which nothing is known, as no name server answered, are not named.
    """
    gone = {name: said for name, said in silent.items() if said[0] is not Outcome.INCONCLUSIVE}
    outcome, reason = next(iter((gone or silent).values()))
    return RoundResult(outcome, stage, (), tuple(sorted(gone)), reason)


def combine(
    plan: RoundPlan,
    me: str,
    shares: Mapping[str, MemberResult],
    silent: Mapping[str, tuple[Outcome, str]],
) -> RoundResult:
    """Return the conclusion of a round for the node `me`, from what its members gave.

    `silent` has, for those that gave nothing, what a call to them said.
    """
    # First of all: timings that no transport can reach make everything else its sender says
    # doubtful.
    absurd = sorted(name for name, share in shares.items() if name != me and not share.plausible)
    if absurd:
        return RoundResult(Outcome.FAILED, Stage.SIZES, (), tuple(absurd), IMPLAUSIBLE)
    ranks = [rank for share in shares.values() for rank in share.ranks]
    stage = min((rank.stage for rank in ranks), key=STAGES.index, default=Stage.INVITE)
    starved = {
        name
        for name, share in shares.items()
        if any(rank.reason == STARVED for rank in share.ranks)
    }
    if not silent or me in starved:
        own_finding = any(share.own_finding for share in shares.values())
        if starved and not own_finding:
            # Who waited for a starved member may look late to it, or it to them.
            return RoundResult(Outcome.INCONCLUSIVE, stage, reason=STARVED)
    if silent:
        return without(silent, stage)
    bad = [rank for rank in ranks if rank.outcome is not Outcome.OK]
    if not bad:
        return RoundResult(Outcome.OK, Stage.DONE, _measured(me, shares))
    owners = {rank.rank: member for member, share in shares.items() for rank in share.ranks}
    guilty = {owners[rank] for rank in late(ranks, _furthest(shares))}
    # Where all are late nobody is: a wrong sum is everybody's wrong sum.
    names = tuple(sorted(guilty)) if len(guilty) < len(plan.members) else ()
    # The most certain first: a wrong sum proves itself, an error names its cause, and silence may
    # follow from either.
    for outcome in (
        Outcome.CORRUPTED,
        Outcome.FAILED,
        Outcome.REFUSED,
        Outcome.UNREACHABLE,
        Outcome.HUNG,
    ):
        of_kind = [rank for rank in bad if rank.outcome is outcome]
        # A rank that is stopped hangs the others, which fail or hang in their turn: the late one
        # says what it is.
        own = [rank for rank in bad if owners[rank.rank] in names]
        if (
            outcome is not Outcome.CORRUPTED
            and own
            and all(rank.outcome is not outcome for rank in own)
        ):
            continue
        if of_kind:
            first = min(
                [rank for rank in of_kind if owners[rank.rank] in names] or of_kind,
                key=lambda rank: rank.progress,
            )
            return RoundResult(outcome, first.stage, (), names, first.reason)
    return RoundResult(Outcome.INCONCLUSIVE, stage, (), (), bad[0].reason)


def _furthest(shares: Mapping[str, MemberResult]) -> tuple[int, int, int] | None:
    """Return how far members came, where at least two of them say so, of more than two.

    One that says it came further than all others would make all of them late.
    """
    progress = sorted(
        (max(rank.progress for rank in share.ranks) for share in shares.values() if share.ranks),
        reverse=True,
    )
    return progress[1] if len(progress) > PAIR else None


def _measured(me: str, shares: Mapping[str, MemberResult]) -> tuple[Timing, ...]:
    """Return for the conclusion what this node has timed, or a member that says it took longer.

    What this node has not timed itself is nothing to it: another's parts have other names.
    """
    mine = shares[me].ranks if me in shares else ()
    own = {(t.op, t.size, t.part) for rank in mine for t in rank.timings}
    slowest = merge(rank for share in shares.values() for rank in share.ranks)
    return tuple(t for t in slowest if (t.op, t.size, t.part) in own)


def merge(ranks: Iterable[RankResult]) -> tuple[Timing, ...]:
    """Return the conclusion's one timing for each operation, size and part: the slowest rank's."""
    found: dict[tuple[str, int, str], Timing] = {}
    for rank in ranks:
        for timing in rank.timings:
            key = timing.op, timing.size, timing.part
            if key not in found or timing.seconds > found[key].seconds:
                found[key] = timing
    return tuple(found.values())


def timing_fields(timings: Iterable[Timing]) -> list[dict[str, Any]]:
    """Return the timings of a conclusion as the peer API has them."""
    return [
        {
            "op": t.op,
            "size": t.size,
            "seconds": t.seconds,
            "bus_bandwidth": t.bus_bandwidth,
            "part": t.part,
        }
        for t in timings
    ]


def timings_of(fields: Iterable[Mapping[str, Any]]) -> tuple[Timing, ...]:
    """Return the timings of a message for a round's conclusion."""
    return tuple(Timing(**entry) for entry in fields)


def score_fields(scores: Iterable[tuple[str, float]]) -> list[dict[str, Any]]:
    """Return scores of a round's members as the peer API has them."""
    return [{"component": component, "score": score} for component, score in scores]


def scores_of(body: Mapping[str, Any], *names: str) -> Scores:
    """Return a message's scores about `names`, for the conclusion: no member speaks for others."""
    scores = ((entry["component"], entry["score"]) for entry in body.get("scores", ()))
    return tuple((component, score) for component, score in scores if _speaker(component, names))


def _speaker(component: str, names: Sequence[str]) -> bool:
    return any(
        component == name or component.startswith((f"{name}/", f"{name}--", f"{name}->"))
        for name in names
    )
