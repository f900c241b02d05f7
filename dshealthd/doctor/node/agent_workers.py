"""No worker of the agent is stuck."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.snapshot_check import snapshot_check
from dshealthd.plural import plural

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext


def _looked(context: NodeContext) -> str:
    stuck = sum(point.value for point in context.series("worker_stuck"))
    return f"{plural(stuck, 'worker')} cannot be killed"


CHECK = snapshot_check(
    "collector-failing",
    "agent-workers",
    "No worker of the agent is stuck",
    (),
    _looked,
)
