"""The collectives of every group by rank, from the watchdogs' lines and flight recorders.

A collective ends when all ranks of its group have entered it. Who has not is at fault, not who
reports the time-out: those are the ones that waited. Where all have entered the same operation
with the same size, the fault is inside the collective (fabric or GPU) and no rank is accused.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dshealthd.explain.events import Origin, Place

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dshealthd.explain.events import Event

MAX_MEMBERS = 100_000
_GROUP = re.compile(
    r"\[PG (?:ID \d+ PG GUID )?(?P<group>[\w./:-]+)(?:\((?P<name>[^)]*)\))? Rank (?P<rank>\d+)\]"
)
_GROUP_RANK = re.compile(r"\[Rank (?P<rank>\d+)\]")
_SEQUENCE = re.compile(r"(?:work sequence id|watchdog at work|at NCCL work): (?P<sequence>\d+)")
_GATHERS = ("ALLGATHER", "_ALLGATHER_BASE", "ALLGATHER_COALESCED")
_SCATTERS = ("REDUCE_SCATTER", "_REDUCE_SCATTER_BASE")
_UNEVEN = frozenset({
    "SCATTER", "GATHER", "ALLTOALL", "ALLTOALL_BASE", "SEND", "RECV", "ALLGATHER",
    "REDUCE_SCATTER", "gather", "scatter", "all_to_all", "all_gather", "reduce_scatter",
})  # fmt: skip
"""Operations whose sizes may differ between ranks by right: they take lists of tensors."""


@dataclass(slots=True)
class Member:
    """How far one rank of one group is."""

    place: Place
    group_rank: int
    rank: int | None = None
    """In the whole job."""
    timed_out: int | None = None
    operation: str = ""
    size: str = ""
    enqueued: int | None = None
    completed: int | None = None
    operations: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Name and size by number, of a flight recorder."""

    @property
    def waits(self) -> bool:
        """Whether it has an operation that did not end."""
        return self.timed_out is not None or (
            self.enqueued is not None
            and self.completed is not None
            and self.enqueued > self.completed
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one group's members say together."""

    kind: str
    """behind, ahead, missing, mismatch, symmetric or unknown."""
    group: str
    sequence: int | None
    operation: str
    says: str
    culprits: tuple[int, ...] = ()
    """Ranks in the whole job."""
    proof: tuple[Place, ...] = ()
    waiting: tuple[int, ...] = ()


@dataclass(slots=True)
class Ledger:
    """What all ranks say of their collectives."""

    groups: dict[str, dict[int, Member]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    named: list[tuple[int, Place]] = field(default_factory=list)
    """Ranks that torch's own desync report, or a barrier, names."""
    in_gradients: bool = False
    has_dumps: bool = False
    """Flight recorders are among what was read."""
    _pending: dict[tuple[Origin, int], Member] = field(default_factory=dict)

    def add_line(self, event: Event, raw_text: str) -> None:
        """Take a line of the watchdog that a pattern of `nccl-timeout` matched."""
        fields, origin, place = event.fields, event.origin, event.place
        for number in re.findall(r"\d+", fields.get("culprits", fields.get("culprit", ""))):
            self.named.append((int(number), place))
        found = _GROUP.search(raw_text)
        rank = _GROUP_RANK.search(raw_text)
        if event.pattern.endswith("/watchdog"):
            group_rank = int(rank["rank"]) if rank else origin.rank
            if group_rank is None:
                return
            member = Member(
                place,
                group_rank,
                origin.rank,
                int(fields["sequence"]) if "sequence" in fields else None,
                fields.get("operation", ""),
                f"{fields.get('numel_in', '')}:{fields.get('numel_out', '')}",
            )
            if found:
                self._join(found["group"], found["name"], member)
            else:
                self._pending.setdefault((origin, group_rank), member)
        elif event.pattern.endswith("/state") and found:
            waiting = self._pending.get((origin, int(found["rank"])))
            sequence = _SEQUENCE.search(raw_text)
            member = Member(place, int(found["rank"]), origin.rank)
            if (
                waiting
                and waiting.group_rank == member.group_rank
                and (sequence is None or waiting.timed_out in {None, int(sequence["sequence"])})
            ):
                if sequence is not None:
                    self._pending.pop((origin, waiting.group_rank), None)
                    member = waiting
                    member.timed_out = int(sequence["sequence"])
            elif sequence is not None:
                member.timed_out = int(sequence["sequence"])
            member.enqueued, member.completed = int(fields["enqueued"]), int(fields["completed"])
            self._join(found["group"], found["name"], member)

    def _join(self, group: str, name: str | None, member: Member) -> None:
        members = self.groups.setdefault(group, {})
        if name:
            self.names[group] = name
        known = members.get(member.group_rank)
        if known is None:
            if len(members) < MAX_MEMBERS:
                members[member.group_rank] = member
            return
        if known.timed_out is None and member.timed_out is not None:
            known.timed_out, known.operation = member.timed_out, member.operation
            known.size, known.place = member.size, member.place
        if known.enqueued is None:
            known.enqueued, known.completed = member.enqueued, member.completed
        known.rank = member.rank if known.rank is None else known.rank

    def add_dump(self, rank: int, digest: Mapping[str, Any], place: Place) -> None:
        """Take what a flight recorder's dump says (`dshealthd.evidence.dump.digest`)."""
        self.has_dumps = True
        for group in digest["groups"]:
            key, _, name = group["name"].partition(" ")
            members = [int(number) for number in re.findall(r"\d+", group["ranks"])]
            if members:
                self.sizes[key] = len(members)
            pending = group["pending"][0] if group["pending"] else None
            group_rank = members.index(rank) if rank in members else rank
            member = Member(place, group_rank, rank)
            member.enqueued, member.completed = group["entered"], group["completed"]
            if pending is not None:
                member.timed_out = pending["number"]
                member.operation, member.size = pending["name"], pending["sizes"]
            for operation in (*group["last"], *group["pending"]):
                member.operations[operation["number"]] = operation["name"], operation["sizes"]
            self._join(key, name, member)

    def verdicts(self, world: int | None, seen: Iterable[int]) -> list[Verdict]:
        """Return what each group that waits says; first what accuses somebody."""
        present = set(seen)
        groups = {group: dict(members) for group, members in self.groups.items()}
        for member in self._pending.values():  # releases that print no state: no group is told
            groups.setdefault("?", {}).setdefault(member.group_rank, member)
        found = [
            self._judge(group, members, world, present)
            for group, members in groups.items()
            if any(member.waits for member in members.values())
        ]
        found = _follow(found)
        order = ("behind", "mismatch", "ahead", "missing", "symmetric", "unknown")
        return sorted(found, key=lambda verdict: (order.index(verdict.kind), verdict.group))

    def _judge(
        self, group: str, members: dict[int, Member], world: int | None, present: set[int]
    ) -> Verdict:
        is_whole = group in {"0", "?"} or self.names.get(group) == "default_pg"
        size = self.sizes.get(group) or (world if is_whole else None) or _size(members.values())
        if size is None and is_whole:
            size = max((*present, *members)) + 1
        label = self.names.get(group) or ("default group" if is_whole else f"group {group}")
        waiting = [member for member in members.values() if member.timed_out is not None]
        waiting = waiting or [member for member in members.values() if member.waits]
        numbers = Counter(_number(member) for member in waiting)
        sequence = min((number for number in numbers if number is not None), default=None)
        stuck = [member for member in waiting if _number(member) == sequence]
        operation = next((member.operation for member in stuck if member.operation), "collective")

        def global_rank(member: Member) -> int:
            return member.group_rank if member.rank is None else member.rank

        ranks = tuple(sorted(global_rank(member) for member in waiting))
        what = f"{operation} #{sequence}" if sequence is not None else operation

        def verdict(kind: str, culprits: list[Member], says: str) -> Verdict:
            proof = [member.place for member in (*culprits[:3], *stuck[:2])]
            accused = tuple(sorted(global_rank(member) for member in culprits))
            return Verdict(kind, label, sequence, operation, says, accused, tuple(proof), ranks)

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
                if len(behind) <= len(entered):
                    last = ", ".join(sorted({f"#{member.enqueued}" for member in behind[:8]}))
                    text = f"never entered {what} of the {label}; last enqueued {last}"
                    return verdict("behind", behind, text)
                text = f"alone entered {what} of the {label}, which most ranks never called"
                return verdict("ahead", entered, text)
            done = [
                member
                for member in members.values()
                if member.completed is not None and member.completed >= sequence
            ]
            onward = [member for member in done if member.waits]
            idle = [member for member in done if not member.waits]
            if onward and len(stuck) <= len(onward):
                text = f"did not finish {what} of the {label}, which others had left behind"
                return verdict("behind", stuck, text)
            if idle and len(idle) <= len(waiting):
                text = f"called nothing after {what} of the {label}, while others waited there"
                return verdict("behind", idle, text)
            if odd := _odd(members.values(), sequence, stuck):
                number, minority, majority = odd
                names = f"{_described(minority[0], number)} where others ran {majority}"
                return verdict("mismatch", minority, f"ran {names} as #{number} of the {label}")
        if size is not None:
            absent = sorted(set(range(size)) - set(members))
            if absent and (
                2 * len(absent) < size
                or (len(absent) < size and set(absent) <= present and is_whole)
            ):
                text = f"never reported on {what} of the {label}, in which the others waited"
                if is_whole:
                    return Verdict(
                        "missing", label, sequence, operation, text, tuple(absent),
                        tuple(member.place for member in stuck[:3]), ranks,
                    )  # fmt: skip
                numbers_text = ", ".join(map(str, absent[:8]))
                return verdict("unknown", [], f"rank {numbers_text} of the {label} {text}")
            if not absent and len(stuck) == len(members):
                text = f"all {size} ranks entered {what} of the {label} and none left it"
                return verdict("symmetric", [], text)
        text = f"{what} of the {label} timed out on {len(waiting)} ranks"
        return verdict("unknown", [], text)


def _number(member: Member) -> int | None:
    if member.timed_out is not None or member.completed is None:
        return member.timed_out
    return member.completed + 1


def _size(members: Iterable[Member]) -> int | None:
    """Tell how large a group is from an operation whose output is a multiple of its input."""
    for member in members:
        first, _, second = member.size.partition(":")
        if first.isdecimal() and second.isdecimal() and int(first) and int(second):
            if member.operation in _GATHERS and int(second) % int(first) == 0:
                return int(second) // int(first)
            if member.operation in _SCATTERS and int(first) % int(second) == 0:
                return int(first) // int(second)
    return None


def _described(member: Member, number: int) -> str:
    name, size = member.operations.get(number, (member.operation, member.size))
    return f"{name or 'another operation'} of {size.partition(':')[0] or 'another'} elements"


def _odd(
    members: Iterable[Member], sequence: int, stuck: list[Member]
) -> tuple[int, list[Member], str] | None:
    """Find the first number at which a minority ran another operation, or another size."""
    by_number: dict[int, dict[tuple[str, str], list[Member]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for member in members:
        for number, (name, size) in member.operations.items():
            by_number[number][name, size].append(member)
    if not by_number:
        for member in stuck:
            if member.operation:
                by_number[sequence][member.operation, member.size].append(member)
    for number, kinds in sorted(by_number.items()):
        names = {name for name, _ in kinds}
        uneven = bool(names & _UNEVEN)
        if len(names) > 1:
            merged: dict[tuple[str, str], list[Member]] = defaultdict(list)
            for (name, _), group in kinds.items():
                merged[name, ""] += group
            ordered = sorted(merged.items(), key=lambda kind: len(kind[1]))
        elif len(kinds) < 2 or uneven:  # noqa: PLR2004 - all alike
            continue
        else:
            ordered = sorted(kinds.items(), key=lambda kind: len(kind[1]))
        most = ordered[-1]
        minority = [member for kind, group in ordered[:-1] for member in group]
        if len(ordered[0][1]) == len(most[1]):  # nobody is in the minority
            minority = [member for _, group in ordered for member in group]
        return number, minority, _described(most[1][0], number)
    return None


def _follow(verdicts: list[Verdict]) -> list[Verdict]:
    """Clear a rank that is accused by one group while it waits in another that accuses others.

    A rank that hangs in a tensor-parallel collective never enters the data-parallel one: its
    group there accuses it, and is wrong.
    """
    accused_by = {verdict.group: set(verdict.culprits) for verdict in verdicts if verdict.culprits}
    waits_in: dict[int, set[str]] = defaultdict(set)
    for verdict in verdicts:
        for rank in verdict.waiting:
            waits_in[rank].add(verdict.group)
    found = []
    for verdict in verdicts:
        cleared = {
            rank
            for rank in verdict.culprits
            if any(
                group != verdict.group and rank not in accused_by.get(group, set())
                for group in waits_in[rank]
            )
        }
        left = tuple(rank for rank in verdict.culprits if rank not in cleared)
        if verdict.culprits and not left:
            verdict = Verdict(  # noqa: PLW2901 - replaced by what is left of it
                "unknown", verdict.group, verdict.sequence, verdict.operation,
                f"{verdict.operation} of the {verdict.group} waited for ranks that hung in "
                "another group", (), verdict.proof, verdict.waiting,
            )  # fmt: skip
        elif cleared:
            verdict = Verdict(  # noqa: PLW2901
                verdict.kind, verdict.group, verdict.sequence, verdict.operation, verdict.says,
                left, verdict.proof, verdict.waiting,
            )  # fmt: skip
        found.append(verdict)
    return found
