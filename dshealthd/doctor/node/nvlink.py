"""NVLinks are up, and registered with the fabric."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.snapshot_check import snapshot_check

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext


def _looked(context: NodeContext) -> str:
    series = context.series
    up = [point.value for point in series("nvlinks_up")]
    if not sum(up):
        return "no NVLink"
    states = [point.value for point in series("gpu_fabric_state")]
    fabric = f"; {len(states)} GPUs are registered with the fabric" if states else ""
    return f"{sum(up):g} NVLinks of {len(up)} GPUs are up{fabric}"


CHECK = snapshot_check(
    "bad-link",
    "nvlink",
    "NVLinks and their fabric are up",
    ("nvlink",),
    _looked,
    alerts="DshealthdNv",
)
