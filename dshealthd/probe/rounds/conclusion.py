"""The conclusion of a round: the results of all its workers, combined into one observation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from dshealthd.linux.starvation import STARVED
from dshealthd.probe.observation import (
    FLOOR,
    Outcome,
    RoundPlan,
    RoundResult,
    Stage,
    Timing,
    slowest,
)
from dshealthd.probe.policy import BUSY
from dshealthd.probe.rounds.active_round import Decline
from dshealthd.probe.workers.job import OWN, STAGES, RankResult, late

if TYPE_CHECKING:
    from dshealthd.probe.peers.protocol import PeerError

SILENT = "silent"
"""The reason of a round in which a member's agent went silent."""

IMPLAUSIBLE = "implausible"
"""The reason of a round in which a member reported impossible times."""
_TIMED = frozenset({"connection_lost", "store", "timeout"})
"""Error reasons that a deadline on this node may have caused."""
_MOST_CERTAIN = (
    Outcome.CORRUPTED,
    Outcome.FAILED,
    Outcome.REFUSED,
    Outcome.UNREACHABLE,
    Outcome.HUNG,
)
"""Outcomes of ranks, the most certain first: an error names its cause, and silence may follow from
one.
"""
FASTEST = 1e13
"""Bytes per second that no collective reaches: five times a B200's NVLink bandwidth."""


def plausible(share: Iterable[RankResult]) -> bool:
    """Return whether a transport can reach a member's times."""
    return all(
        timing.seconds >= max(FLOOR, timing.size / FASTEST)
        for rank in share
        for timing in rank.timings
    )


def unless_starved(result: RoundResult, *, starved: bool) -> RoundResult:
    """Return a result, or an inconclusive one if this node was starved of CPU and may have seen
    only its own delay. A refused connection, a stopped process and a wrong sum look the same to
    every observer.
    """
    by_time = (
        result.outcome is Outcome.HUNG
        or (result.outcome is Outcome.UNREACHABLE and result.reason != "no_route")
        or (result.outcome is Outcome.FAILED and result.reason in _TIMED)
    )
    if not starved or not by_time or result.reason in OWN:
        return result
    return RoundResult(Outcome.INCONCLUSIVE, result.stage, reason=STARVED)


def conclude_without(name: str, error: PeerError, stage: Stage) -> RoundResult:
    """Return the conclusion of a round without a member, from the error of a call to it. It is not
    named if nothing is known of it, because no name server answered.
    """
    late = () if error.outcome is Outcome.INCONCLUSIVE else (name,)
    return RoundResult(error.outcome, stage, (), late, error.reason)


def combine(
    plan: RoundPlan,
    me: str,
    shares: Mapping[str, tuple[RankResult, ...]],
    error: PeerError | None = None,
) -> RoundResult:
    """Return the conclusion of a round for the node `me`, from its members' shares. `error` is that
    of a call to the other member, if it has given no share.
    """
    # First of all: who measures impossible times may have anything else wrong.
    absurd = [name for name, share in shares.items() if name != me and not plausible(share)]
    if absurd:
        return RoundResult(Outcome.FAILED, Stage.SIZES, (), tuple(absurd), IMPLAUSIBLE)
    ranks = [rank for share in shares.values() for rank in share]
    stage = min((rank.stage for rank in ranks), key=STAGES.index, default=Stage.INVITE)
    for reason in (BUSY, Decline.VERSIONS):
        if any(rank.reason == reason for rank in ranks) and not any(
            rank.own_finding for rank in ranks
        ):
            # A job has started on a node, which has ended its workers; or nodes are being upgraded,
            # one after the other. None is at fault.
            return RoundResult(Outcome.DECLINED, stage, reason=reason)
    starved = {
        name for name, share in shares.items() if any(rank.reason == STARVED for rank in share)
    }
    waited = me in starved or (starved and error is None)
    if waited and not any(rank.own_finding for rank in ranks):
        # A starved member and one that waited for it may look late to each other.
        return RoundResult(Outcome.INCONCLUSIVE, stage, reason=STARVED)
    if error is not None:
        return conclude_without(next(name for name in plan.members if name != me), error, stage)
    bad = [rank for rank in ranks if rank.outcome is not Outcome.OK]
    if not bad:
        return RoundResult(Outcome.OK, Stage.DONE, own_timings(merge(ranks), shares.get(me, ())))
    owners = {rank.rank: member for member, share in shares.items() for rank in share}
    guilty = {owners[rank] for rank in late(ranks)}
    if len(guilty) > 1 and all(rank.stage is Stage.IMPORT for rank in bad):
        # Neither has spoken to the other: this says nothing about what lies between them.
        return RoundResult(Outcome.INCONCLUSIVE, stage, reason=bad[0].reason)
    # If both are late, neither is to blame: both see the same wrong sum.
    names = tuple(guilty) if len(guilty) < len(plan.members) else ()
    theirs = [rank for rank in bad if owners[rank.rank] in names]
    # A wrong sum is proof. Otherwise the late member's outcomes count: a stopped rank makes others
    # fail or hang too.
    telling = [rank for rank in bad if rank.outcome is Outcome.CORRUPTED] or theirs or bad
    for outcome in _MOST_CERTAIN:
        if found := [rank for rank in telling if rank.outcome is outcome]:
            first = min(found, key=lambda rank: rank.progress)
            return RoundResult(outcome, first.stage, (), names, first.reason)
    # Of the first rank, whichever share came first here: both members conclude the same.
    reason = min(bad, key=lambda rank: rank.rank).reason
    return RoundResult(Outcome.INCONCLUSIVE, stage, reason=reason)


def own_timings(timings: Iterable[Timing], mine: Iterable[RankResult]) -> tuple[Timing, ...]:
    """Return the timings of parts that this node has timed too: another node's parts have other
    names.
    """
    timed = {(t.op, t.size, t.part) for rank in mine for t in rank.timings}
    return tuple(t for t in timings if (t.op, t.size, t.part) in timed)


def merge(ranks: Iterable[RankResult]) -> tuple[Timing, ...]:
    """Return one timing for each operation, size and part: the slowest rank's."""
    timings = (timing for rank in ranks for timing in rank.timings)
    return tuple(slowest(timings, "op", "size", "part"))
