"""Which rank an event belongs to if its line does not say so."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dshealthd.explain.events import Origin
    from dshealthd.explain.facts import Recognized

_TORCHRUN_FOLDER = re.compile(r"(?P<node>.*)/attempt_\d+/(?P<local>\d+)/[^/]+$")


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
            return None if self._has_many_nodes() else origin.local
        if origin.pid is not None:
            known = found.ranks_by_pid.get((origin.source, origin.pid))
            if known is not None:
                return known
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
        if any(key[0] == source for key in self._found.tasks_with_ranks):
            return any(
                seen != {other}
                for (where, other), seen in self._found.tasks_with_ranks.items()
                if where == source
            )
        return self._found.sources[source].is_launcher

    def _has_many_nodes(self) -> bool:
        names = {
            match["node"]
            for number in range(len(self._found.sources))
            if (match := self._folder(number))
        }
        return len(names) > 1 or len(self._found.launchers) > 1
