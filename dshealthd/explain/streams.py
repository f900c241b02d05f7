"""The origin of a line, from the prefixes that launchers, log collectors and loggers add.

Prefixes nest (`3: [default1]:[rank13]:[E1122 04:44:58.499 …] `), so they are removed one by one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from dshealthd.explain import progress
from dshealthd.explain.columns import (
    ENOUGH,
    NEARLY_ALL,
    NODE,
    RANKED,
    SAMPLE,
    TASK,
    are_of_tasks,
    ended,
    is_column,
    mark_before,
    name_at,
)
from dshealthd.explain.events import Origin, Stamp, is_name_of_host

MAX_PREFIXES = 8
HEAD = "Traceback (most recent call last)"
MAX_LEAD = 160
"""Maximum characters before a traceback that are taken for a prefix, with those of its head."""
MAX_SHAPES = 1 << 19
"""Maximum bytes of the shapes that are remembered for a file; beyond it, all are forgotten."""
_SHAPE = 1 << 10
"""Bytes that a shape needs beside its line."""
MAX_ORIGINS = 4096
"""Maximum number of origins remembered for a shape, in 1.5 MB; beyond it, all are forgotten."""
_ALIKE = bytes.maketrans(b"123456789", b"000000000")

_CLASS = r"[\w.]{1,120}(?:Error|Exception|Interrupt):"
"""How an exception begins: no program has such a name."""
_BRACKET = re.compile(
    r"\[(?:rank(?P<rank>\d{1,6})\]:?[ ]?"  # torch >= 2.3, once a process group exists
    r"|default(?P<local>\d{1,4})\]:[ ]?"  # torchrun --tee
    r"|(?P<iso>\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?)"  # logging, DeepSpeed, NCCL
    r"(?:[ ](?:[A-Z]{2}\d{1,4}[ ]?){1,4}"  # SGLang: ` DP0 TP3`
    r"|[ ](?P<level_ray>[DIWEF])[ ]\d+[ ]\d+)?\][ ]?"  # Ray's processes: ` E 211 211`
    # OLMo
    r"(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)[ ]\[[\w.]{1,80}:\d+, "
    r"rank=(?P<rank_logged>\d{1,6})\][ ])?"
    r"|(?P<level>[EWIFVD])(?:(?P<glog>\d{3,4} \d\d:\d\d:\d\d(?:\.\d+)?) )?[ ]?[\w./]+:\d+\][ ]?"
    r"|(?:INFO|WARNING|ERROR|DEBUG|CRITICAL|WARN)(?:\|[\w./]{1,80}:\d+)?\](?:[ ](?:>>|-)[ ])?[ ]?"
    r"|\d+,(?P<rank_mpi>\d{1,6})\]<std(?:out|err)>:[ ]?"  # mpirun --tag-output
    r"|[ ]*\+?(?P<uptime>\d+\.\d{6})\][ ]"  # dmesg, and its time since the line before
    r"|(?P<ctime>\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4})\][ ]"  # dmesg -T
    r"|(?P<host_mpi>[A-Za-z][\w-]*\d[\w-]*):(?P<pid>\d{4,10})\][ ]"  # Open MPI
    r"|pod/(?P<host_pod>[\w.-]+)/[\w.-]+\][ ]?)"  # kubectl logs --prefix
)
_DIGIT = re.compile(
    r"(?P<iso>\d{4}[-/]\d\d[-/]\d\d[ T_]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?)"
    r"(?:[ ]std(?:out|err)[ ][FP]|[ ]>>"
    # loguru
    r"|[ ]\|[ ](?:DEBUG|INFO|WARNING|ERROR|CRITICAL)[ ]*\|[ ][\w.<>]{1,100}:[\w.<>]{1,60}:\d+[ ]-"
    r"|[ ]-[ ](?!rank)[\w.]{1,80}[ ]-[ ](?:DEBUG|INFO|WARNING|ERROR|CRITICAL)[ ]-)?"  # logging
    r"(?:[ ][-:|])?[ ]?"
    rf"(?:(?P<named>[\w.-]+)[ ](?P<tag>(?!{_CLASS}|\d+:)[\w.@-]+(?:\[\d+\])?):[ ](?:\[[ "
    r"]*\d+\.\d+\][ ])?)?"
)
_LETTER = re.compile(
    r"(?P<syslog>[A-Z][a-z]{2}[ ][ \d]\d[ ]\d\d:\d\d:\d\d)(?:\.\d{1,9})?[ ](?P<named>[\w.-]+)[ ]"
    rf"(?P<tag>(?!{_CLASS})[\w./@-]+(?:\[\d+\])?):[ ](?:\[[ ]*\d+\.\d+\][ ])?"
    r"|(?P<level>[EWIF])(?P<glog>\d{4} \d\d:\d\d:\d\d\.\d+)[ ]+"
    r"(?:(?P<launcher>\d{1,10})[ ][^\]\s]{0,160}torch/distributed/elastic/[^\]\s]{1,80}"
    r"|\d+[ ][^\]\s]{1,160})\][ ]?"
    r"|(?:INFO|WARNING|ERROR)[ ]\d\d-\d\d[ ]\d\d:\d\d:\d\d[ ]\[?[\w./]{1,80}:\d+\][ ]?"  # vLLM
    r"|(?P<host_nccl>(?!\d+:)[\w.-]{1,255}):(?P<pid>\d{1,10}):\d{1,10}[ ]"
    r"(?:\[(?P<gpu>\d{1,6})\][ ])?"
    r"(?=.{0,80}NCCL[ ](?:WARN|INFO|TRACE|CALL))"
)
_RAY = re.compile(
    r"\((?P<actor>(?:raylet|autoscaler)\b[^(),]{0,40}|(?:(?!pid=)[\w.]+"
    r"(?:,?[ \[]rank=(?P<rank>\d{1,6})\]?)?[^()]{0,80}?)?pid=(?P<pid>\d{1,10}))"
    r"(?:, ip=(?P<host>[\w.:-]+))?\)[ ]?"
)
_LABEL = re.compile(
    r"(?:^|[^\n]{0,160}?\b)(?:host(?:name)?|node(?:_name)?)=\"?(?P<host>[\w.-]{2,63})"
    r"|[^\n]{0,160}?\bpod=\"?(?P<pod>[\w.-]{2,63})"
)
"""What a collector such as Loki says of a line's origin, before its text."""
_NUMBERS = frozenset({"rank", "local", "task", "pid", "gpu", "launcher"})
"""Groups of prefixes that are numbers of the line's origin."""
_STAMPS = ("iso", "glog", "uptime", "ctime", "syslog")
_OF_ORIGIN = {"rank", "rank_mpi", "local", "host_pod", "host_mpi", "host", "task", "actor"}
"""Groups of prefixes that say where a line comes from, and begin no record."""
MIN_WIDTH, MAX_WIDTH = 60, 1000
"""Widths in characters at which terminals and loggers wrap lines."""
_FEW = 20
"""Number of lines that show that nothing stands before all."""
_FULL = 2
"""Number of lines of the greatest length, each with a rest after it, that shows a log to be
wrapped."""
_NUMBER = re.compile(r"\d+")
_ANCHOR = re.compile(
    r"\[(?:rank|default)\d{1,6}\]:|\[\d+,\d+\]<std|Traceback \(most recent call last\)"
    r"|\[[EWIF]\d{3,4} \d\d:|\[[EWIF] [\w.]{1,80}:\d+\]"
    r"|(?<![\w.-])(?!\d+:)[\w.-]{1,80}:\d+:\d+ (?:\[\d+\] )?.{0,60}NCCL (?:WARN|INFO)"
)
"""How lines begin that no collector writes: what stands before is a prefix, known or not."""
_REST = re.compile(r"[ ,.;:)]?[a-z0-9]")
"""How the rest of a line begins that was wrapped within a word or between two."""
_RECORD = re.compile(
    r"Traceback |frame #|Exception raised from |terminate called|what\(\):|During handling|The "
    r"above exception"
    r"|[=*-]{3}|#\d+ |\w+: (?:error|warning)|\s*$"
)
"""How a line begins that does not continue another."""
_CONTINUED = re.compile(r" ?(?:WorkNCCL\(|[a-z(])")
"""How a line begins that continues one of ProcessGroupNCCL's, wherever that was wrapped."""
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LEVELS = frozenset(
    "trace debug info notice warn warning err error crit critical"  # noqa: SIM905
    " alert emerg fatal panic".split()
)
"""Levels of loggers, of syslog and of glog."""

