"""The state of this node's probes that outlives a change of its name, address or key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dshealthd.core.state_writer import StateFile
from dshealthd.probe.hung_jobs import HungJobs
from dshealthd.probe.members.absences import Absences
from dshealthd.probe.members.local_membership import LocalMembership
from dshealthd.probe.metrics import RoundMetrics
from dshealthd.probe.options import ProbeOptions
from dshealthd.probe.policy import GpuOccupancy, Policy
from dshealthd.probe.workers.worker_pool import WorkerPool


@dataclass(frozen=True, slots=True)
class ProbeState:
    """What the slots of this node share with those after a change of its name."""

    options: ProbeOptions
    local_membership: LocalMembership
    gpus: GpuOccupancy
    policy: Policy
    worker_pool: WorkerPool | None
    """None if all rounds are light."""
    absences: Absences
    hung_jobs: HungJobs
    metrics: RoundMetrics
    again: asyncio.Event
    """Set to have the members reread."""
    file: StateFile
    """The baselines of earlier runs."""
    summary: Callable[[], dict[str, Any]]
    """Returns what this node reports about itself; see `fleet.summary`."""
    monotonic: Callable[[], float]
    wall: Callable[[], float]
    waited: Callable[[], float | None]
    """Returns the seconds that this agent has waited for a CPU."""
