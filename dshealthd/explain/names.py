"""The rank, host, pod, process and device that a line names.

A name is taken only where it can be one: a false name is worse than none.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection
from typing import NamedTuple, TypeVar

from dshealthd.explain.events import Origin, is_name_of_host

T = TypeVar("T")

_SPOKEN = re.compile(
    r"\[(?:PG [^\]]{1,80}\(default_pg\) )?(?:[Rr]ank|RANK)[ :=_]?(?P<rank>\d{1,6})\]"
)
"""A rank in the text of a line; that in another group than the default one is not the job's."""
_SAID = re.compile(
    r"(?:(?:^|[:(,|=\]] *|\b(?:on|with|process|[Gg]lobal|MCW|[Ww]orker|[Cc]ontainer) )"
    r"(?:[Rr]ank|RANK)(?:[ =]| id[:=])|\b(?:(?:global_|world_)?rank|process_index)=)"
    r"(?P<rank>\d{1,6})\b(?![-.]\d|,? (?:and|or|to) )"
)
_ANY_RANK = re.compile(r"\branks?\b", re.IGNORECASE)
"""A line that speaks of one rank alone speaks of its own, unless it is sent to or from it."""
MAX_HEADING = 200
"""Maximum characters of what stands over a part of a text."""
MAX_LISTED = 10_000
"""Maximum number of ranks or tasks in one line."""
NAMES_RANKS = frozenset({"rank", "local", "task", "tasks", "culprit", "culprits"})
"""Fields of patterns that say which ranks a line is about."""
_NAMES = re.compile(
    r"\b(?:[Nn]ode|[Hh]ost(?:name)?|instance|(?i:running) (?i:on|at))(?: ?[:=] ?| |/)['\"]?"
    r"(?P<host>[A-Za-z\d][\w.-]{1,62}[A-Za-z\d])"
    r"|\b(?:[Nn]ode )?(?:ip|IP)(?: ?[:=] ?| |\[)['\"]?(?P<address>\d{1,3}(?:\.\d{1,3}){3})\b"
    r"|\b(?:pid|PID)(?: ?[:=] ?| )(?P<pid>\d{2,10})\b"
    r"|\b(?:to|task) [\w.-]{1,15}:(?P<pid_3>\d{2,10})\b"
    r"|\[(?P<pid_2>\d{2,10})\](?::| trap| general) [^\n]{0,40}(?:segfault|ip|sp)\b"
    r"|\b(?:GPU |GPU|cuda:|Device:|device |DEVICE\[)(?P<gpu>\d{1,2})\b(?!\.\d|,\d| "
    r"?(?:[KMG]i?B|%|x\b))"
    r"|(?<![\w.])(?P<device>(?:(?:mlx[45]|mlx5_bond|efa|hfi1|hns|ionic|mana)_|bnxt_re|irdma)\d{1,3}"
    r"(?::\d)?|(?:ib|iw|opa|rdma|roce)"  # rdma-core: rdma_rename.c
    r"(?:(?:P\d{1,5})?(?:p\d{1,3})?s\d{1,5}(?:f\d{1,3}(?:v\d{1,4})?)?|o\d{1,5}|x[0-9a-f]{16})"
    r"(?::\d)?"
    r"|nvme\d{1,2}n\d(?:p\d{1,2})?|[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.\d)(?![\w.])"
    r"|\bhca (?P<device_2>(?=\w*\d)\w{2,64}(?::\d)?)(?![\w.])"  # NCCL, of any name
    r"|(?<!by )\bpods?(?:[ /]|=\"?)(?P<pod>[a-z\d][a-z\d.-]{1,62}+)(?![\w'])"
)
_BOUND = re.compile(r"\b[Bb]ind (?:to|on) (?!0\.|127\.)(\d{1,3}(?:\.\d{1,3}){3})\b")
"""An address that a process binds, which is its own."""
_DETAIL = re.compile(
    r"\s{0,40}(?P<key>[A-Za-z_][\w .-]{0,30}?)\s{0,4}:\s{1,30}['\"]?(?P<value>[^\s'\"]{1,100})"
)
_KEYS = {
    "pid": "pid", "ip": "host", "node_ip": "host", "hostname": "host", "host": "host",
    "Node": "host", "rank": "rank", "Name": "pod",
}  # fmt: skip
"""Keys in a block of `key: value` lines, as Ray and kubectl print them, and whose name each has."""
_LOCAL = re.compile(r"\blocal(?:[_-]?rank)?[ =:'\",]{1,4}(\d{1,4})\b")
_LOG = re.compile(r"\blog(?:[ _-]?file)?[ :=]{1,2}(?P<log>[\w./-]{1,250}\w)")
_HOST = r"(?!\d+[^\w.-])[A-Za-z\d][\w.-]{0,62}[A-Za-z\d]"
_RANKS = r"\d{1,6}(?:-\d{1,6})?(?:, ?\d{1,6}(?:-\d{1,6})?){0,1000}"
_LISTED = re.compile(rf"\branks\W{{1,3}}(?:\w+\()?\[(?P<ranks>{_RANKS})\]")
_ROSTER = re.compile(
    rf"(?P<host>{_HOST})[ :=(]{{1,3}}ranks?[ :=\[]{{1,3}}(?P<ranks>{_RANKS})(?![\w.])"
    rf"|['\"](?P<host_2>{_HOST})['\"]: \[(?P<ranks_2>{_RANKS})\]"
)
"""A host and the ranks on it, of which a launcher lists several in a line."""
_RUN = re.compile(
    r"(?:(?:on )?[A-Za-z_][\w-]*(?:[=:] ?| )['\"]?[\w.:/-]*\d[\w.:/-]*['\"]?[,;:|()\[\] ]*){2,12}"
)
"""Names and values in a row: what stands among prose may be another's."""
_ON = re.compile(r"\bon (?!(?i:[gn]pu|cuda|hip)\W?\d)(?P<host>[A-Za-z\d][\w.-]{0,62}\w)")
_PROCESS = re.compile(r"\bprocess (\d{2,10}) spawned\b")
_BUS = re.compile(r"\bbusId ([0-9a-f]{1,9})\b")
PCI = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}")
_ON_NODE = re.compile(
    r"Successfully assigned [\w.-]+/(?P<pod>[\w.-]+) to (?P<node>[\w.-]+)"
    r"|^(?P<pod_2>[a-z\d][\w.-]{1,62}) +\d+/\d+ +[A-Z][\w:]+ +\d+(?: \([^)]{1,40}\))? +[\dsmhdy]+ +"
    r"(?:\d{1,3}(?:\.\d{1,3}){3} +)?(?P<node_2>[\w.-]*\d[\w.-]*)"
)
"""A pod and its node, as the scheduler says, and in the wide table of kubectl."""
_BESIDE = re.compile(
    r"[Rr]ank\b.*\b(?:pid|PID|node|host|busId|log|bound)|(?:pid|node|host|process).*[Rr]ank\b"
    r"|RANK .*PID|process_index=|[Rr]ank.*(?:\(: |\{['\"]| \w.*\|.*[Rr]ank )"
)
_ROW = re.compile(r"Successfully assigned |^\S+ +/ +[A-Z]|^pdsh@")
"""Lines without their digits that may say what belongs together: a rank and more, or a pod; or
that name a host."""
_PDSH = re.compile(r"pdsh@[\w.-]{1,64}: (?P<host>[\w.-]{1,64}): \w+(?::| exited )")
"""What pdsh says of one of its hosts, whatever form that has."""
_HEADING = re.compile(
    r"(?:=+>|>{2,}|\#{1,6}|==|[-=*#]{3,}) ?(?P<title>[\w\[(/.].*)"
    r"|(?P<prompt>\[[\w.@-]{2,60} [^\]]{1,80}\]|\[[\w.@-]{2,60}\] ?(?=\$)|[\w.-]+@[\w.-]+:\S{1,80}"
    r"|[\w.-]*\d[\w.-]*|)[$#] "
    r"(?P<command>\w.*)"
    r"|(?:ok|changed|fatal|failed|unreachable|skipping): \[(?P<host>[\w.-]+)\]"
    r"|(?P<host_2>[\w.-]+) \| (?:CHANGED|FAILED|SUCCESS|UNREACHABLE)\b"
    r"|(?P<alone>[\w.-]*\d[\w.-]*):?$"
)
"""What stands over a part of a text: a title, a command at a prompt, hosts of ansible and clush."""
_READS = re.compile(
    r"\b(?:journalctl|dmesg|syslog|\w+d\.log|events?\b|describe|sinfo|scontrol)|/var/(?:log|adm)/"
)
"""A command that prints what others than the job say, or a title of that."""
_READS_OWN = re.compile(r"(?:sudo )?(?:dmesg|journalctl)\b")
"""A command that prints what the kernel and the services of the prompt's own host say."""
_OF_PROMPT = re.compile(r"\[?(?:[\w.-]+@)?(?P<host>[\w.-]+)")
_ASKS = re.compile(r"\b(?:ssh|kubectl|oc|talosctl)\b")
_WORD = re.compile(r"[\w][\w.-]*\w")


