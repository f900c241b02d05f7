"""Identities: the rank, host, pod, process and device that lines name, and whose line is whose.

A name is taken only where it can be one: a false name is worse than none.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from dshealthd.explain.events import is_name_of_host

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from dshealthd.explain.events import Origin
    from dshealthd.explain.facts import Recognized

T = TypeVar("T")

_SPOKEN = re.compile(
    r"\[(?:PG [^\]]{1,80}\(default_pg\) )?(?:[Rr]ank|RANK)[ :=_]?(?P<rank>\d{1,6})\]"
    r"|\brank(?P<rank_2>\d{1,6})\[\d{2,10}\]"  # composer
    r"|--local[-_]rank[= '\",]{1,4}(?P<local>\d{1,4})\b"
)
"""A rank in the text of a line; that in another group than the default one is not the job's."""
_SAID = re.compile(
    r"(?:(?:^|[:(,|] ?|\b(?:on|process|[Gg]lobal) )[Rr]ank[ =]|\brank=)"
    r"(?P<rank>\d{1,6})\b(?![-.]\d|,? (?:and|or|to) )"
)
_ANY_RANK = re.compile(r"\branks?\b", re.IGNORECASE)
"""A line that speaks of one rank alone speaks of its own, unless it is sent to or from it."""
MAX_HEADING = 200
"""Maximum characters of what stands over a part of a text."""
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
    r"|\bpods?(?:[ /]|=\"?)(?P<pod>[a-z\d][a-z\d.-]{1,62}+)(?![\w'])"
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
_LOCAL = re.compile(r"\blocal(?:[_-]?rank)?[ =:'\",]{1,4}(\d{1,4})\b")
_RUN = re.compile(
    r"(?:(?:on )?[A-Za-z_][\w-]*(?:[=:] ?| )['\"]?[\w.:-]*\d[\w.:-]*['\"]?[,;:|()\[\] ]*){2,12}"
)
"""Names and values in a row: what stands among prose may be another's."""
_PROCESS = re.compile(r"\bprocess (\d{2,10}) spawned\b")
_BUS = re.compile(r"\bbusId ([0-9a-f]{1,9})\b")
_PCI = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}")
_ON_NODE = re.compile(
    r"Successfully assigned [\w.-]+/(?P<pod>[\w.-]+) to (?P<node>[\w.-]+)"
    r"|^(?P<pod_2>[a-z\d][\w.-]{1,62}) +\d+/\d+ +[A-Z]\w+ .{1,80} \d{1,3}(?:\.\d{1,3}){3} +"
    r"(?P<node_2>[\w.-]{2,62})"
)
"""A pod and its node, as the scheduler says, and in the wide table of kubectl."""
_PAIRS = re.compile(
    r"\blocal[_ -]?rank\b.*\b(?:pid|process|node|host)|\b[Rr]ank\b.*\b(?:pid|PID|host|node|busId)"
    r"|(?:pid|node|host|process).*\b(?:rank\b|local[_-]rank)|Successfully assigned |^\S+ +/ +[A-Z]"
)
"""Lines without their digits that may say what belongs together."""
_HEADING = re.compile(
    r"(?:=+>|>{2,}|\#{1,6}|[-=*#]{3,}) ?(?P<title>[\w\[(/.].*)"
    r"|(?P<prompt>\[[\w.@-]{2,60} [^\]]{1,80}\]|[\w.-]+@[\w.-]+:\S{1,80}|)[$#] (?P<command>\w.*)"
    r"|(?:ok|changed|fatal|failed|unreachable|skipping): \[(?P<host>[\w.-]+)\]"
    r"|(?P<host_2>[\w.-]+) \| (?:CHANGED|FAILED|SUCCESS|UNREACHABLE)\b"
    r"|(?P<alone>[\w.-]*\d[\w.-]*):?$"
)
"""What stands over a part of a text: a title, a command at a prompt, hosts of ansible and clush."""
_RANK_OVER = re.compile(r"[-=*>]{2,}(?!.*\b[Ee][Nn][Dd]\b).*\brank (\d{1,6})\b.*[-=*<>]{2,}$")
_ASKS = re.compile(r"\b(?:ssh|kubectl|oc|talosctl)\b")
_FIRST_NODE = re.compile(r"\*\*\* (?:JOB|STEP) \S{1,60} ON ([\w.-]{1,64})")
"""A job's first node, which Slurm says whatever ended the job: a name, and no more."""
_WORD = re.compile(r"[\w][\w.-]*\w")
_BEFORE = re.compile(r"\[?([\w][\w.-]*\w)[\]@ ]")
_TORCHRUN_FOLDER = re.compile(r"(?P<node>.*)/attempt_\d+/(?P<local>\d+)/[^/]+$")


