"""A watch over the ranks of one test, and of no other process of the machine."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import pytest

from dshealthd.core.collector import Context
from dshealthd.core.host import Host
from dshealthd.jobs.launches.breakpoints import Breakpoints
from dshealthd.jobs.launches.obstacle import Refused
from dshealthd.jobs.launches.watch import Launches, compare
from tests.nccl.job import Job

MARKS = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may set breakpoints"),
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="not written for this machine"),
    pytest.mark.timeout(300),
]
APART = 1.0
"""Seconds between turns, as the watch sees them: what is launched within the milliseconds of a test
would be more in a second than may be counted.
"""
NEEDED = ("self", "sys", "uptime", "stat")


class Machine:
    """A `/proc` with the processes that a test names, and a watch over them."""

    def __init__(self, folder: Path, pids: Iterable[int]) -> None:
        """Skip the test where the kernel refuses."""
        self.procfs = folder / "proc"
        self.procfs.mkdir()
        for name in NEEDED:
            (self.procfs / name).symlink_to(f"/proc/{name}")
        self.add(*pids)
        self.host = Host(procfs=self.procfs)
        self._ahead = 0.0
        try:
            breakpoints = Breakpoints(self.host)
        except Refused as refusal:
            pytest.skip(f"no breakpoints here: {refusal.reason} ({refusal.detail})")
        self.context = Context(host=self.host, monotonic=lambda: time.monotonic() + self._ahead)
        self.watch = Launches(self.context, breakpoints)

    def add(self, *pids: int) -> None:
        """Have more processes on the machine."""
        for pid in pids:
            (self.procfs / str(pid)).symlink_to(f"/proc/{pid}")

    def turn(self) -> dict[int, dict[str, Any]]:
        """Return what is known of each rank, by its pid, with the communicators compared."""
        self._ahead += APART
        found = self.watch.turn()
        compare(found)
        return {rank["pid"]: rank for rank in found}

    def behind(self) -> list[list[int]]:
        """Return by how many collectives ranks are behind, in their order, of each communicator
        that has a name.
        """
        named = defaultdict(list)
        for rank in sorted(self.turn().values(), key=lambda each: each["rank"]):
            for one in rank["communicators"]:
                if one["behind"] is not None:
                    named[one["name"]].append(one["behind"])
        return sorted(named.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave all ranks."""
        self.watch.close()


def machine_of(folder: Path, *jobs: Job) -> Machine:
    """Return a machine with the ranks of some jobs, which have loaded their libraries."""
    ranks = [rank for job in jobs for rank in job.ranks]
    for rank in ranks:
        rank.ask("sync")
    return Machine(folder, [rank.pid for rank in ranks])
