"""Which ranks the logs blame for a failure, once its cause is known."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from dshealthd.explain.case import MISMATCH, Case, are_near
from dshealthd.explain.events import Event, Place, listed
from dshealthd.explain.facts import SEVERAL
from dshealthd.explain.group_verdicts import MAX_SIZE, GroupVerdict, is_part_of_job
from dshealthd.explain.names import named, ranks_in
from dshealthd.explain.prefilter import bare

ON_ALL = " (on all ranks)"
"""The end of a statement on a cause that all ranks report alike."""
ALIKE = " alike)"
"""The end of a statement on a cause that several ranks report alike."""
_QUOTED = {"child-failed/python", "child-failed/stated"}
"""What no pattern knows."""
_OF_RANKS = {"program", "communication"}
_LOST = {"nccl-remote-error", "nccl-timeout", "gradient-sync-timeout", "ranks-stuck-at-init"}
"""Failures of which another rank is the cause."""
_OF_PEERS = {*_LOST, "nccl-all-reduce-failed"}
"""Failures that a rank reports although another one may be the cause."""


def accused(
    root: Event, case: Case, verdicts: Sequence[GroupVerdict]
) -> tuple[tuple[int, ...], tuple[Place, ...], str]:
    """Return the culprit ranks of a failure, the proof, and the statement."""
    alike = [event for event in case.causes if are_alike(event, root)]
    same = sorted({event.rank for event in alike if event.rank is not None})
    places = tuple(event.place for event in alike)
    proof = [root.place]
    if root.layer != "communication":
        if root.ranks:
            is_all = len(root.ranks) >= (case.world or len(case.seen) + 1)
            is_all |= root.pattern in _QUOTED and _is_common(root.ranks, case)
            return () if is_all else root.ranks, (root.place,), root.says
        if root.pattern == "child-failed/signal":
            return () if root.rank is None else (root.rank,), (root.place,), root.says
        told = {rank for one in case.causes for rank in ranks_in(one.fields.get("message", ""))}
        is_told = told >= {root.rank}  # a rank passes on the exceptions of those that it lists
        same = sorted(told) if is_told else same
        if root.layer == "program" and (is_told or len(same) > 1):
            if len(same) > 1 and len(same) >= (case.world or max(case.seen) + 1):
                return (), places, f"{root.says}{ON_ALL}"
            if not is_told and _is_common(same, case):
                return (), places, f"{root.says} ({listed(same)}{ALIKE}"
            return tuple(same), places, root.says
        ranks = [] if root.role == "loss" else _of_one(root, alike, case)
        return tuple(ranks), tuple(proof), root.says
    if root.slug == "rendezvous-unreachable":
        # Where most ranks cannot reach the master, it is the master that is gone, and they its
        # victims.
        if len(same) > 1 and len(case.seen - {0, *same}) < len(same):
            case.missing.append("the log of rank 0 and of the launcher on its host")
            return (), places, f"{root.says} ({listed(same)})"
        return tuple(same), places, root.says
    if root.is_timeout:
        missed = sorted({rank for rank, _ in case.found.ledger.named})
        for verdict in verdicts:
            if verdict.kind == "symmetric":
                case.missing.append("fabric and GPU counters: the fault is inside the collective")
                text = f"{verdict.says}: the fabric or a GPU may be the culprit"
                if not verdict.is_sure:
                    text += ", unless a rank without a log here never entered it"
                    case.missing.append("the number of ranks, and the logs of all ranks")
                return (), verdict.proof, text
            if verdict.culprits:
                return verdict.culprits, (*verdict.proof, *proof), verdict.text
        if missed:
            places = tuple(place for _, place in case.found.ledger.named)
            return tuple(missed), places, f"{root.says}; {listed(missed)} did not take part"
        if (blocked := _blocked_alone(alike, case)) is not None:
            own = tuple(event.place for event in alike if event.rank == blocked)
            return (blocked,), own, f"rank {blocked}: {root.says}"
        if verdicts:
            return _without_culprit(case, verdicts[0])
    is_own = root.pattern != MISMATCH and root.slug not in _OF_PEERS
    if is_own and (struck := _struck(root, case)):
        return tuple(struck), tuple(proof), root.says
    absent = absent_ranks(case)
    if absent:
        text = f"{root.says}; only {listed(absent)} reported no failure"
        failures = [f.place for f in case.found.failures if f.rank in absent]
        return tuple(absent), (*proof, *failures), text
    if root.slug in _OF_PEERS:
        case.missing.append("the log of the rank that the other ranks lost or waited for")
    return (), tuple(proof), root.says


def _without_culprit(case: Case, verdict: GroupVerdict) -> tuple[tuple[()], tuple[Place, ...], str]:
    """Return what a verdict says that names nobody; only a mismatch is clear without more logs."""
    if verdict.kind != "mismatch":
        why = verdict.says.partition(": ")[2] or "from before the hang until its end"
        case.missing.append(f"complete logs of all ranks: {why}")
    return (), verdict.proof, verdict.says


def are_alike(event: Event, root: Event) -> bool:
    """Return whether two events are of one kind; what no pattern knows must have the same words."""
    if (event.slug, event.layer, event.role) != (root.slug, root.layer, root.role):
        return False
    is_known = not {event.pattern, root.pattern} & _QUOTED
    return is_known or _words(event) == _words(root)


def _words(event: Event) -> str:
    """Return what happened, without the numbers in it and without where it did."""
    return bare(event.title + event.fields.get("message", "").partition("\n")[0])


def _is_common(ranks: Sequence[int], case: Case) -> bool:
    """Return whether so many ranks fail alike that the cause is none of theirs: not if all of them
    are on one host, and other ranks are elsewhere.
    """
    return len(ranks) >= SEVERAL and not case.identities.share_a_host(ranks)


def _of_one(root: Event, alike: Sequence[Event], case: Case) -> list[int]:
    """Return the ranks that a cause is of: its own, or else those that failed on its host, or the
    first of torchrun's summary.
    """
    if root.rank is not None:
        return [root.rank]
    if struck := _struck(root, case):
        return struck
    if root.layer in {"hardware", "scheduler"}:
        return []
    several = {failure.rank for failure in case.found.failures if (failure.exit or 0) > 0}
    others = [one for one in case.causes if one.frames and not one.origin.labeled]
    if sum(one.count for one in (alike if len(several) > 1 else others)) > 1:
        return []  # each of these ranks, or another process, may have printed it
    pid = root.origin.pid
    found = [
        failure for failure in case.found.failures if failure.root and pid in {None, failure.pid}
    ]
    failed = min(found, key=lambda failure: failure.time, default=None)
    if failed is None or failed.rank is None:
        return []
    is_there = root.host is None or case.identities.is_on(failed.rank, root.host)
    return [failed.rank] if is_there else []


def _struck(root: Event, case: Case) -> list[int]:
    """Return the ranks that a host's failure struck: those whose process or GPU its kernel
    names, or else that failed on it, not only by losing a peer; empty if these are all ranks.
    """
    identities = case.identities
    if root.host is None:
        return []
    beneath = [
        one
        for one in case.told
        if (one.layer == "hardware" or one.of_kernel)
        and (are_near(one, root) or (one.slug, one.host) == (root.slug, root.host))
    ]
    pids = (named(one.place.quote).get("pid") for one in beneath)
    known = [*(identities.of_pid(int(pid)) for pid in pids if pid), *(one.rank for one in beneath)]
    if any(rank is not None for rank in known):
        return sorted({rank for rank in known if rank is not None})
    failing = {
        (event.rank, event.slug in _OF_PEERS)
        for event in (*case.causes, *case.consequences)
        if event is not root and event.rank is not None and event.slug not in _LOST
        and not (root.rank is None and are_alike(event, root))
        and event.layer in _OF_RANKS
    }  # fmt: skip
    # A collective fails in every rank when it does in one.
    failed = {rank for rank, is_of_peers in failing if not is_of_peers}
    failed = failed or {rank for rank, _ in failing}
    there = {rank for rank in failed if identities.is_on(rank, root.host)}
    return [] if there >= case.seen else sorted(there)


def _blocked_alone(events: Sequence[Event], case: Case) -> int | None:
    """Return the only rank whose watchdog was blocked; None if there are several, or if unclear.

    A watchdog that first reports a collective may be blocked by ending it, which is not a cause.
    """
    blocked = {event.rank for event in events if event.pattern == "nccl-timeout/heartbeat"}
    reported = {event.rank for event in events if event.pattern == "nccl-timeout/watchdog"}
    alone = len(blocked) == 1 and not blocked & reported and len(case.seen) > 1
    size = case.world or max(case.seen, default=0) + 1
    if not alone or (rank := next(iter(blocked))) is None or size > MAX_SIZE:
        return None
    gaps = case.coverage.gaps(sorted(set(range(size)) - blocked))
    return rank if case.coverage.begins_before(rank) and not gaps else None


def left_silently(case: Case) -> Event | None:
    """Return the launcher's report of a culprit whose exit code no exception explains."""
    ends = (event for event in case.consequences if event.slug == "child-failed")
    return next((event for event in ends if int(event.fields.get("exit", 0)) > 1), None)


def absent_ranks(case: Case) -> list[int]:
    """Return the ranks that reported nothing while all others did; empty if unclear."""
    failures = [failure for failure in case.found.failures if failure.rank is not None]
    told = {event.rank for event in case.causes if event.rank is not None and event.role != "loss"}
    told |= {
        failure.rank
        for failure in failures
        if failure.exit != -signal.SIGTERM and failure.rank is not None
    }
    if not told or not case.coverage.has_whole_summaries:
        return []
    size = case.world or max(case.seen | told) + 1
    if size > MAX_SIZE:
        return []
    absent = sorted(set(range(size)) - told)
    # Without a known world size there may be ranks without a log, and of two, one that no log has
    # may be the other's victim.
    alone = len(absent) == 1 and case.world is not None and case.seen.issuperset(absent)
    is_part = is_part_of_job(absent) or case.identities.share_a_host(absent)
    is_clear = is_part and (2 * len(absent) < size or alone)
    return absent if is_clear and not case.coverage.gaps(absent) else []
