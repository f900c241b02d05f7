"""The state of this node's probes that outlives a change of its name, address or key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from dshealthd.probe.hung_jobs import HungJobs
from dshealthd.probe.members.absences import Absences
from dshealthd.probe.metrics import RoundMetrics
from dshealthd.probe.node import NodeState
from dshealthd.probe.verdicts.baseline import Baselines


@dataclass(frozen=True, slots=True)
class ProbeState(NodeState):
    """What the slots of this node share with those after a change of its name."""

    waited: Callable[[], float | None]
    """Returns the seconds that this agent has waited for a CPU."""
    absences: Absences
    hung_jobs: HungJobs
    metrics: RoundMetrics
    again: asyncio.Event
    """Set to have the members reread."""
    save: Callable[[Baselines], Coroutine[Any, Any, None]]
    summary: Callable[[], dict[str, Any]]
    """Returns what this node reports about itself; see `fleet.summary`."""
