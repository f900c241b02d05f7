"""The ledger of collectives by group and rank, from watchdogs' lines and flight recorders.

A collective ends when all ranks of its group have entered it. The culprit is the rank that has not,
not those that report the time-out: they waited. If all have entered the same operation with the
same size, the fault is inside the collective (fabric or GPU) and no rank is to blame.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dshealthd.explain.events import Origin, Place

MAX_MEMBERS = 100_000
_GROUP = re.compile(
    r"\[PG (?:ID (?P<number>\d{1,9}) PG GUID )?(?P<group>[\w./:-]*)[ "
    r"]?(?:\((?P<name>[^)]*)\))?[ ]?Rank (?P<rank>\d{1,6})\]"
)
_GROUP_RANK = re.compile(r"\[Rank (?P<rank>\d{1,6})\]")
_SEQUENCE = re.compile(r"at (?:NCCL )?work(?: sequence id)?: (?P<sequence>\d{1,18})\b")
_REPORT = "Watchdog caught"
_TERMINATING = "Terminating the process after"
"""The last message of a heartbeat monitor."""
_LAST = ("terminated with exception: ", "what(): ")
"""Texts after which a watchdog repeats its report when it ends its process."""


class Operation(NamedTuple):
    """An operation in a flight recorder."""

    name: str
    size: str
    at: str
    """Where the job's code called it; empty if unknown."""


@dataclass(slots=True)
class GroupMember:
    """The progress of one rank in one group."""

    place: Place
    group_rank: int
    rank: int | None = None
    """Rank in the whole job."""
    timed_out: int | None = None
    operation: str = ""
    size: str = ""
    enqueued: int | None = None
    completed: int | None = None
    operations: dict[int, Operation] = field(default_factory=dict)
    """By sequence number, from a flight recorder."""

    @property
    def in_job(self) -> int:
        """The rank in the whole job; that in the group where it is unknown."""
        return self.group_rank if self.rank is None else self.rank

    @property
    def waits(self) -> bool:
        """Whether the member has an unfinished operation."""
        return self.timed_out is not None or (
            self.enqueued is not None
            and self.completed is not None
            and self.enqueued > self.completed
        )


