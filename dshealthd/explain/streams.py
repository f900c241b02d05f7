"""The origin of a line, from the prefixes that launchers, log collectors and loggers add.

Prefixes nest (`3: [default1]:[rank13]:[E1122 04:44:58.499 …] `), so they are removed one by one.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dshealthd.explain.events import Origin, Stamp

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_PREFIXES = 8
_SAMPLE = 0.6
"""Share of a file's first lines that must begin with `77: ` for it to be a prefix."""

_BRACKET = re.compile(
    r"\[(?:rank(?P<rank>\d{1,6})\]:[ ]?"  # torch >= 2.3, once a process group exists
    r"|default(?P<local>\d{1,4})\]:[ ]?"  # torchrun --tee
    r"|(?P<iso>\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?)\][ ]*"  # logging, DeepSpeed, NCCL
    r"|(?P<level>[EWIFVD])(?:(?P<glog>\d{3,4} \d\d:\d\d:\d\d(?:\.\d+)?) )?[ ]?[\w./]+:\d+\][ ]*"
    r"|(?:INFO|WARNING|ERROR|DEBUG|CRITICAL|WARN)(?:\|[\w./]{1,80}:\d+)?\](?:[ ](?:>>|-)[ ])?[ ]*"
    r"|(?:[\w.]{1,80}\]\[)(?:INFO|WARNING|ERROR|DEBUG|CRITICAL)\][ ]-[ ]"  # hydra, after the time
    r"|\d+,(?P<mpi>\d{1,6})\]<std(?:out|err)>:[ ]?"  # mpirun --tag-output
    r"|[ ]*\+?(?P<uptime>\d+\.\d{6})\][ ]"  # dmesg, and its time since the line before
    r"|(?P<ctime>\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4})\][ ]"  # dmesg -T
    r"|pod/(?P<pod>[\w.-]+)/[\w.-]+\][ ]?)"  # kubectl logs --prefix
)
_DIGIT = re.compile(
    r"(?P<iso>\d{4}[-/]\d\d[-/]\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?)"
    r"(?:[ ]std(?:out|err)[ ][FP]|[ ]>>"
    r"|[ ]\|[ ](?:DEBUG|INFO|WARNING|ERROR|CRITICAL)[ ]*\|[ ][\w.<>]{1,100}:[\w.<>]{1,60}:\d+[ ]-"  # loguru
    r"|[ ]-[ ][\w.]{1,80}[ ]-[ ](?:DEBUG|INFO|WARNING|ERROR|CRITICAL)[ ]-)?"  # logging
    r"(?:[ ][-:])?[ ]?"
    r"(?:(?P<syslog_host>[\w.-]+)[ ](?P<tag>[\w.@-]+(?:\[\d+\])?):[ ](?:\[[ ]*\d+\.\d+\][ ])?)?"
)
_LETTER = re.compile(
    r"(?P<syslog>[A-Z][a-z]{2}[ ][ \d]\d[ ]\d\d:\d\d:\d\d)(?:\.\d{1,9})?[ ](?P<syslog_host>[\w.-]+)[ ]"
    r"(?P<tag>[\w./@-]+(?:\[\d+\])?):[ ](?:\[[ ]*\d+\.\d+\][ ])?"
    r"|(?P<level>[EWIF])(?P<glog>\d{4} \d\d:\d\d:\d\d\.\d+)[ ]+"
    r"(?:(?P<launcher>\d{1,10})[ ][^\]\s]{0,160}torch/distributed/elastic/[^\]\s]{1,80}"
    r"|\d+[ ][^\]\s]{1,160})\][ ]?"
    r"|(?:INFO|WARNING|ERROR)[ ]\d\d-\d\d[ ]\d\d:\d\d:\d\d[ ][\w./]{1,80}:\d+\][ ]?"  # vLLM
    r"|(?P<nccl_host>[\w.-]{1,255}):(?P<nccl_pid>\d{1,10}):\d{1,10}[ ](?:\[(?P<gpu>\d{1,6})\][ ])?"
    r"(?=.{0,80}NCCL[ ](?:WARN|INFO|TRACE|CALL))"
)
_RAY = re.compile(
    r"\((?P<actor>[\w.]+)[^()]{0,80}?pid=(?P<pid>\d{1,10})(?:, ip=(?P<ip>[\w.:-]+))?\)[ ]?"
)
_TASK = re.compile(r"[ ]*(?P<task>\d{1,6}):(?:[ ]|$)")
_NODE = re.compile(r"(?P<node>[A-Za-z][\w.-]*[\w]):(?:[ ]|$)")
_ENOUGH = 4
"""A file must have more lines than this to tell host names from other words before a colon."""
_INDENTED = re.compile(r" {2,12}(?=\[(?:rank|default)\d{1,6}\]:)")
"""Indentation of a whole log that was pasted; no program writes blanks before these."""
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_NO_NODE = re.compile(
    r"(?:\w*(?:Error|Exception|Warning)|INFO|WARNING|ERROR|DEBUG|E|W|srun|slurmstepd)$"
)

_PATH_RANK = re.compile(
    r"(?:^|[/._-])(?:global_?)?rank[_.-]?(?P<rank>\d{1,6})(?=[/._-]|$)", re.IGNORECASE
)
_PATH_LOCAL = re.compile(
    r"attempt_(?P<attempt>\d+)/(?P<local>\d+)/(?:std(?:out|err)\.log|error\.json)$"
)
_PATH_TASK = re.compile(
    r"(?:^|[/_-])(?:task|log|out|err|stdout|stderr|proc)[_.-]?(?P<task>\d{1,6})(?:\.\w+)*$"
)
_PATH_HOST = re.compile(
    r"(?:^|/)(?P<host>(?:node|host|gpu|dgx|hgx|nid|cn|compute|pod)[a-z]{0,20}"
    r"(?:-?[a-z]{0,10}\d{1,6}){1,4})(?:/[^/]*|\.(?:log|txt|out|err))$"
)
"""A host that names a log or a folder of logs; other names are ambiguous."""


