"""The cgroups that limit the tasks of a process: how many they hold, and may hold."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from dshealthd.core.host import Host, integer, lines_of, read

_MAX_DEPTH = 64
"""Most nested cgroups that are read; systemd and Kubernetes create up to ten."""


class OutsideNamespace(Exception):
    """The cgroup is outside this process's own cgroup namespace, as in a container."""


class Tasks(NamedTuple):
    """Tasks of a cgroup and its descendants; each thread is one."""

    current: int
    limit: float
    """Infinity if there is none."""

    @property
    def share(self) -> float:
        """Used share of the cgroup's task limit."""
        return self.current / self.limit if self.limit else math.inf


def parse_pids_path(text: str) -> str | None:
    """Return the cgroup, below `/sys/fs/cgroup`, that counts a process's tasks, or None."""
    unified = None
    for line in lines_of(text):
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if "pids" in controllers.split(","):
            return f"pids{path}"
        if not controllers and path:
            unified = path.lstrip("/")
    return unified


def tasks_and_limit(host: Host, pid: int) -> Tasks | None:
    """Return the tasks of the cgroup closest to its limit: the process's own or an ancestor.

    None if the kernel counts no tasks. OutsideNamespace, OSError, ValueError.
    """
    path = parse_pids_path(read(host.proc(f"{pid}/cgroup")))
    if path is None:
        return None
    parts = [part for part in path.split("/") if part]
    if ".." in parts:
        raise OutsideNamespace(path)
    return max(_groups(host, parts[:_MAX_DEPTH]), key=lambda found: found.share, default=None)


def _groups(host: Host, parts: list[str]) -> Iterator[Tasks]:
    """Yield tasks and limit of each cgroup, the process's own first; the root has no files."""
    for depth in range(len(parts), 0, -1):
        place = host.sys("/".join(("fs/cgroup", *parts[:depth])))
        try:
            current, limit = read(f"{place}/pids.current"), read(f"{place}/pids.max").strip()
        except FileNotFoundError:
            continue
        yield Tasks(
            integer(f"{place}/pids.current", current.strip()),
            math.inf if limit == "max" else integer(f"{place}/pids.max", limit),
        )