@dataclass(slots=True)
class Ledger:
    """What all ranks report about their collectives."""

    groups: dict[str, dict[int, GroupMember]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    ranks_of: dict[str, list[int]] = field(default_factory=dict)
    """The ranks of a group in the whole job, if a flight recorder lists them."""
    dumped: dict[int, Place] = field(default_factory=dict)
    """Ranks whose flight recorder was read."""
    named: list[tuple[int, Place]] = field(default_factory=list)
    """Ranks that torch's own desync report, or a barrier, names."""
    running: dict[int, tuple[str, Place]] = field(default_factory=dict)
    """What each rank was running, if torch's wrapper compared it with another rank's."""
    _pending: dict[tuple[Origin, int], GroupMember] = field(default_factory=dict)
    _begun: set[tuple[int, int, str]] = field(default_factory=set)
    """Reports of watchdogs by file, rank in the group and sequence number."""
    _ended: set[tuple[int, int, str]] = field(default_factory=set)
    """Reports that were repeated as the process ended."""
    _terminated: set[tuple[int, int]] = field(default_factory=set)
    """Ranks in a group, by file, whose process was ended by its heartbeat monitor."""
    answers_signals: bool = False
    """Whether torch is a release whose ranks report the time-outs of others: 2.5 and later."""
    cut: set[int] = field(default_factory=set)
    """Files that begin or end within a stack."""

    def add_line(
        self, name: str, fields: Mapping[str, str], origin: Origin, place: Place, raw_text: str
    ) -> None:
        """Add a watchdog's line that matched a pattern of `nccl-timeout`, and what it named."""
        if named := fields.get("culprits", fields.get("culprit")):
            self.named += [(int(number), place) for number in re.findall(r"\d+", named)]
        if "runs_one" in fields and len(self.running) < MAX_MEMBERS:
            one, other = fields["runs_one"], fields["runs_other"]
            if one == other and "sequence_other" in fields:
                one, other = f"{one} #{fields['sequence']}", f"{other} #{fields['sequence_other']}"
            self.running.setdefault(int(fields["one"]), (one, place))
            self.running.setdefault(int(fields["other"]), (other, place))
        found = _GROUP.search(raw_text)
        if found is not None:
            self.answers_signals |= found["number"] is not None
            if _TERMINATING in raw_text and len(self._terminated) < MAX_MEMBERS:
                self._terminated.add((origin.source, int(found["rank"])))
            elif name.endswith("/heartbeat"):
                self._note(self._begun, (origin.source, int(found["rank"]), ""))
        if name.endswith("/watchdog"):
            rank = _GROUP_RANK.search(raw_text)
            group_rank = int(rank["rank"]) if rank else origin.rank
            if group_rank is None:
                return
            self._note_report(raw_text, (origin.source, group_rank, fields.get("sequence", "")))
            member = GroupMember(
                place,
                group_rank,
                origin.rank,
                int(fields["sequence"]) if "sequence" in fields else None,
                fields.get("operation", ""),
                f"{fields.get('numel_in', '')}:{fields.get('numel_out', '')}",
            )
            if found:
                self._join(found["group"] or found["number"] or "?", found["name"], member)
            else:
                self._pending.setdefault((origin, group_rank), member)
        elif name.endswith(("/state", "/dump-signal")) and found and "enqueued" in fields:
            waiting = self._pending.get((origin, int(found["rank"])))
            sequence = _SEQUENCE.search(raw_text)
            member = GroupMember(place, int(found["rank"]), origin.rank)
            if (
                waiting
                and sequence is not None
                and waiting.group_rank == member.group_rank
                and waiting.timed_out in {None, int(sequence["sequence"])}
            ):
                self._pending.pop((origin, waiting.group_rank), None)
                member = waiting
                member.timed_out = int(sequence["sequence"])
            member.enqueued, member.completed = int(fields["enqueued"]), int(fields["completed"])
            # Releases up to 2.3 print an uninitialized number until the first operation completes.
            if member.completed > member.enqueued:
                member.completed = None
            self._join(found["group"] or found["number"] or "?", found["name"], member)

    def _note_report(self, raw_text: str, report: tuple[int, int, str]) -> None:
        before = raw_text.partition(_REPORT)[0]
        if any(last in before for last in _LAST):
            reports = self._ended
        elif before.startswith("[") or not before:
            reports = self._begun
        else:  # an exception in a program that waits for its collectives
            return
        self._note(reports, report)

    @staticmethod
    def _note(reports: set[tuple[int, int, str]], report: tuple[int, int, str]) -> None:
        if len(reports) < MAX_MEMBERS:
            reports.add(report)

    def unended(self, left: Container[int]) -> set[int]:
        """Return the files in which a report lacks its beginning or end, which shows a cut.

        A rank that reports ends soon after. `left` are the ranks in the whole job whose exit a
        launcher reported.
        """
        gone = {report[:2] for report in self._ended}
        headless = {report[0] for report in self._ended - self._begun}
        endless = {
            source
            for source, rank, sequence in self._begun - self._ended
            if rank not in left
            and (source, rank) not in self._terminated
            # A heartbeat monitor gives no number; the watchdog may still end the process.
            and (sequence or (source, rank) not in gone)
        }
        return headless | endless | self.cut

    def _join(self, group: str, name: str | None, member: GroupMember) -> None:
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
        """Add a flight recorder's dump (`dshealthd.explain.flight_recorder.digest`)."""
        self.dumped[rank] = place
        for group in digest["groups"]:
            key, _, name = group["name"].partition(" ")
            members = [int(number) for number in re.findall(r"\d+", group["ranks"])]
            if members:
                self.ranks_of[key] = members
            pending = group["pending"][0] if group["pending"] else None
            group_rank = members.index(rank) if rank in members else rank
            member = GroupMember(place, group_rank, rank)
            member.enqueued, member.completed = group["entered"], group["completed"]
            if pending is not None:
                member.timed_out = pending["number"]
                member.operation, member.size = pending["name"], pending["sizes"]
            for operation in (*group["last"], *group["pending"]):
                member.operations[operation["number"]] = Operation(
                    operation["name"], operation["sizes"], operation["at"]
                )
            self._join(key, name, member)

    def groups_with_pending(self) -> dict[str, dict[int, GroupMember]]:
        """Return the members by group; those whose group is unknown are under `?`."""
        groups = {group: dict(members) for group, members in self.groups.items()}
        only = next(iter(groups.values())) if len(groups) == 1 else {}
        told = {(known.timed_out, known.operation, known.size) for known in only.values()}
        for member in self._pending.values():  # no state line (release or cut), so no group
            is_its = (member.timed_out, member.operation, member.size) in told
            mates = only if is_its else groups.setdefault("?", {})
            mates.setdefault(member.group_rank, member)
        return groups
