"""NVLinks are up, and GPUs are registered with the fabric."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.snapshot_check import snapshot_check
from dshealthd.plural import plural

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext


def _looked(context: NodeContext) -> str:
    series = context.series
    up = [point.value for point in series("nvlinks_up")]
    if not sum(up):
        return "no NVLink"
    states = [point.value for point in series("gpu_fabric_state")]
    fabric = (
        f"; {plural(len(states), 'GPU is', 'GPUs are')} registered with the fabric"
        if states
        else ""
    )
    return f"{plural(sum(up), 'NVLink')} of {plural(len(up), 'GPU')} up{fabric}"


CHECK = snapshot_check(
    "bad-link",
    "nvlink",
    "NVLinks and their fabric are up",
    ("nvlink", "nvlink_domain"),
    _looked,
    alerts="DshealthdNv",
)
