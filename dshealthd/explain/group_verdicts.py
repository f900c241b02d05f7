"""Verdicts on process groups: which ranks all members together show to be the culprits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dshealthd.core.text import plural
from dshealthd.explain.coverage import Coverage
from dshealthd.explain.events import Place, listed
from dshealthd.explain.facts import Recognized

if TYPE_CHECKING:
    from dshealthd.explain.ledger import GroupMember, Ledger

MAX_SIZE = 200_000
"""Ranks of the largest plausible job."""
_SHOWN = 3
"""Maximum number of ranks whose lines and collectives are shown of each side."""
KINDS = ("behind", "stuck", "mismatch", "missing", "symmetric", "unknown")
"""Kinds of verdicts, those that say most first."""
_PER_NODE = (4, 8, 16)
"""Usual numbers of ranks per node; two ranks may be silent together by chance."""
_UNEVEN = frozenset({
    "SCATTER", "GATHER", "ALLTOALL", "ALLTOALL_BASE", "SEND", "RECV", "ALLGATHER",
    "REDUCE_SCATTER", "gather", "scatter", "all_to_all", "all_gather", "reduce_scatter",
})  # fmt: skip
"""Operations whose sizes may legitimately differ between ranks: they take lists of tensors."""


@dataclass(frozen=True, slots=True)
class GroupVerdict:
    """What all members of one group show together."""

    kind: str
    """One of KINDS."""
    group: str
    sequence: int | None
    operation: str
    says: str
    culprits: tuple[int, ...] = ()
    """Ranks in the whole job."""
    proof: tuple[Place, ...] = ()
    waiting: tuple[int, ...] = ()
    key: str = ""
    """Key of the group: several groups may share a name, such as a job's tensor-parallel groups."""
    is_sure: bool = True
    """False if it holds only when the group has no ranks besides those whose logs are here."""

    @property
    def text(self) -> str:
        """The verdict in words, with its culprits."""
        return f"{listed(self.culprits)} {self.says}" if self.culprits else self.says


def judge_dumps(digests: Mapping[int, Mapping[str, Any]]) -> list[GroupVerdict]:
    """Return the verdicts that the flight recorders of some ranks show without any log.

    `digests` has what `dshealthd.explain.flight_recorder.digest` returns, by rank.
    """
    found = Recognized()
    for rank, digest in digests.items():
        found.ledger.add_dump(rank, digest, Place(f"rank {rank}", 0, "flight recorder"))
    return judge_groups(found.ledger, None, digests, Coverage(found, near=0.0))


def judge_groups(
    ledger: Ledger, world: int | None, seen: Iterable[int], coverage: Coverage
) -> list[GroupVerdict]:
    """Return the verdict on each group that waits, those with culprits first."""
    present = set(seen)
    found = [
        judge(ledger, group, members, world, present, coverage)
        for group, members in ledger.groups_with_pending().items()
        if any(member.waits for member in members.values())
    ]
    found = follow(found)
    if ledger.running:
        found.append(disagreement(ledger.running))
    return sorted(
        found, key=lambda verdict: (KINDS.index(verdict.kind), -len(verdict.waiting), verdict.key)
    )