def words(text: str) -> frozenset[str]:
    """Return the words of a title or a file's name that may be names, also between its dots."""
    found = _WORD.findall(text)
    return frozenset(part for word in found for part in (word, *word.split(".")))


def spoken_rank(text: str) -> dict[str, str]:
    """Return the rank that a line names in its text rather than in a prefix, as a field."""
    match = _SPOKEN.search(text)
    if match is None and len(_ANY_RANK.findall(text[:400])) == 1:
        match = _SAID.search(text)
    return {} if match is None else {"rank": match["rank"]}


def process(text: str) -> dict[str, str]:
    """Return the process that a line of the kernel names, as a field."""
    match = _NAMES.search(text) if "]" in text else None
    return {"pid": match["pid_2"]} if match and match["pid_2"] else {}


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


def bound(text: str) -> str | None:
    """Return the address of its own that a process says it binds; None if it says none."""
    match = _BOUND.search(text)
    return match[1] if match else None


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
    log: str | None = None
    """The file to which it writes."""


def may_pair(template: str) -> bool:
    """Return whether a line may have a `seat`, or say on which node a pod is; `template` is the
    line without its digits.
    """
    return (_BESIDE.search(template) or _ROW.search(template)) is not None


def seats(text: str, origin: Origin, rank: int | None = None) -> list[Seat]:
    """Return where a line says that ranks run; empty if it names no rank or nothing beside one. A
    host without a rank is one of the job's.

    `rank` is that of its process, if known, unless it names another.
    """
    if (hosts := _roster(text)) is not None:
        first: dict[str, int] = {}
        for one, host in hosts.items():
            first.setdefault(host, one)
        # Where several on a host follow one another, these are all of it.
        return [
            Seat(origin, one, one - first[host] if one + 1 in hosts else None, host=host)
            for one, host in hosts.items()
        ]
    if match := _PDSH.match(text):
        return [Seat(origin, host=match["host"])]
    local = _LOCAL.search(text)
    said = None if "[PG " in text else _SAID.search(text)
    if said is not None:
        rank = int(said["rank"])
    if rank is None and local is None:
        return []
    begin = said.start("rank") if said else local.start(1) if local else 0
    beside = (run[0] for run in _RUN.finditer(text) if run.start() <= begin < run.end())
    row = next(beside, "")
    found = named(row)
    if (match := _ON.search(row)) and is_name_of_host(match["host"]):
        found.setdefault("host", match["host"])
    pid = _PROCESS.search(text)
    bus = _BUS.search(text)
    log = _LOG.search(text)
    pci = found.get("device", "")
    if bus:  # NCCL's form: an address without its separators, and zeros
        digits = bus[1].zfill(9)
        pci = f"{digits[:4]}:{digits[4:6]}:{digits[6:8]}"
    return [
        Seat(
            origin,
            rank,
            int(local[1]) if local else origin.local,
            int(pid[1]) if pid else int(found["pid"]) if "pid" in found else origin.pid,
            found.get("host", origin.host),
            match[0] if (match := PCI.match(pci)) else None,
            log["log"] if log else None,
        )
    ]


