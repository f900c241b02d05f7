"""Whether the RAS of a job has split into parts.

RAS gives up a process that is silent for a minute, and never takes it back. A process that was
stopped for 75 s and goes on, or a network that was down as long, leaves two parts that each call
the other dead, while the job may be healthy. The answer then depends on which process gives it. On
genuine 2.30.7, 26 of 40 queries after such a stop were answered by one of three ranks and said that
the fourth was dead, and 14 were answered by the fourth and said that the other three were.

A process that RAS has called dead and that answers a query proves a split.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.core.host import read_bytes
from dshealthd.jobs.ras.address import own
from dshealthd.jobs.ras.status import RasRankState

if TYPE_CHECKING:
    from dshealthd.core.host import Host
    from dshealthd.jobs.ras.status import Status

_STATUS_LIMIT = 1 << 16


def dead_here(status: Status) -> set[int]:
    """Return the pids of this node that a RAS answer names as dead."""
    places = {
        trouble.place
        for communicator in status.communicators
        for trouble in communicator.troubles
        if trouble.what == RasRankState.DEAD and trouble.place is not None and trouble.place.host
    }
    local = {host for host in {place.host for place in places} if own(host)}
    return {place.pid for place in places if place.host in local}


def own_pid(host: Host, pid: int) -> int | None:
    """Return a process's pid in its innermost namespace, which its RAS uses; None if unknown."""
    try:
        status = read_bytes(host.proc(f"{pid}/status"), _STATUS_LIMIT)
    except OSError:
        return None
    for line in status.split(b"\n"):
        if line.startswith(b"NSpid:"):
            last = line.split()[-1]
            return int(last) if last.isdigit() else None
    return None