def spoken_rank(text: str) -> dict[str, str]:
    """Return the rank that a line names in its text rather than in a prefix, as a field."""
    match = _SPOKEN.search(text)
    if match is None and (match := _SAID.search(text)):
        return {"rank": match["rank"]} if len(_ANY_RANK.findall(text[:400])) == 1 else {}
    # DeepSpeed's launcher shows the command of its last rank, whichever failed: 0 is the only one.
    if match is None or (match["local"] or "0") != "0":
        return {}
    return {name.partition("_")[0]: value for name, value in match.groupdict().items() if value}


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


def short(host: str) -> str:
    """Return the name of a host without its domain; an address as it is."""
    return host if host.replace(".", "").isdecimal() else host.partition(".")[0]


def only(found: Collection[T]) -> T | None:
    """Return the only one of some values; None if there are none or several."""
    return next(iter(found)) if len(found) == 1 else None


class Seat(NamedTuple):
    """Where a rank runs, as far as one line says."""

    origin: Origin
    rank: int | None = None
    local: int | None = None
    pid: int | None = None
    host: str | None = None
    pci: str | None = None


def may_pair(template: str) -> bool:
    """Return whether a line may have a `seat`, or say on which node a pod is; `template` is the
    line without its digits.
    """
    return _PAIRS.search(template) is not None


def seat(text: str, origin: Origin, rank: int | None = None) -> Seat | None:
    """Return where a line says that a rank runs; None if it names no rank or nothing beside it.

    `rank` is that of its process, if known.
    """
    local = _LOCAL.search(text)
    said = None if "[PG " in text else _SAID.search(text)
    if rank is None and said is not None:
        rank = int(said["rank"])
    if rank is None and local is None:
        return None
    begin = said.start("rank") if said else local.start(1) if local else 0
    beside = (run[0] for run in _RUN.finditer(text) if run.start() <= begin < run.end())
    found = named(next(beside, ""))
    pid = _PROCESS.search(text)
    bus = _BUS.search(text)
    pci = found.get("device", "")
    if bus:  # NCCL's form: an address without its separators, and zeros
        digits = bus[1].zfill(9)
        pci = f"{digits[:4]}:{digits[4:6]}:{digits[6:8]}"
    return Seat(
        origin,
        rank,
        int(local[1]) if local else None,
        int(pid[1]) if pid else int(found["pid"]) if "pid" in found else origin.pid,
        found.get("host", origin.host),
        match[0] if (match := _PCI.match(pci)) else None,
    )


class Heading(NamedTuple):
    """What stands over a part of a text."""

    words: frozenset[str] = frozenset()
    """Words of which one may be the name of a host or pod that other lines name, too."""
    host: str | None = None
    """The host that it certainly names."""
    rank: int | None = None
    is_name: bool = False
    """Whether it is nothing but a name, and so none if no other line has that name."""


def heading(text: str) -> Heading | None:
    """Return what a line says of the lines below it; None if it is no heading."""
    match = _HEADING.match(text) if len(text) < MAX_HEADING or text[:1] in "fcosu" else None
    if match is None:
        return None
    if host := match["host"] or match["host_2"]:
        return Heading(host=host)
    said = match["title"] or match["alone"] or match["command"]
    if match["command"] and not _ASKS.search(said):  # other commands may speak of any host
        said = match["prompt"]
    rank = _RANK_OVER.match(text)
    return Heading(
        frozenset(_WORD.findall(said)), rank=int(rank[1]) if rank else None,
        is_name=match["alone"] is not None,
    )  # fmt: skip


def first_node(quote: str) -> str | None:
    """Return the first node of a job that Slurm cancels, which says nothing of why; else None."""
    match = _FIRST_NODE.search(quote) if " CANCELLED " in quote else None
    return match[1] if match else None