_PATH_RANK = re.compile(
    r"(?:^|[/._-])(?:global_?)?rank[_.-]?(?P<rank>\d{1,6})(?=[/._-]|$)", re.IGNORECASE
)
_PATH_LOCAL = re.compile(r"attempt_\d+/(?P<local>\d+)/(?:std(?:out|err)\.log|error\.json)$")


@dataclass(slots=True)
class Shape:
    """What all lines have in common that differ only in their digits: prefixes of one form."""

    start: int
    """Where the text begins."""
    named: int | None
    """Where syslog's host and tag begin; None if a line has none."""
    numbers: tuple[tuple[str, slice], ...]
    host: slice | None
    stamp: tuple[str, slice] | None
    level: str
    prefixed: bool
    lead: re.Pattern[str] | None
    """What stands before the next lines, too."""
    origins: dict[tuple[str, ...], tuple[Origin, int | None]] = field(default_factory=dict)
    """Origin and launcher by what the line says of them: a rank prints many lines."""
    kind: Any = None
    """What the reader knows of the text of such lines."""


class Line(NamedTuple):
    """A line without its prefixes."""

    text: str
    origin: Origin
    stamp: Stamp | None
    level: str
    """E, W, I or F in lines of c10 and glog; empty if the line has none."""
    prefixed: bool
    """Whether it has a logger's prefix, so it begins a new record."""
    launcher: int | None = None
    """The pid of the torchrun that wrote it."""
    named: str = ""
    """The text with syslog's host and tag before it, if it has these: a first word with a colon, as
    in `NVRM: Xid`, looks like a tag."""
    shape: Shape | None = None
    """Its shape; None where it was put together from several."""


