"""The text form of a RAS answer (NCCL 2.24 and later), in its verbose variant.

It is written for people: a table of groups of similar communicators, then one section for each
communicator with a problem. Communicators without a section are as the table says. So the states of
all ranks are known, but counts only for communicators whose ranks differ.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from dshealthd.jobs.ras.status import (
    ANY,
    ERRORS,
    OPERATIONS,
    OTHER,
    Communicator,
    ImpossibleAnswer,
    Lag,
    MalformedAnswer,
    RankLocation,
    RasRankState,
    Spread,
    Status,
    Trouble,
    address,
    first_lags,
    first_troubles,
    version,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_STATES = {
    "INIT": RasRankState.INIT,
    "RUNNING": RasRankState.RUNNING,
    "FINALIZE": RasRankState.FINALIZE,
    "ABORT": RasRankState.ABORT,
    "NOCOMM": RasRankState.NOT_MEMBER,
    "UNKNOWN": RasRankState.NOT_MEMBER,  # until 2.25
}
_ERRORS = {
    "Unhandled CUDA error": ERRORS[1],
    "System error": ERRORS[2],
    "Internal error": ERRORS[3],
    "Invalid argument": ERRORS[4],
    "Invalid usage": ERRORS[5],
    "Remote process error": ERRORS[6],
}

_N = r"([0-9]{1,18})"
_VERSION = re.compile(r"NCCL version (\S+) compiled with CUDA \S+")
_ROW = re.compile(rf" *{_N} +{_N} +[0-9]+ +[0-9]+(?:-[0-9]+)? +{_N} +[0-9]+ +([A-Z]+) +([A-Z,]+)")
_SECTION = re.compile(rf"#{_N}-{_N} \(([0-9a-f]{{16}})\) (INCOMPLETE|ERROR|MISMATCH)")
_PLACE = rf"(?: -- (?:GPU {_N}(?: \(NVML {_N}\))? managed by process {_N} on node (\S+)|\[process information not found\]))"
_RANK = re.compile(rf"  Rank {_N}{_PLACE}")
_RANKS = re.compile(r"  The (?:missing|unknown) ranks?: ([0-9,]+)")
_SILENT = re.compile(rf"  Missing communicator data from {_N} ranks?")
_OPERATION = re.compile(r"  Communicator ranks have different ([A-Za-z]+) operation counts")
_GROUP = re.compile(
    rf"  {_N} ranks (?:have (?:status ([A-Z]+)|launched up to operation {_N}|not launched any operations)|reported (.+))"
)
_SINGLE = re.compile(
    rf"  Rank {_N} (?:has (?:status ([A-Z]+)|launched up to operation {_N}|not launched any operations)|reported (.+?)){_PLACE}?"
)
_FAILED = re.compile(rf"  (Initialization|Asynchronous) errors? on {_N} ranks?")
_PROCESS = re.compile(
    r"  Process ([0-9]{1,18}) on node (\S+) managing GPUs? ([0-9,]+)(?: \(NVML ([0-9,]+)\))?"
)
_JOB = re.compile(rf" *{_N}(?: +[0-9]+(?:-[0-9]+)?){{2}} +{_N} +{_N}")
"""The row of the job summary: nodes, numbers per node and process, processes and GPUs in total."""
_PROCESSES = re.compile(
    rf"  (?:Missing communicator data from {_N}|{_N}) job process(?:es)?(?: (?:is|are) considered dead .*)?"
)
_IMPOSSIBLE = re.compile(r"  (?:Rank |.*\b(?:rank|process|GPU) )-[0-9]")
"""A negative number of a rank, process or GPU, which a buffer overrun in NCCL produces."""
_TIMEOUTS = re.compile(
    rf"  Encountered {_N} communication timeouts? while gathering communicator data"
)


@dataclass(slots=True)
class _TableRow:
    """A row of the table."""

    count: int
    size: int
    state: RasRankState
    named: int = 0


class _Launched(NamedTuple):
    """Ranks that have launched the same number of operations."""

    operations: int
    ranks: int
    named: list[tuple[int, RankLocation | None]]
    """All of them, or none: NCCL names only a small minority."""


@dataclass(slots=True)
class _Section:
    """The information on one communicator, from one or more sections."""

    name: str
    group: _TableRow
    silent: int = 0
    states: Counter[RasRankState] = field(default_factory=Counter)
    counts: dict[str, list[_Launched]] = field(default_factory=dict)
    """The counts that ranks have, by operation."""
    errors: Counter[tuple[str, str]] = field(default_factory=Counter)
    quiet: list[tuple[int, RankLocation | None]] = field(default_factory=list)
    failed: list[Trouble] = field(default_factory=list)


def parse_text(data: bytes) -> Status:
    """Return the status in a text answer. Raises MalformedAnswer."""
    lines = data.decode(errors="replace").split("\n")
    heads = [
        (line, underline)
        for line, underline in itertools.pairwise(lines)
        if underline and not underline.strip("=")
    ]
    if (
        not any(line.startswith("Communicators...") for line, _ in heads)
        or ("Warnings", "========") not in heads
    ):
        message = "not a RAS text answer, or an incomplete one: the headings Communicators and Warnings are missing"
        raise MalformedAnswer(message)
    return _Reader(lines).status()


class _Reader:
    """A single pass over the lines; the lines before each one decide what it belongs to."""

    def __init__(self, lines: list[str]) -> None:
        self.version = ""
        self.groups: dict[int, _TableRow] = {}
        self.sections: dict[tuple[int, int], _Section] = {}
        self.processes = {RasRankState.UNRESPONSIVE: 0, RasRankState.DEAD: 0}
        self.gone: list[tuple[RasRankState, RankLocation]] = []
        """The GPUs of unresponsive or dead processes, with the process's state."""
        self.gpus: int | None = None
        """Number of GPUs of the whole job."""
        self.timeouts = 0
        self._section: _Section | None = None
        self._named: list[tuple[int, RankLocation | None]] = []
        """The list to which ranks on the following lines belong."""
        self._operation = self._kind = ""
        self._error = ""
        self._state = RasRankState.UNRESPONSIVE
        for line in lines:
            self._read(line)

    def status(self) -> Status:
        """Return the status that was read."""
        communicators = [self._communicator(section) for section in self.sections.values()]
        for group in self.groups.values():
            if group.count > group.named:
                states = {group.state: group.size}
                communicators.append(
                    Communicator(
                        name="", size=group.size, states=states, alike=group.count - group.named
                    )
                )
        return Status(
            version=self.version,
            communicators=tuple(communicators),
            timeouts=self.timeouts,
            processes=dict(self.processes),
            ranks={},
        )

    def _read(self, line: str) -> None:
        if _IMPOSSIBLE.match(line):
            message = f"an impossible number: {line[:80]}"
            raise ImpossibleAnswer(message)
        if match := _VERSION.fullmatch(line):
            self.version = version(match[1])
        elif match := _ROW.fullmatch(line):
            if match[4] not in _STATES:
                message = f"a communicator has the status {match[4][:40]}"
                raise MalformedAnswer(message)
            self.groups[int(match[1])] = _TableRow(int(match[2]), int(match[3]), _STATES[match[4]])
        elif match := _SECTION.fullmatch(line):
            self._begin(int(match[1]), int(match[2]), match[3])
        elif line in {"INCOMPLETE", "DEAD", "TIMEOUT"}:
            self._section, self._state = (
                None,
                RasRankState.DEAD if line == "DEAD" else RasRankState.UNRESPONSIVE,
            )
        elif self._section is None:
            self._read_summary(line)
        else:
            self._read_section(self._section, line)

    def _begin(self, group: int, index: int, name: str) -> None:
        if group not in self.groups:
            message = f"communicator #{group}-{index} belongs to a group that is not in the table"
            raise MalformedAnswer(message)
        if (group, index) not in self.sections:
            self.sections[group, index] = _Section(name, self.groups[group])
            self.groups[group].named += 1
        self._section = self.sections[group, index]
        self._operation = self._kind = self._error = ""
        self._named = []

    def _read_summary(self, line: str) -> None:
        """Read a line about the job or its processes."""
        if match := _PROCESSES.fullmatch(line):
            self.processes[self._state] = int(match[1] or match[2])
        elif match := _TIMEOUTS.fullmatch(line):
            self.timeouts = int(match[1])
        elif match := _JOB.fullmatch(line):
            self.gpus = int(match[3])
        elif match := _PROCESS.fullmatch(line):
            host, pid = address(match[2]), int(match[1])
            self.gone += [
                (self._state, RankLocation(host, pid, int(gpu)))
                for gpu in (match[4] or match[3]).split(",")
                if gpu and len(gpu) < 19  # noqa: PLR2004 - 64 bits
            ]

    def _read_section(self, section: _Section, line: str) -> None:
        """Read a line about a communicator; unknown lines hold nothing that is needed."""
        if match := _SILENT.fullmatch(line):
            section.silent, self._named = int(match[1]), section.quiet
        elif match := _RANKS.fullmatch(line):
            self._named.extend(
                (int(rank), None)
                for rank in match[1].split(",", 1024)[:1024]
                if rank and len(rank) < 19  # noqa: PLR2004 - 64 bits
            )
        elif match := _FAILED.fullmatch(line):
            self._kind, self._operation = "init" if match[1] == "Initialization" else "async", ""
        elif match := _OPERATION.fullmatch(line):
            self._operation = (
                ANY if match[1] == "collective" else match[1] if match[1] in OPERATIONS else OTHER
            )
        elif match := _GROUP.fullmatch(line):
            self._read_ranks(section, int(match[1]), match.groups()[1:4])
        elif match := _SINGLE.fullmatch(line):
            self._read_ranks(section, 1, match.groups()[1:4])
            self._name(section, int(match[1]), _place(*match.groups()[4:8]))
        elif match := _RANK.fullmatch(line):
            self._name(section, int(match[1]), _place(*match.groups()[1:5]))

    def _read_ranks(self, section: _Section, number: int, facts: tuple[str | None, ...]) -> None:
        """Record a fact about a number of ranks: their status, an error, or the number of
        operations that they have launched (0 if not given).
        """
        status, launched, error = facts
        self._named, self._error = [], ""
        if status is not None:
            section.states[_STATES.get(status, RasRankState.NOT_MEMBER)] += number
        elif error is not None:
            self._error = _ERRORS.get(error, OTHER)
            section.errors[self._kind or "async", self._error] += number
        else:
            section.counts.setdefault(self._operation or ANY, []).append(
                _Launched(int(launched or 0), number, self._named)
            )

    def _name(self, section: _Section, rank: int, place: RankLocation | None) -> None:
        if self._error:
            section.failed.append(Trouble(rank, self._error, place))
        else:
            self._named.append((rank, place))

    def _communicator(self, section: _Section) -> Communicator:
        states = section.states or Counter(
            {section.group.state: max(0, section.group.size - section.silent)}
        )
        troubles = self._silent(section)
        dead = sum(trouble.what == RasRankState.DEAD for trouble in troubles)
        states += Counter(
            {RasRankState.DEAD: dead, RasRankState.UNRESPONSIVE: section.silent - dead}
        )
        spreads = {
            name: _spread(group.operations for group in groups)
            for name, groups in section.counts.items()
        }
        return Communicator(
            name=section.name,
            size=section.group.size,
            states=dict(states),
            operations=spreads,
            marks={
                mark: count
                for name, spread in spreads.items()
                for mark, count in (((name, "least"), spread[0]), ((name, "most"), spread[1]))
            },
            errors=dict(section.errors),
            behind=first_lags(
                Lag(rank, name, spreads[name].most - group.operations, place)
                for name, groups in section.counts.items()
                for group in groups
                for rank, place in group.named
                if group.operations < min(spreads[name].most, _least_unnamed(groups))
            ),
            unclear=frozenset(
                name
                for name, groups in section.counts.items()
                if _least_unnamed(groups) < spreads[name].most
            ),
            troubles=first_troubles([*troubles, *section.failed]),
        )

    def _silent(self, section: _Section) -> list[Trouble]:
        """Return the ranks that did not answer, as far as the text numbers them.

        2.24 says neither where they run nor whether they are dead. If one GPU's process is gone and
        a communicator of all GPUs lacks one rank, that rank runs there. In a smaller communicator
        the place stays unknown: a member may have destroyed it and still answer.
        """
        states = {state for state, _ in self.gone}
        listed = len(self.gone) == sum(self.processes.values())
        alike = states.pop() if listed and len(states) == 1 else RasRankState.UNRESPONSIVE
        only = (
            self.gone[0][1]
            if listed and len(self.gone) == section.silent == 1 and section.group.size == self.gpus
            else None
        )
        by_place = {(place.host, place.pid): state for state, place in self.gone}
        troubles = []
        for rank, told in section.quiet:
            place = told or only
            known = by_place.get((place.host, place.pid)) if place is not None else alike
            troubles.append(Trouble(rank, known or RasRankState.UNRESPONSIVE, place))
        return troubles


def _least_unnamed(groups: list[_Launched]) -> float:
    """Return the least count of the ranks that the text does not name; infinite if it names all.

    A rank that has launched more than these does not lag furthest.
    """
    return min((group.operations for group in groups if not group.named), default=math.inf)


def _spread(values: Iterator[int]) -> Spread:
    counts = list(values)
    return Spread(min(counts), max(counts))


def _place(
    cuda: str | None, nvml: str | None, pid: str | None, host: str | None
) -> RankLocation | None:
    """Return where a rank runs; None if NCCL did not find it."""
    return (
        None
        if cuda is None or pid is None or host is None
        else RankLocation(address(host), int(pid), int(nvml or cuda))
    )
