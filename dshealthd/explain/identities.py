"""Identities: the rank, host, pod, process and device that lines name, and whose line is whose.

A name is taken only where it can be one: a false name is worse than none.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

from dshealthd.explain.events import is_name_of_host

if TYPE_CHECKING:
    from dshealthd.explain.events import Origin
    from dshealthd.explain.facts import Recognized

_SPOKEN = re.compile(
    r"\[(?:PG [^\]]{1,80}\(default_pg\) )?(?:[Rr]ank|RANK)[ :]?(?P<rank>\d{1,6})\]"
    r"|--local[-_]rank[= '\",]{1,4}(?P<local>\d{1,4})\b"
)
"""A rank in the text of a line; that in another group than the default one is not the job's."""
_SAID = re.compile(
    r"(?:(?:^|[:(,] ?|\b(?:on|process) )[Rr]ank[ =]|\brank=)"
    r"(?P<rank>\d{1,6})\b(?![-.]\d|,? (?:and|or|to) )"
)
_ANY_RANK = re.compile(r"\branks?\b", re.IGNORECASE)
"""A line that speaks of one rank alone speaks of its own, unless it is sent to or from it."""
NAMES_RANKS = frozenset({"rank", "local", "task", "tasks", "culprit", "culprits"})
"""Fields of patterns that say which ranks a line is about."""
_NAMES = re.compile(
    r"\b(?:[Nn]ode|[Hh]ost(?:name)?|instance)(?: ?[:=] ?| |/)['\"]?"
    r"(?P<host>[A-Za-z\d][\w.-]{1,62}[A-Za-z\d])"
    r"|\b(?:[Nn]ode )?(?:ip|IP)(?: ?[:=] ?| |\[)['\"]?(?P<address>\d{1,3}(?:\.\d{1,3}){3})\b"
    r"|\b(?:pid|PID)(?: ?[:=] ?| )(?P<pid>\d{2,10})\b"
    r"|\[(?P<pid_2>\d{2,10})\](?::| trap| general) [^\n]{0,40}(?:segfault|ip|sp)\b"
    r"|\b(?:GPU |GPU|cuda:|Device:|device |DEVICE\[)(?P<gpu>\d{1,2})\b(?!\.\d|,\d| "
    r"?(?:[KMG]i?B|%|x\b))"
    r"|(?<![\w.])(?P<device>mlx5_\d{1,3}(?::\d)?|bnxt_re\d{1,2}|efa_\d{1,2}|hfi1_\d{1,2}"
    r"|nvme\d{1,2}n\d(?:p\d{1,2})?|[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.\d)(?![\w.])"
    r"|\bpods?[ /](?P<pod>[a-z\d][a-z\d.-]{1,62}+)(?![\w'])"
    r"|\b(?P<position>(?:DP|TP|PP|EP)\d{1,3}(?:[ _](?:DP|TP|PP|EP)\d{1,3}){0,3})(?=[\] )])"
)
_DETAIL = re.compile(
    r"\s{0,40}(?P<key>[A-Za-z_][\w .-]{0,30}?)\s{0,4}:\s{1,30}['\"]?(?P<value>[^\s'\"]{1,100})"
)
_KEYS = {
    "pid": "pid", "ip": "host", "node_ip": "host", "hostname": "host", "host": "host",
    "Node": "host", "rank": "rank", "Name": "pod",
}  # fmt: skip
"""Keys in a block of `key: value` lines, as Ray and kubectl print them, and whose name each has."""
_TORCHRUN_FOLDER = re.compile(r"(?P<node>.*)/attempt_\d+/(?P<local>\d+)/[^/]+$")


def spoken_rank(text: str) -> dict[str, str]:
    """Return the rank that a line names in its text rather than in a prefix, as a field."""
    match = _SPOKEN.search(text)
    if match is None and (match := _SAID.search(text)):
        return {"rank": match["rank"]} if len(_ANY_RANK.findall(text[:400])) == 1 else {}
    # DeepSpeed's launcher shows the command of its last rank, whichever failed: 0 is the only one.
    if match is None or (match["local"] or "0") != "0":
        return {}
    return {name: value for name, value in match.groupdict().items() if value}


def named(text: str) -> dict[str, str]:
    """Return the host, pid, GPU, device and pod that a text names, each only if it names one."""
    found: dict[str, set[str]] = defaultdict(set)
    for match in _NAMES.finditer(text):
        name, value = str(match.lastgroup).partition("_")[0], match[match.lastgroup or 0]
        if name == "host" and not is_name_of_host(value):
            continue
        if name == "pod" and value.isalpha():  # a word: "pod memory"
            continue
        found["host" if name == "address" else name].add(value)
    return {name: values.pop() for name, values in found.items() if len(values) == 1}