def same_digits(text: str) -> bytes:
    """Return a text with zeros for all digits; `str.translate` would take ten times as long."""
    return text.encode("utf-8", "surrogatepass").translate(_ALIKE)


class Splitter:
    """Splitter that removes and parses the prefixes of one file's lines."""

    def __init__(self, source: int, path: str, rank: int | None = None) -> None:
        """Begin a file; `rank` is the only rank that writes to it, if known other than by the
        path.
        """
        self.source = source
        self.has_tasks = False
        self.nodes: frozenset[bytes] = frozenset()
        """The hosts in a column before the lines, with all digits alike."""
        self.ranked: frozenset[bytes] = frozenset()
        """What has a rank in it before the lines, with all digits alike."""
        self.has_hosts = False
        """Whether that has hosts in it, of which each has several ranks."""
        self._width = 0
        """Length of the lines that a terminal or a logger has wrapped; 0 if none are."""
        self._mark: re.Pattern[str] | None = None
        """What stands before every line and names nothing."""
        self.column: str | None = None
        """The only name in a column before the lines."""
        self._lead: re.Pattern[str] | None = None
        """What stood before the last anchor, in no form that is known, and so before other
        lines."""
        self._shapes: dict[re.Pattern[str] | None, dict[bytes, Shape]] = {}
        """By what stood before the last anchor, and by the line with all digits alike."""
        self._size = 0
        self.is_stamped = False
        """Whether a log collector stamps every line, so that a stamp does not begin a record."""
        local = None
        # The most certain first: torchrun's own layout gives the local rank; a number in
        # another name may mean anything.
        if found := _PATH_LOCAL.search(path):
            local = int(found["local"])
        elif rank is None and (found := _PATH_RANK.search(path)):
            rank = int(found["rank"])
        self.base = Origin(source, rank=rank, local=local)

    def learn(self, lines: Iterable[str]) -> None:
        """Learn from the first lines of the file what a collector or a person did to every line."""
        sample = [line[: MAX_WIDTH + 1] for line in lines if line.strip()]
        if not sample:
            return
        self.is_stamped = any('  File "' in line and _DIGIT.match(line) for line in sample)
        stamped = [_DIGIT.match(line) or _LETTER.match(line) for line in sample]
        begins = [match.end() if match else 0 for match in stamped]
        tasks = [TASK.match(line, at) for line, at in zip(sample, begins, strict=True)]
        self.has_tasks = is_column(tasks) and any(
            one and (one["task"] or not int(one["task_2"])) for one in tasks
        )
        ranked = [
            None if self._prefix(line[at:]) else RANKED.match(line, at)
            for line, at in zip(sample, begins, strict=True)
        ]
        if is_column(ranked):
            self.ranked = frozenset(same_digits(match[0]) for match in ranked if match)
            ranks = {one["rank"] or one["rank_2"] for one in ranked if one}
            hosts = {one["host"] or one["host_3"] for one in ranked if one}
            self.has_hosts = len(hosts) < len(ranks)
        found = [
            name_at(line, task.end() if task and self.has_tasks else begin)
            for line, begin, task in zip(sample, begins, tasks, strict=True)
        ]
        for container, end in {_form(match) for match in found if match}:
            column = [one if one and _form(one) == (container, end) else None for one in found]
            names = {match["host"] for match in column if match}
            named = len(column) - column.count(None)
            least = float(ENOUGH)
            if container is not None:  # two words that many a line may begin with
                rest = len(column) - next(at for at, one in enumerate(column) if one)
                least = max(least, NEARLY_ALL * rest, SAMPLE * len(column))
            # A path may be of files, unless its last part has the name of a host elsewhere.
            is_told = any(
                one and (not one["path"] or line.count(one["host"]) > 1)
                for one, line in zip(column, sample, strict=True)
            )
            if len(names) > 1 and is_told and named >= least and is_column(column):
                self.nodes = frozenset(map(same_digits, filter(is_name_of_host, names)))
        self._width = self._wrapped_at(sample)

    def unmarked(self, text: str) -> str:
        """Return a line without colors, and without what stands before every line."""
        if "\x1b" in text:
            text = ANSI.sub("", text)
        match = None if self._mark is None else self._mark.match(text)
        return text if match is None else text[match.end() :]

    def mark(self, lines: Iterable[str]) -> None:
        """Learn from the first lines of the file what stands before every line, whatever its
        numbers, unless it is of a known form, which says more.
        """
        sample = [line[: MAX_WIDTH + 1] for line in lines]
        expression = ""
        for _ in range(MAX_PREFIXES):
            rest = [line for line in map(self.unmarked, sample) if line.strip()]
            # What the first few lines do not share, all do not: most logs end here.
            if len(rest) <= ENOUGH or self._before(rest[:_FEW]) is None:
                return
            if self._have_prefixes(rest) or are_of_tasks(rest):
                return
            alike = self._before(rest)
            if alike is None:
                return
            name = name_at(rest[0], 0)
            if name is not None and alike.startswith(re.escape(name[0].rstrip())):
                self.column = name["host"]
            expression += alike
            self._mark = re.compile(expression)

    @staticmethod
    def _before(lines: Sequence[str]) -> str | None:
        """Return an expression for what stands before all lines: a single name, which may be that
        of the program, or a mark; None without one, or if there are several names.
        """
        names = [name_at(line, 0) for line in lines]
        several = {name and name[0] for name in names}
        if len(several) == 1 and (name := names[0]):
            return ended(re.escape(name[0].rstrip()), name[0])
        if is_column(names) and len({name["host"] for name in names if name}) > 1:
            return None
        return mark_before(lines)

    def _have_prefixes(self, lines: Iterable[str]) -> bool:
        """Return whether more than a few lines have a prefix of a known form."""
        found = [self._prefix(line) is not None for line in lines]
        return sum(found) > (1 - NEARLY_ALL) * len(found)

    def _wrapped_at(self, lines: Sequence[str]) -> int:
        """Return the length at which the lines of a log were wrapped; 0 if they were not.

        Lines of one form may all have one length, but then each begins as a record does. A launcher
        or a person may have added a few longer lines.
        """
        cut = Counter(
            len(line)
            for line, rest in pairwise(lines)
            if _REST.match(rest) and not _RECORD.match(rest) and self._prefix(rest) is None
        )
        width, count = max(cut.items(), key=lambda item: (item[1], item[0]), default=(0, 0))
        longer = sum(len(line) > width for line in lines)
        return width if MIN_WIDTH <= width <= MAX_WIDTH and count >= _FULL and count > longer else 0

    def follow(self, lead: str, origin: Origin) -> Origin:
        """Take a text, whatever its numbers, for what stands before the next lines, too; return the
        origin of a line with it.
        """
        self._lead = self._leading(lead)
        label = _LABEL.match(lead)
        return origin._replace(host=label["host"] or label["pod"]) if label else origin

    def _leading(self, lead: str) -> re.Pattern[str] | None:
        return re.compile(r"\d+".join(map(re.escape, _NUMBER.split(lead)))) if lead else None

    def continues(self, line: Line, end: str, following: Line) -> str | None:
        """Return the whole text if one line continues another that was wrapped; None if not.

        `end` is the last part of the first line as it is in the file.
        """
        if (
            following.prefixed
            or following.origin.rank not in {None, line.origin.rank}
            or _RECORD.match(following.text)
            or progress.find(following.text)
        ):
            return None
        text = following.text
        if 0 < self._width == len(end) and text[0] not in "[{":
            return line.text + text
        if not line.prefixed or not _CONTINUED.match(text):
            return None
        return f"{line.text.rstrip()} {text.lstrip()}"

    def may_continue(self, line: Line, end: str) -> bool:
        """Return whether the next line may belong to this one."""
        is_of_group = line.prefixed and ("[Rank " in line.text or "[PG " in line.text)
        return 0 < self._width == len(end) or is_of_group

    def split(self, text: str) -> Line:
        """Return a line's text without prefixes, its origin, and its timestamp."""
        template = same_digits(text)
        shapes = self._shapes.get(self._lead)
        shape = None if shapes is None else shapes.get(template)
        if shape is None:
            shape = self._learn(text, template)
        if shape.lead is not self._lead:
            self._lead = shape.lead
        said = tuple([text[part] for _, part in shape.numbers])
        if shape.host is not None:
            said = (*said, text[shape.host])
        known = shape.origins.get(said)
        if known is None:
            known = self._origin(shape, said)
        form = shape.stamp
        return Line(
            text[shape.start :], known[0], None if form is None else Stamp(form[0], text[form[1]]),
            shape.level, shape.prefixed, known[1],
            "" if shape.named is None else text[shape.named :], shape,
        )  # fmt: skip

    def _origin(self, shape: Shape, said: tuple[str, ...]) -> tuple[Origin, int | None]:
        known: tuple[Origin, int | None] = self.base, None
        if said:
            values: dict[str, Any] = {
                name: int(text) for (name, _), text in zip(shape.numbers, said, strict=False)
            }
            launcher = values.pop("launcher", None)
            if shape.host is not None:
                values["host"] = said[-1]
            known = self.base._replace(**values), launcher
        if len(shape.origins) >= MAX_ORIGINS:
            shape.origins.clear()
        shape.origins[said] = known
        return known

    def _learn(self, text: str, template: bytes) -> Shape:
        """Return the shape of a line, which is remembered beside what stood before the last."""
        before = self._lead
        shape = self._shape(text)
        self._size += len(template) + _SHAPE
        if self._size > MAX_SHAPES:
            self._shapes.clear()
            self._size = len(template) + _SHAPE
        self._shapes.setdefault(before, {})[template] = shape
        return shape

    def _shape(self, text: str) -> Shape:
        numbers: dict[str, slice] = {}
        host, stamp, level, named, prefixed = None, None, "", None, False
        told, whole = text, len(text)
        lead = self._lead
        for _ in range(MAX_PREFIXES):
            if lead is not None and (match := lead.match(text)):
                text = text[match.end() :]
            match = self._prefix(text)
            if match is None:
                anchor = _ANCHOR.search(text, 1, MAX_LEAD)
                before = text[: anchor.start()] if anchor is not None else ""
                # `Original Traceback` is what another exception wraps.
                is_word = before.strip().isalpha() and before.istitle()
                if anchor is None or "traceback" in before.lower() or is_word:
                    break
                lead = self._leading(before)
                text = text[anchor.start() :]
                continue
            begin = whole - len(text)
            found = {name: value for name, value in match.groupdict().items() if value}
            for group, value in found.items():
                name = group.partition("_")[0]
                part = slice(begin + match.start(group), begin + match.end(group))
                if name in _NUMBERS:
                    numbers[name] = part
                elif name in _STAMPS:
                    stamp = name, part
                elif name == "level":
                    level = value
                elif name == "host" and (
                    match.re is not RANKED or (self.has_hosts and is_name_of_host(value))
                ):
                    host = part
            if "named" in found:
                named = begin + match.start("named")
                if _syslog_host(match):
                    host = slice(named, begin + match.end("named"))
            is_collectors = self.is_stamped and (match.re is _DIGIT or "syslog" in found)
            prefixed |= found.keys().isdisjoint(_OF_ORIGIN) and not is_collectors
            text = text[match.end() :]
            if "host_nccl" in found:
                break
        start = whole - len(text)
        if host is None and lead is not None and (label := _LABEL.match(told, 0, start)):
            host = slice(*label.span(label.lastgroup or 0))
        return Shape(start, named, tuple(numbers.items()), host, stamp, level, prefixed, lead)

    def _prefix(self, text: str) -> re.Match[str] | None:
        """Return the prefix that a line begins with; its first character tells which it may be."""
        head = text[:1]
        match = RANKED.match(text) if self.ranked else None
        if match and same_digits(match[0]) in self.ranked:
            return match
        if head == "[" and (match := _BRACKET.match(text)):
            return match
        if head == "(":
            return _RAY.match(text)
        if self.has_tasks and (match := TASK.match(text)):
            return match
        match = _DIGIT.match(text) if head.isdigit() else None
        match = match or _LETTER.match(text) or (NODE.match(text) if self.nodes else None)
        if match and match.re is NODE and same_digits(match["host"]) not in self.nodes:
            return None
        return match


def _form(name: re.Match[str]) -> tuple[str | None, str]:
    """Return what stands behind a name: a collector puts the same behind all."""
    end = name[0].rstrip()[-1]
    return name["container"], "" if end.isalnum() else end


def _syslog_host(match: re.Match[str]) -> str | None:
    """Return the host of a line in syslog's form; None for a logger's, which has a level or a name.

    Loggers write date and time with a blank between, syslog in ISO 8601 with a `T`.
    """
    host, tag = match["named"], match["tag"]
    if not {host.lower(), tag.lower()}.isdisjoint(_LEVELS):
        return None
    is_logger = " " in (match.groupdict().get("iso") or "")
    return host if not is_logger or is_name_of_host(host) else None
