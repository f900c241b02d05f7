"""The conclusion of a round: the results of all its workers, combined into one observation.

Every member draws its own conclusion from what each other member sent it directly: no member is
believed about another. If all are honest, all reach the same conclusion.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from dshealthd.linux.starvation import STARVED
from dshealthd.probe.observation import FLOOR, Bounds, Observation, Outcome, Stage, Timing
from dshealthd.probe.rounds.plan import PAIR
from dshealthd.probe.workers.job import OWN, STAGES, RankResult, late

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dshealthd.probe.rounds.plan import RoundPlan

SILENT = "silent"
"""The reason of a round in which a member's agent went silent."""

IMPLAUSIBLE = "implausible"
"""The reason of a round in which a member reported impossible times."""
_TIMED = frozenset({"connection_lost", "store", "timeout"})
"""Error reasons that a deadline on this node may have caused."""
FASTEST = 1e13
"""Bytes per second that no collective reaches: five times a B200's NVLink bandwidth."""

Scores = tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class MemberResult:
    """The result of one member's workers: its share of the round."""

    ranks: tuple[RankResult, ...]
    scores: Scores = ()

    @property
    def well(self) -> bool:
        """Whether all of the member's workers succeeded."""
        return all(rank.outcome is Outcome.OK for rank in self.ranks)

    @property
    def own_finding(self) -> bool:
        """Whether one of the member's workers reports a fault of its own."""
        return any(rank.own_finding for rank in self.ranks)

    @property
    def plausible(self) -> bool:
        """Whether a transport can reach the member's times."""
        return all(
            timing.seconds >= max(FLOOR, timing.size / FASTEST)
            for rank in self.ranks
            for timing in rank.timings
        )

    def message(self) -> dict[str, Any]:
        """Return the fields of the message that carries a member's result."""
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
        """Return a member's result from its message; all timings go to its first rank."""
        ranks = [RankResult(**fields) for fields in body["ranks"]]
        if ranks:
            ranks[0] = replace(ranks[0], timings=timings_of(body["timings"]))
        return cls(tuple(ranks), scores_of(body, sender))


@dataclass(frozen=True, slots=True)
class RoundResult:
    """How a round ended, without what its plan already says."""

    outcome: Outcome
    stage: Stage
    timings: tuple[Timing, ...] = ()
    late: tuple[str, ...] = ()
    reason: str = ""
    bounds: tuple[Bounds, ...] = ()

    def unless_starved(self, *, starved: bool) -> RoundResult:
        """Return this result, or an inconclusive one if this node was starved of CPU and may have
        seen only its own delay. A refused connection, a stopped process and a wrong sum look the
        same to every observer.
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
        """Return the round's result as an observation, its record."""
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
    """Return the conclusion of a round without some members, from the outcomes of calls to them.
    Members of which nothing is known, because no name server answered, are not named.
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
    """Return the conclusion of a round for the node `me`, from its members' shares. `silent` maps
    each member without a share to the outcome of a call to it.
    """
    # First of all: impossible timings cast doubt on everything else that their sender says.
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
            # A starved member and those that waited for it may look late to each other.
            return RoundResult(Outcome.INCONCLUSIVE, stage, reason=STARVED)
    if silent:
        return without(silent, stage)
    bad = [rank for rank in ranks if rank.outcome is not Outcome.OK]
    if not bad:
        return RoundResult(Outcome.OK, Stage.DONE, _measured(me, shares))
    owners = {rank.rank: member for member, share in shares.items() for rank in share.ranks}
    guilty = {owners[rank] for rank in late(ranks, _furthest(shares))}
    # If all are late, none is to blame: every member sees the same wrong sum.
    names = tuple(sorted(guilty)) if len(guilty) < len(plan.members) else ()
    # The most certain first: a wrong sum is proof, an error names its cause, and silence may
    # follow from either.
    for outcome in (
        Outcome.CORRUPTED,
        Outcome.FAILED,
        Outcome.REFUSED,
        Outcome.UNREACHABLE,
        Outcome.HUNG,
    ):
        of_kind = [rank for rank in bad if rank.outcome is outcome]
        # A stopped rank makes the others fail or hang too: the late rank's outcome counts.
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
    # Of the first rank, whichever share came first here: all members conclude the same.
    reason = min(bad, key=lambda rank: rank.rank).reason
    return RoundResult(Outcome.INCONCLUSIVE, stage, reason=reason)


def _furthest(shares: Mapping[str, MemberResult]) -> tuple[int, int, int] | None:
    """Return the furthest progress that at least two members report; None for two or fewer.
    Otherwise one member that claims to be ahead of all others would make all of them late.
    """
    progress = sorted(
        (max(rank.progress for rank in share.ranks) for share in shares.values() if share.ranks),
        reverse=True,
    )
    return progress[1] if len(progress) > PAIR else None


def _measured(me: str, shares: Mapping[str, MemberResult]) -> tuple[Timing, ...]:
    """Return the slowest member's timing of each part that this node has timed too. Parts that this
    node has not timed itself are left out: another node's parts have other names.
    """
    mine = shares[me].ranks if me in shares else ()
    own = {(t.op, t.size, t.part) for rank in mine for t in rank.timings}
    slowest = merge(rank for share in shares.values() for rank in share.ranks)
    return tuple(t for t in slowest if (t.op, t.size, t.part) in own)


def merge(ranks: Iterable[RankResult]) -> tuple[Timing, ...]:
    """Return one timing for each operation, size and part: the slowest rank's."""
    found: dict[tuple[str, int, str], Timing] = {}
    for rank in ranks:
        for timing in rank.timings:
            key = timing.op, timing.size, timing.part
            if key not in found or timing.seconds > found[key].seconds:
                found[key] = timing
    return tuple(found.values())


def timing_fields(timings: Iterable[Timing]) -> list[dict[str, Any]]:
    """Return the timings of a conclusion in the peer API's form."""
    return [asdict(timing) for timing in timings]


def timings_of(fields: Iterable[Mapping[str, Any]]) -> tuple[Timing, ...]:
    """Return the timings in a message, for a round's conclusion."""
    return tuple(Timing(**entry) for entry in fields)


def score_fields(scores: Iterable[tuple[str, float]]) -> list[dict[str, Any]]:
    """Return the scores of a round's members in the peer API's form."""
    return [{"component": component, "score": score} for component, score in scores]


def scores_of(body: Mapping[str, Any], *names: str) -> Scores:
    """Return a message's scores about `names`; a member has no say about any others."""
    scores = ((entry["component"], entry["score"]) for entry in body.get("scores", ()))
    return tuple((component, score) for component, score in scores if _speaker(component, names))


def _speaker(component: str, names: Sequence[str]) -> bool:
    return any(
        component == name or component.startswith((f"{name}/", f"{name}--", f"{name}->"))
        for name in names
    )