def node_of(text: str) -> tuple[str, str] | None:
    """Return a pod and the node that a line says it is on; None if it does not."""
    match = _ON_NODE.search(text)
    if match is None:
        return None
    return match["pod"] or match["pod_2"], match["node"] or match["node_2"]


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
        """The rank of local rank 0, by host, by file and task, and by folder of a node's torchrun;
        several if a file holds the output of several nodes."""
        self._ranks: dict[object, set[int]] = defaultdict(set)
        """Ranks by pid, and by the host and the PCI address of their GPU."""
        self._hosts: dict[int, set[str]] = defaultdict(set)
        """Hosts by rank."""
        self._names: dict[str, str] = {}
        """Names of hosts that stand where only a host can stand, by their first part."""
        self._launched: set[str] = set()
        self._homes = {
            short(origin.host)
            for facts in found.sources
            for origin in facts.origins
            if origin.local is not None and origin.host is not None
        }
        """Hosts of lines with a rank within the node."""
        for (_, pid), rank in found.ranks_by_pid.items():
            self._ranks[pid].add(rank)
        for (_, pid), ranks in found.ranks_by_prefix.items():
            self._ranks[pid] |= ranks
        for (source, task, local), ranks in found.ranks_by_local.items():
            first = {rank - local for rank in ranks}
            self._first[source, task] |= first
            if match := self._folder(source):
                self._first[match["node"]] |= first
        pids: dict[tuple[int, int | None], int | None] = {}
        has_restarts = any(
            pids.setdefault((failure.source, failure.rank), failure.pid) != failure.pid
            for failure in found.failures
        )
        """Whether a rank is two processes: it was started again, maybe on another host."""
        for failure in found.failures:
            if failure.rank is not None and failure.local is not None:
                self._first[failure.source, failure.task].add(failure.rank - failure.local)
                if failure.host is not None:
                    self._first[short(failure.host)].add(failure.rank - failure.local)
            if failure.root and (failure.source, failure.task) in self._untold:
                self._untold[failure.source, failure.task] -= 1
            self.launch(
                [failure.rank] if failure.rank is not None and not has_restarts else [],
                failure.host,
            )
        for seat in found.seats:
            if seat.rank is not None and seat.local is not None:
                of = seat.origin
                key = short(seat.host) if seat.host else (of.source, of.task)
                self._first[key].add(seat.rank - seat.local)
        for facts in found.sources:
            for origin in facts.origins:
                self.place(self.rank(origin), origin.host)
            for _, heading in facts.headings:
                self.place(None, heading.host)
        for seat in found.seats:
            origin = seat.origin._replace(rank=seat.rank, local=seat.local, host=seat.host)
            own = self.rank(origin)
            self.place(own, seat.host)
            if own is None:
                continue
            if seat.pid is not None:
                self._ranks[seat.pid].add(own)
            if seat.pci is not None:
                self._ranks[None, seat.pci].add(own)
                if seat.host is not None:
                    self._ranks[short(seat.host), seat.pci].add(own)

    def place(self, rank: int | None, host: str | None) -> None:
        """Note that a host has this name, and that a rank runs there if one is given."""
        host = self._found.nodes.get(host, host) if host else None
        if host is None or host.startswith("localhost"):
            return
        self._names.setdefault(short(host), host)
        if rank is not None:
            self._hosts[rank].add(short(host))

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
            for key in (
                short(origin.host) if origin.host else None,
                (origin.source, origin.task),
                self._node(origin.source),
            ):
                first = self._first.get(key, set())
                if len(first) == 1:
                    return next(iter(first)) + origin.local
                if first:
                    return None
            is_one = len(found.launchers) < 2 and len(self._homes) < 2  # noqa: PLR2004
            return origin.local if is_one else None
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

    def of_pid(self, pid: int) -> int | None:
        """Return the rank of a process that another line names; None if unknown or ambiguous."""
        return only(self._ranks.get(pid, set()))

    def of_gpu(self, host: str | None, pci: str) -> int | None:
        """Return the rank that runs on a GPU; None if unknown or ambiguous."""
        known = _PCI.match(pci.lower())
        return only(self._ranks.get((host and short(host), known[0]), set())) if known else None

    def launch(self, ranks: Iterable[int], host: str | None) -> None:
        """Note that a launcher or scheduler has these ranks on a host."""
        for rank in ranks:
            self.place(rank, host)
        self.place(None, host)
        if host is not None:
            self._launched.add(short(host))

    @property
    def has_one_host(self) -> bool:
        """Whether launchers and schedulers name a single host."""
        return len(self._launched) == 1

    def name(self, host: str) -> str | None:
        """Return the name of a host as it is used first; None if it says nothing."""
        return self._names.get(short(host))

    def host(self, rank: int) -> str | None:
        """Return the host of a rank; None if unknown, or if it was started again elsewhere."""
        name = only(self._hosts.get(rank, set()))
        return None if name is None else self._names[name]

    def share_a_host(self, ranks: Iterable[int]) -> bool:
        """Return whether ranks are on one host, and others elsewhere."""
        hosts = [self._hosts.get(rank, set()) for rank in ranks]
        one = only(set().union(*hosts)) if all(hosts) else None
        return one is not None and any(found - {one} for found in self._hosts.values())

    def above(self, source: int, order: int) -> Heading:
        """Return what stands over a part of a log, as far as other lines know its names."""
        for begin, heading in reversed(self._found.sources[source].headings):
            if begin > order:
                continue
            host = heading.host or self.known(heading.words)
            if host is not None or not heading.is_name:
                return heading._replace(host=host)
        return Heading()

    def known(self, words: Iterable[str]) -> str | None:
        """Return the only pod, or else the only host, that words name and other lines know."""
        words = set(words)
        hosts = {self._names[word] for word in map(short, words) if word in self._names}
        return only(words & self._found.nodes.keys()) or only(hosts)

    def before(self, quote: str) -> str | None:
        """Return the pod or host that a line begins with, if other lines know it."""
        match = _BEFORE.match(quote)
        return self.known([match[1]]) if match else None

    def is_node(self, source: int, task: int) -> bool:
        """Return whether a task of srun is a launcher of several ranks."""
        ranks = self._found.tasks_with_ranks.get((source, task))
        if ranks:
            return ranks != {task}
        return self._found.sources[source].is_launcher