def _roster(text: str) -> dict[int, str] | None:
    """Return the hosts of all ranks that a line lists; None if it lists no two hosts, or if one
    rank is on several: then its numbers are others.
    """
    hosts: dict[int, str] = {}
    for match in _ROSTER.finditer(text):
        host, ranks = (text for text in match.groups() if text)
        for rank in numbers(ranks):
            if not is_name_of_host(host) or hosts.setdefault(rank, host) != host:
                return None
        if len(hosts) > MAX_LISTED:
            return None
    return hosts if len(set(hosts.values())) > 1 else None


def ranks_in(text: str) -> tuple[int, ...]:
    """Return the ranks that a message lists as those it is about; empty without a list."""
    match = _LISTED.search(text)
    return numbers(match["ranks"]) if match else ()


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a list such as `1-3,5`; too many are not ranks, so empty."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal():
            found += range(int(first), min(int(last or first), int(first) + MAX_LISTED) + 1)
        if len(found) > MAX_LISTED:
            return ()
    return tuple(found)


class Heading(NamedTuple):
    """What stands over a part of a text."""

    words: frozenset[str] = frozenset()
    """Words of which one may be the name of a host or pod that other lines name, too."""
    host: str | None = None
    """The host that it certainly names."""
    is_name: bool = False
    """Whether it is nothing but a name, and so none if no other line has that name."""
    is_foreign: bool = False
    """Whether what follows is the log of a service, a kernel or a scheduler."""


