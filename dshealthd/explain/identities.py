"""Identities: whose line is whose, by what all logs together say of ranks, hosts and pods."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from pathlib import PurePath
from typing import TYPE_CHECKING

from dshealthd.explain.names import PCI, Heading, Seat, numbers, only, short, words
from dshealthd.explain.streams import same_digits

if TYPE_CHECKING:
    from dshealthd.explain.events import Origin
    from dshealthd.explain.facts import Recognized

_BEFORE = re.compile(r'(?:\{"\w+": ?")?\[?([\w][\w.-]*\w)[\]@: ]')
"""What a line begins with, or the message of a container's record in JSON."""
MAX_PER_NODE = 16
"""GPUs of the largest nodes (DGX-2)."""
_MADE_FOR_A_JOB = re.compile(r"-[a-z\d]{5}$")
_TORCHRUN_FOLDER = re.compile(r"(.*)/attempt_\d+/\d+/[^/]+$")


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
        """Ranks by pid, by the host and the PCI address of their GPU, and by their log."""
        self._hosts: dict[int, set[str]] = defaultdict(set)
        """Hosts by rank."""
        self._alone: dict[str | None, int] = {}
        """The rank of each host, if each of all ranks has a host of its own."""
        self._names: dict[str, str] = {}
        """Names of hosts that stand where only a host can stand, by their first part."""
        self._pods: dict[str, set[str]] = defaultdict(set)
        """Pods by their host name."""
        for pod in found.nodes:
            if _MADE_FOR_A_JOB.search(pod):
                self._pods[pod[:-6]].add(pod)
        self._tasks: dict[tuple[int, int], set[str]] = defaultdict(set)
        """Hosts by file and task of srun."""
        for event in found.events:
            if "host" in event.fields:
                for number in numbers(event.fields.get("tasks", event.fields.get("task", ""))):
                    self._tasks[event.origin.source, number].add(event.fields["host"])
        for host in (*found.nodes.values(), *chain(*self._tasks.values())):
            self.place(None, host)
        within: list[Origin | Seat] = [*found.seats]
        within += [origin for facts in found.sources for origin in facts.origins]
        self._homes = {
            short(one.host) for one in within if one.local is not None and one.host is not None
        }
        """Hosts on which lines say that a rank within the node is."""
        for (_, _, pid), (_, own) in found.ranks_by_pid.items():
            self._ranks[pid].add(own)
        for (_, pid), ranks in found.ranks_by_prefix.items():
            self._ranks[pid] |= ranks
        own_ranks = {source: set(ranks) for source, ranks in found.ranks_by_source.items()}
        for seat in found.seats:
            if seat.rank is not None:
                own_ranks.setdefault(seat.origin.source, set()).add(seat.rank)
        alone = {source: ranks for source, ranks in own_ranks.items() if len(ranks) == 1}
        if len(set().union(*alone.values())) > 1:  # each of several logs is of one rank
            self._ranks |= {("log", source): ranks for source, ranks in alone.items()}
        self._of_tasks: dict[tuple[int, int], set[int]] = defaultdict(set)
        """Ranks by file and task of srun."""
        for source, facts in enumerate(found.sources):
            for of in facts.origins:
                if of.rank is not None and of.local is not None:
                    for key in {(source, of.task), self._folder(source)} - {None}:
                        self._first[key].add(of.rank - of.local)
                if of.rank is not None and of.task is not None:
                    self._of_tasks[source, of.task].add(of.rank)
        self._learn_failures()
        self._has_one_node = self._is_one_node()
        for facts in found.sources:
            for origin in facts.origins:
                self.place(self.rank(origin), self.home(origin))
            for _, heading in facts.headings:
                self.place(None, heading.host)
        self._learn_seats()
        if len(self._hosts) == found.world:
            by = {only(self._hosts.get(rank, set())): rank for rank in range(found.world)}
            self._alone = by if len(by) == found.world and None not in by else {}

    def _is_one_node(self) -> bool:
        """Return whether nothing shows that there are several nodes: no launchers, hosts, more
        ranks than a node has GPUs, node that begins with another rank than 0, or rank within the
        node in two logs.
        """
        locals_ = [
            one
            for source, facts in enumerate(self._found.sources)
            if self._folder(source) is None
            for one in {(of.task, of.local) for of in facts.origins if of.local is not None}
        ]
        return (
            max(len(self._found.launchers), len(self._homes)) < 2  # noqa: PLR2004
            and (self._found.world or 0) <= MAX_PER_NODE
            and not any(map(any, self._first.values()))
            and len(locals_) == len(set(locals_))
        )

    def _learn_failures(self) -> None:
        """Learn what launchers' summaries say of ranks and hosts."""
        found = self._found
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
            self.place(None if has_restarts else failure.rank, failure.host)
        for seat in found.seats:
            if seat.rank is not None and seat.local is not None:
                of = seat.origin
                if seat.host is not None:
                    self._first[short(seat.host)].add(seat.rank - seat.local)
                self._first[of.source, of.task].add(seat.rank - seat.local)

    def _learn_seats(self) -> None:
        """Learn what single lines say of where a rank runs."""
        found = self._found
        logs: dict[str, list[int]] = defaultdict(list)
        for number, facts in enumerate(found.sources):
            logs[PurePath(facts.name).name].append(number)
        for seat in found.seats:
            origin = seat.origin._replace(rank=seat.rank, local=seat.local, host=seat.host)
            is_of_rank = seat.rank is not None or seat.local is not None
            own = self.rank(origin) if is_of_rank else None
            self.place(own, seat.host)
            if own is None:
                continue
            if seat.log is not None:
                for number in logs.get(PurePath(seat.log).name, ()):
                    if f"/{found.sources[number].name}".endswith(f"/{seat.log}"):
                        self._ranks["log", number].add(own)
            if seat.pid is not None:
                self._ranks[seat.pid].add(own)
                self._ranks[seat.host and short(seat.host), seat.pid].add(own)
            if seat.pci is not None:
                self._ranks[None, seat.pci].add(own)
                if seat.host is not None:
                    self._ranks[short(seat.host), seat.pci].add(own)

    def place(self, rank: int | None, host: str | None) -> None:
        """Note that a host has this name, and that a rank runs there if one is given."""
        host = self.node(host) if host else None
        if host is None or host.startswith("localhost"):
            return
        self._names.setdefault(short(host), host)
        if rank is not None:
            self._hosts[rank].add(short(host))

    def node(self, name: str) -> str:
        """Return the node of a pod; a name that is no pod's as it is.

        A job's pod is called by its host name, and five characters that make it unique.
        """
        pod = only(self._pods.get(name, set())) or name
        return self._found.nodes.get(pod, name)

    def _folder(self, source: int) -> str | None:
        """Return the folder of a node's torchrun that has a log; None without one."""
        match = _TORCHRUN_FOLDER.match(self._found.sources[source].name)
        return match[1] if match else None

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
                self._folder(origin.source),
            ):
                first = self._first.get(key, set())
                if len(first) == 1:
                    return next(iter(first)) + origin.local
                if first:
                    return None
            return origin.local if self._has_one_node else None
        if origin.pid is not None:
            known = found.rank_of(origin)
            if known is not None:
                return known
            own = found.ranks_by_prefix.get((origin.source, origin.pid), set())
            if len(own) == 1:
                return next(iter(own))
            beside = self._ranks.get((origin.host and short(origin.host), origin.pid), set())
            if len(beside) == 1:
                return next(iter(beside))
        if origin.task is not None and not self.is_node(origin.source, origin.task):
            return origin.task
        of_log = only(self._ranks.get(("log", origin.source), set()))
        if of_log is not None or origin.host is None:
            return of_log
        return self._alone.get(short(self.node(origin.host)))

    def home(self, origin: Origin) -> str | None:
        """Return the host that a line comes from, by its prefixes; None if unknown."""
        task = (origin.source, -1 if origin.task is None else origin.task)
        return origin.host or only(self._tasks.get(task, set()))

    def of_pid(self, pid: int) -> int | None:
        """Return the rank of a process that another line names; None if unknown or ambiguous."""
        return only(self._ranks.get(pid, set()))

    def pids(self, rank: int | None) -> set[int]:
        """Return the processes that are known to be only a rank's."""
        return {
            key for key, own in self._ranks.items() if isinstance(key, int) and only(own) == rank
        }

    def of_gpu(self, host: str | None, pci: str) -> int | None:
        """Return the rank that runs on a GPU; None if unknown or ambiguous."""
        known = PCI.match(pci.lower())
        return only(self._ranks.get((host and short(host), known[0]), set())) if known else None

    @property
    def names(self) -> list[str]:
        """The hosts that are known."""
        return list(self._names.values())

    def name(self, host: str) -> str | None:
        """Return the name by which a scheduler knows a host, or else its first; None if unknown."""
        return self._names.get(short(host))

    def host(self, rank: int) -> str | None:
        """Return the host of a rank; None if unknown, or if it was started again elsewhere."""
        name = only(self._hosts.get(rank, set()))
        return None if name is None else self._names[name]

    def is_on(self, rank: int, host: str) -> bool:
        """Return whether a rank is known to run on a host."""
        return short(host) == only(self._hosts.get(rank, set()))

    def share_a_host(self, ranks: Iterable[int]) -> bool:
        """Return whether ranks are on one host, and others elsewhere."""
        hosts = [self._hosts.get(rank, set()) for rank in ranks]
        one = only(set().union(*hosts)) if all(hosts) else None
        return one is not None and any(found - {one} for found in self._hosts.values())

    def above(self, source: int, order: int) -> Heading:
        """Return what stands over a part of a log, as far as other lines know its names: the last
        heading before it, or else the file's name.
        """
        above = Heading()
        for begin, heading in reversed(self._found.sources[source].headings):
            if begin > order:
                continue
            above = heading._replace(host=heading.host or self.known(heading.words))
            if above.host is not None or not heading.is_name:
                break
        if above.host is not None:
            return above
        name = PurePath(self._found.sources[source].name).name
        return above._replace(host=self.known(words(name)))

    def known(self, words: Iterable[str]) -> str | None:
        """Return the only pod, or else the only host, that words name and other lines know. A word
        of the same form is another host's name, whether or not it is known.
        """
        words = set(words)
        hosts = {self._names[word] for word in map(short, words) if word in self._names}
        host = only(hosts)
        if host is not None:
            form = same_digits(host)
            host = only({word for word in map(short, words) if same_digits(word) == form} | hosts)
        return only(words & self._found.nodes.keys()) or host

    def is_strange(self, pod: str | None) -> bool:
        """Return whether a pod begins with another word than any that other lines know."""
        known = {re.split(r"[\d-]", name)[0] for name in (*self._names, *self._found.nodes)}
        return pod is not None and bool(known) and re.split(r"[\d-]", pod)[0] not in known

    def before(self, quote: str) -> str | None:
        """Return the pod or host that a line begins with, if other lines know it."""
        match = _BEFORE.match(quote)
        return self.known([match[1]]) if match else None

    def is_node(self, source: int, task: int) -> bool:
        """Return whether a task of srun is a launcher of several ranks."""
        ranks = self._of_tasks.get((source, task))
        return ranks != {task} if ranks else self._found.sources[source].is_launcher