def judge(
    ledger: Ledger,
    group: str,
    members: Mapping[int, GroupMember],
    world: int | None,
    present: set[int],
    coverage: Coverage,
) -> GroupVerdict:
    """Return which ranks are the culprits in a process group in which some ranks wait.

    `world` is the number of ranks in the job, `present` the ranks that appear in any log, and
    `coverage` says whose logs cover the hang.
    """
    is_whole = _is_whole(ledger, group)
    size = _group_size(ledger, group, members, world, present)
    label = ledger.names.get(group) or ("default group" if is_whole else f"group {group}")
    waiting = [member for member in members.values() if member.timed_out is not None]
    # If no watchdog has reported, a flight recorder shows the ranks with an unfinished operation.
    waiting = waiting or [member for member in members.values() if member.waits]
    numbers = map(_number, waiting)
    # The earliest: later ones wait for it, as a rank runs the operations of a group in order.
    sequence = min((number for number in numbers if number is not None), default=None)
    stuck = [member for member in waiting if _number(member) == sequence]
    operation = next((member.operation for member in stuck if member.operation), "collective")

    ranks = tuple(sorted(member.in_job for member in waiting))
    what = f"{operation} #{sequence}" if sequence is not None else operation
    what += f" of the {label}{_called(stuck, sequence)}"

    def verdict(kind: str, culprits: list[GroupMember], says: str) -> GroupVerdict:
        proof = [member.place for member in (*culprits[:_SHOWN], *stuck[:_SHOWN])]
        accused = tuple(sorted(member.in_job for member in culprits))
        return GroupVerdict(
            kind, label, sequence, operation, says, accused, tuple(proof), ranks, group
        )

    if sequence is not None:
        behind = [
            member
            for member in members.values()
            if member.enqueued is not None and member.enqueued < sequence
        ]
        entered = [
            member
            for member in members.values()
            if member.timed_out == sequence
            or (member.enqueued is not None and member.enqueued >= sequence)
        ]
        if behind and entered:
            # The minority is the culprit: a bug or a fault affects few, and the others wait.
            if len(behind) <= len(entered):
                last = ", ".join(
                    sorted({
                        f"#{member.enqueued}{_called([member], member.enqueued)}"
                        for member in behind[:_SHOWN]
                    })
                )  # fmt: skip
                text = f"never entered {what}; last enqueued: {last}"
                return verdict("behind", behind, text)
            of = f"{plural(len(entered), 'rank')} of {size or 'an unknown number'}"
            return verdict("unknown", [], f"{of} reported entering {what}")
        onward = [
            member
            for member in members.values()
            if member.timed_out != sequence
            and member.waits
            and member.completed is not None
            and member.completed >= sequence
        ]
        if len(stuck) <= len(onward):
            text = f"did not finish {what}, which others had completed"
            return verdict("stuck", stuck, text)
        if odd := _odd(members.values(), sequence, stuck):
            number, minority, other, is_clear = odd
            names = f"{_described(minority[0], number)} where others ran {other}"
            if not is_clear:  # the ranks without a log may decide which one is the majority
                return verdict(
                    "unknown", [], f"as many ranks ran {names} as #{number} of the {label}"
                )
            return verdict("mismatch", minority, f"ran {names} as #{number} of the {label}")
    how = "is pending" if ledger.dumped.keys() >= set(ranks) else "timed out"
    text = f"{what} {how} on {plural(len(waiting), 'rank')}"
    unknown = verdict("unknown", [], text)
    if size is None:
        return unknown
    absent = sorted(set(range(size)) - set(members))
    if absent:
        missed = _missed(ledger, group, absent, size, present)
        return _of_silent(ledger, unknown, what, absent, missed, stuck, coverage)
    if len(stuck) == len(members) and size > 1:
        text = f"all {size} ranks entered {what} and none completed it"
        # If the size is only known from the highest rank in the logs, there may be more ranks.
        is_known = ledger.ranks_of.get(group) or world
        is_sure = bool(is_known) or coverage.is_one_whole_log
        return replace(unknown, kind="symmetric", says=text, is_sure=is_sure)
    return unknown


def _of_silent(
    ledger: Ledger,
    unknown: GroupVerdict,
    what: str,
    absent: Sequence[int],
    missed: tuple[int, ...],
    stuck: Sequence[GroupMember],
    coverage: Coverage,
) -> GroupVerdict:
    """Return the verdict on silent ranks: `absent` ones, of which `missed` ones may be culprits."""
    # A dump shows what is pending; a report missing from a log may have been cut away.
    silent = missed or (absent if _is_whole(ledger, unknown.key) else ())
    if gaps := coverage.gaps(rank for rank in silent if rank not in ledger.dumped):
        told = "; ".join(gaps)  # one for each reason
        return replace(unknown, says=f"it is unclear which rank did not enter {what}: {told}")
    if missed:
        are_idle = all(rank in ledger.dumped for rank in missed)
        did = "had nothing pending in" if are_idle else "never reported on"
        text = f"{did} {what}, in which the others waited"
        proof = [ledger.dumped[rank] for rank in missed[:_SHOWN] if rank in ledger.dumped]
        proof += [member.place for member in stuck[:_SHOWN]]
        return replace(unknown, kind="missing", says=text, culprits=missed, proof=tuple(proof))
    return replace(unknown, says=f"{listed(absent)} never reported on {what}")


def _group_size(
    ledger: Ledger,
    group: str,
    members: Mapping[int, GroupMember],
    world: int | None,
    present: set[int],
) -> int | None:
    """Return how many ranks a group has; None if unknown or implausibly many."""
    is_whole = _is_whole(ledger, group)
    size = len(ledger.ranks_of.get(group, ())) or (world if is_whole else None)
    # Unless its ranks are numbered anew, a group that has all ranks of the logs is the whole job.
    if size is None and (is_whole or (len(members) > 1 and set(members) == present)):
        size = max((*present, *members)) + 1
    return size if size is not None and size <= MAX_SIZE else None


def _is_whole(ledger: Ledger, group: str) -> bool:
    """Return whether a process group has all ranks of the job."""
    return group in {"0", "?"} or ledger.names.get(group) == "default_pg"


