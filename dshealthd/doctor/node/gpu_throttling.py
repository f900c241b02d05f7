"""GPUs are neither hot nor slowed down."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.snapshot_check import snapshot_check

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext


def _looked(context: NodeContext) -> str:
    hottest = max(
        (point.value for point in context.series("gpu_temperature_celsius", sensor="core")),
        default=None,
    )
    return "no GPU" if hottest is None else f"no GPU is slowed down; the hottest has {hottest:g} °C"


CHECK = snapshot_check(
    "gpu-throttled",
    "gpu-throttling",
    "GPUs are neither hot nor slowed down",
    ("gpu",),
    _looked,
)