def heading(text: str) -> Heading | None:
    """Return what a line says of the lines below it; None if it is no heading."""
    match = _HEADING.match(text) if len(text) < MAX_HEADING or text[:1] in "fcosu" else None
    if match is None:
        return None
    if host := match["host"] or match["host_2"]:
        return Heading(host=host)
    own = (
        _OF_PROMPT.match(match["prompt"] or "")
        if _READS_OWN.match(match["command"] or "")
        else None
    )
    if own and is_name_of_host(own["host"]):
        return Heading(host=own["host"], is_foreign=True)
    said = match["title"] or match["alone"] or match["command"]
    if match["command"] and not _ASKS.search(said):  # other commands may speak of any host
        said = match["prompt"]
    return Heading(
        words(said),
        is_name=match["alone"] is not None,
        is_foreign=_READS.search(f"{said} {match['command'] or ''}") is not None,
    )


def node_of(text: str) -> tuple[str, str] | None:
    """Return a pod and the node that a line says it is on; None if it does not."""
    match = _ON_NODE.search(text)
    if match is None:
        return None
    return match["pod"] or match["pod_2"], match["node"] or match["node_2"]


def is_detail(text: str) -> bool:
    """Return whether a line has the form `key: value`."""
    return _DETAIL.match(text) is not None


class Details:
    """The block of `key: value` lines that the current line is in, or that ends right before it."""

    def __init__(self) -> None:
        self._fields: dict[str, str] = {}
        self._is_over = False
        self.described: dict[str, str] = {}
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
        if name is not None:
            self._fields.setdefault(name, value)
        if match["key"] == "Namespace":
            self.described = dict(self._fields)
        elif self.described and match["key"] == "Node" and name is not None:
            self.described.setdefault(name, value)

    @property
    def fields(self) -> dict[str, str]:
        """What the block names; a `Name` is a pod's only beside its node."""
        fields = self._fields
        # any word may precede a colon
        if len(fields) < 2 or ("pod" in fields and "host" not in fields):  # noqa: PLR2004
            fields = {}
        return {**self.described, **fields}