def is_detail(text: str) -> bool:
    """Return whether a line has the form `key: value`."""
    return ":" in text[:40] and _DETAIL.match(text) is not None


class Details:
    """The block of `key: value` lines that the current line is in, or that ends right before it."""

    def __init__(self) -> None:
        self._fields: dict[str, str] = {}
        self._is_over = False
        self._described: dict[str, str] = {}
        """The pod and the node that `kubectl describe` begins with."""

    def feed(self, text: str, *, is_detail: bool) -> None:
        """Add a line, or end the block if it is of another form."""
        match = _DETAIL.match(text) if is_detail else None
        if self._is_over:
            self._fields, self._is_over = {}, False
        if match is None:
            self._is_over = bool(self._fields) and bool(text.strip())
            return
        name = _KEYS.get(match["key"])
        value = match["value"].partition("/")[0].rstrip(",")
        if name == "host" and not is_name_of_host(value):
            return
        if name in {"pid", "rank"} and not value.isdecimal():
            return
        if name is not None and len(self._fields) < len(_KEYS):
            self._fields.setdefault(name, value)
        if match["key"] == "Namespace":
            self._described = dict(self._fields)
        elif self._described and match["key"] == "Node" and name is not None:
            self._described.setdefault(name, value)

    @property
    def fields(self) -> dict[str, str]:
        """What the block names; a `Name` is a pod's only beside its node."""
        fields = self._fields
        # any word may precede a colon
        if len(fields) < 2 or ("pod" in fields and "host" not in fields):  # noqa: PLR2004
            fields = {}
        return {**self._described, **fields}


class Identities:
    """Resolver of ranks from all logs together."""

    def __init__(self, found: Recognized) -> None:
        self._found = found
        self._untold: dict[tuple[int, int | None], int] = {
            key: len(pids) for key, pids in found.launchers.items() if len(pids) > 1
        }
        """Number of launchers without a summary, by file and task, if there are several."""
        self._first: dict[object, set[int]] = defaultdict(set)
        """The rank of local rank 0, by file and task, and by folder of a node's torchrun; several
        if a file holds the output of several nodes."""
        self._by_pid: dict[int, set[int]] = defaultdict(set)
        for (_, pid), rank in found.ranks_by_pid.items():
            self._by_pid[pid].add(rank)
        for (source, task, local), ranks in found.ranks_by_local.items():
            first = {rank - local for rank in ranks}
            self._first[source, task] |= first
            if match := self._folder(source):
                self._first[match["node"]] |= first
        for failure in found.failures:
            if failure.rank is not None and failure.local is not None:
                self._first[failure.source, failure.task].add(failure.rank - failure.local)
            if failure.root and (failure.source, failure.task) in self._untold:
                self._untold[failure.source, failure.task] -= 1

    def _folder(self, source: int) -> re.Match[str] | None:
        return _TORCHRUN_FOLDER.match(self._found.sources[source].name)

    def _node(self, source: int) -> str | None:
        match = self._folder(source)
        return match["node"] if match else None

    def rank(self, origin: Origin) -> int | None:
        """Return the rank of an event in the whole job; None if unknown."""
        if origin.rank is not None:
            return origin.rank
        found = self._found
        if origin.local is not None:
            if self._untold.get((origin.source, origin.task), 0) > 0:
                return None  # the first rank of a launcher without a summary may be any
            for key in ((origin.source, origin.task), self._node(origin.source)):
                first = self._first.get(key, set())
                if len(first) == 1:
                    return next(iter(first)) + origin.local
                if first:
                    return None
            return None if len(found.launchers) > 1 else origin.local
        if origin.pid is not None:
            known = found.ranks_by_pid.get((origin.source, origin.pid))
            if known is not None:
                return known
            own = found.ranks_by_prefix.get((origin.source, origin.pid), set())
            if len(own) == 1:
                return next(iter(own))
        if origin.task is not None and not self.is_node(origin.source, origin.task):
            return origin.task
        return None

    def learn(self, pid: int, rank: int) -> None:
        """Note the rank of a process that a launcher's message names."""
        self._by_pid[pid].add(rank)

    def of_pid(self, pid: int) -> int | None:
        """Return the rank of a process that another file names; None if unknown or ambiguous."""
        ranks = self._by_pid.get(pid, set())
        return next(iter(ranks)) if len(ranks) == 1 else None

    def is_node(self, source: int, task: int) -> bool:
        """Return whether a task of srun is a launcher of several ranks."""
        ranks = self._found.tasks_with_ranks.get((source, task))
        if ranks:
            return ranks != {task}
        return self._found.sources[source].is_launcher