def _missed(
    ledger: Ledger, group: str, absent: list[int], size: int, present: set[int]
) -> tuple[int, ...]:
    """Return the ranks of the job that are missing in a group; empty if unclear."""
    few = 2 * len(absent) < size
    known = ledger.ranks_of.get(group)
    if known:
        return tuple(sorted(known[rank] for rank in absent)) if few else ()
    if not is_part_of_job(absent):
        return ()
    heard = len(absent) < size and set(absent) <= present
    return tuple(absent) if _is_whole(ledger, group) and (few or heard) else ()


def is_part_of_job(ranks: list[int]) -> bool:
    """Return whether these are a single rank or one whole node: others may have ended too early."""
    count = len(ranks)
    return count == 1 or (
        count in _PER_NODE and ranks[0] % count == 0 and ranks[-1] - ranks[0] == count - 1
    )


def _number(member: GroupMember) -> int | None:
    if member.timed_out is not None or member.completed is None:
        return member.timed_out
    return member.completed + 1


def _called(members: Sequence[GroupMember], number: int | None) -> str:
    """Return where the job's code called an operation, in brackets; empty if no dump says so."""
    for member in members:
        if (found := member.operations.get(number if number is not None else -1)) and found.at:
            return f" (called at {found.at})"
    return ""


def _described(member: GroupMember, number: int) -> str:
    name, size, _ = member.operations.get(number, (member.operation, member.size, ""))
    return f"{name or 'another operation'} of {size.partition(':')[0] or 'another'} elements"


def _odd(
    members: Iterable[GroupMember], sequence: int, stuck: list[GroupMember]
) -> tuple[int, list[GroupMember], str, bool] | None:
    """Find the first sequence number at which a minority ran another operation or another size.

    Return the number, the minority, what the others ran, and whether those are clearly more.
    """
    by_number: dict[int, dict[tuple[str, str], list[GroupMember]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for member in members:
        for number, operation in member.operations.items():
            by_number[number][operation.name, operation.size].append(member)
    if not by_number:
        for member in stuck:
            if member.operation:
                by_number[sequence][member.operation, member.size].append(member)
    for number, kinds in sorted(by_number.items()):
        names = {name for name, _ in kinds}
        groups: dict[tuple[str, str], list[GroupMember]] = defaultdict(list)
        for (name, size), found in kinds.items():
            # Ranks may legitimately pass different sizes to some operations.
            groups[name, "" if len(names) > 1 or names & _UNEVEN else size] += found
        *few, most = sorted(groups.values(), key=len)
        if few:
            minority = [member for group in few for member in group]
            return number, minority, _described(most[0], number), len(few[-1]) < len(most)
    return None


def disagreement(running: Mapping[int, tuple[str, Place]]) -> GroupVerdict:
    """Return which ranks run a different collective from most; no culprit without a majority."""
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for rank, (what, _) in sorted(running.items()):
        ranks_of[what].append(rank)
    (most, majority), *rest = sorted(ranks_of.items(), key=lambda item: -len(item[1]))
    culprits = tuple(rank for _, ranks in rest for rank in ranks)
    places = tuple(dict.fromkeys(place for _, place in running.values()))
    others = "; ".join(what for what, _ in rest[:_SHOWN])
    says = f"ran {others} where others ran {most}"
    if 2 * len(majority) <= len(running):
        culprits = ()
        first = sorted(running.items())[:_SHOWN]
        told = "; ".join(f"rank {rank}: {what}" for rank, (what, _) in first)
        says = f"ranks ran different collectives at the same time ({told})"
    return GroupVerdict(
        "mismatch", "default group", None, "collective", says, culprits, places[:_SHOWN]
    )


def follow(verdicts: list[GroupVerdict]) -> list[GroupVerdict]:
    """Clear a rank blamed by one group if it waits in another group that blames other ranks.

    A rank that hangs in a tensor-parallel collective never enters the data-parallel one, whose
    group wrongly blames it.
    """
    accused_by = {verdict.key: set(verdict.culprits) for verdict in verdicts if verdict.culprits}
    waits_in: dict[int, set[str]] = defaultdict(set)
    for verdict in verdicts:
        for rank in verdict.waiting:
            waits_in[rank].add(verdict.key)
    found = []
    for verdict in verdicts:
        left = tuple(
            rank
            for rank in verdict.culprits
            if all(
                group == verdict.key or rank in accused_by.get(group, ())
                for group in waits_in[rank]
            )
        )
        kind, says = verdict.kind, verdict.says
        if verdict.culprits and not left:
            what = f"{verdict.operation} of the {verdict.group}"
            kind, says = "unknown", f"{what} waited for ranks that hung in another group"
        found.append(replace(verdict, kind=kind, says=says, culprits=left))
    return found