@dataclass(frozen=True, slots=True)
class Line:
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


class Splitter:
    """Splitter that removes and parses the prefixes of one file's lines."""

    def __init__(self, source: int, path: str, rank: int | None = None) -> None:
        """Begin a file; `rank` is the only rank that writes to it, if known other than by the path."""
        self.source = source
        self.attempt = 0
        self.has_tasks = False
        self.nodes: frozenset[str] = frozenset()
        self.is_stamped = False
        """Whether a log collector stamps every line, so that a stamp does not begin a record."""
        local, task = None, None
        # The most certain first: torchrun's own layout gives local rank and attempt; a number in
        # another name may mean anything.
        if found := _PATH_LOCAL.search(path):
            local, self.attempt = int(found["local"]), int(found["attempt"])
        elif rank is None and (found := _PATH_RANK.search(path)):
            rank = int(found["rank"])
        elif rank is None and (found := _PATH_TASK.search(path)):
            task = int(found["task"])
        host = match["host"] if (match := _PATH_HOST.search(path)) else None
        self.base = Origin(source, rank=rank, local=local, task=task, host=host)

    def learn(self, lines: Iterable[str]) -> None:
        """Learn from the first lines of the file whether `srun -l` or pdsh prefixes every line."""
        sample = [line for line in lines if line.strip()]
        if not sample:
            return
        stamps = sum(
            (match := _DIGIT.match(line) or _LETTER.match(line)) is not None
            and match.groupdict().get("nccl_host") is None
            and not match.groupdict().get("level")
            for line in sample
        )
        self.is_stamped = len(sample) > _ENOUGH and stamps >= 0.9 * len(sample)
        tasks = sum(_TASK.match(line) is not None for line in sample)
        self.has_tasks = len(sample) > 1 and tasks >= _SAMPLE * len(sample)
        nodes = Counter(
            match["node"]
            for line in sample
            if (match := _NODE.match(line)) and not _NO_NODE.match(match["node"])
        )
        if len(sample) > _ENOUGH and sum(nodes.values()) >= 0.9 * len(sample):
            self.nodes = frozenset(nodes)

    def split(self, text: str) -> Line:  # noqa: PLR0915 - one step for each kind of prefix
        """Return a line's text without prefixes, its origin, and its timestamp."""
        base = self.base
        rank, local, task, host = base.rank, base.local, base.task, base.host
        pid = gpu = launcher = None
        stamp = None
        level = ""
        prefixed = False
        if "\x1b" in text:
            text = _ANSI.sub("", text)
        while text.startswith("> "):  # quoted in a mail or an issue
            text = text[2:]
        if text.startswith("  ") and (match := _INDENTED.match(text)):
            text = text[match.end() :]
        # Dispatch on the first character: a log has millions of lines, most without a prefix.
        for _ in range(MAX_PREFIXES):
            head = text[:1]
            if head == "[":
                match = _BRACKET.match(text)
                if match is None:
                    break
                if match["rank"]:
                    rank = int(match["rank"])
                elif match["local"]:
                    local = int(match["local"])
                elif match["mpi"]:
                    rank = int(match["mpi"])
                elif match["pod"]:
                    host = match["pod"]
                else:
                    prefixed = True
                    level = match["level"] or level
                    for form in ("iso", "glog", "uptime", "ctime"):
                        if match[form]:
                            stamp = Stamp(form, match[form])
            elif head == "(":
                match = _RAY.match(text)
                if match is None:
                    break
                pid, host = int(match["pid"]), match["ip"] or host
            elif self.has_tasks and (match := _TASK.match(text)):
                task = int(match["task"])
            elif head.isdigit():
                match = _DIGIT.match(text)
                if match is None and (match := _LETTER.match(text)) and match["nccl_host"]:
                    host, pid, prefixed = match["nccl_host"], int(match["nccl_pid"]), True
                    gpu = int(match["gpu"]) if match["gpu"] else gpu
                    text = text[match.end() :]
                    break
                if match is None:
                    break
                stamp, prefixed = Stamp("iso", match["iso"]), prefixed or not self.is_stamped
                host = match["syslog_host"] or host
            elif head.isalpha():
                match = _LETTER.match(text)
                if match is None:
                    match = _NODE.match(text) if self.nodes else None
                    if match is None or match["node"] not in self.nodes:
                        break
                    host = match["node"]
                elif match["nccl_host"]:
                    host, pid = match["nccl_host"], int(match["nccl_pid"])
                    gpu = int(match["gpu"]) if match["gpu"] else gpu
                    prefixed = True
                    text = text[match.end() :]
                    break
                else:
                    prefixed = prefixed or not (self.is_stamped and match["syslog"])
                    level = match["level"] or level
                    launcher = int(match["launcher"]) if match["launcher"] else launcher
                    host = match["syslog_host"] or host
                    for form in ("syslog", "glog"):
                        if match[form]:
                            stamp = Stamp(form, match[form])
            else:
                break
            text = text[match.end() :]
        origin = (
            base
            if (rank, local, task, host, pid, gpu)
            == (base.rank, base.local, base.task, base.host, None, None)
            else Origin(self.source, rank, local, task, host, pid, gpu)
        )
        return Line(text, origin, stamp, level, prefixed, launcher)
