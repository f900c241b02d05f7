"""The loss of each training job is a number."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.snapshot_check import snapshot_check
from dshealthd.plural import plural

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext


def _looked(context: NodeContext) -> str:
    jobs = {point.labels["job"] for point in context.series("job_loss_finite")}
    report = plural(len(jobs), "training job reports", "training jobs report")
    return f"{report} a loss; none is NaN or infinite"


CHECK = snapshot_check(
    "loss-nan",
    "job-losses",
    "The loss of each training job is a number",
    ("training",),
    _looked,
)
