"""No training job on this node is hung."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.snapshot_check import snapshot_check
from dshealthd.plural import plural

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext


def _looked(context: NodeContext) -> str:
    jobs = {point.labels["job"] for point in context.series("job_ranks")}
    return f"{plural(len(jobs), 'training job')} here, none hung"


CHECK = snapshot_check(
    "training-hang",
    "job-hangs",
    "No training job on this node is hung",
    ("training", "job_hang"),
    _looked,
)
