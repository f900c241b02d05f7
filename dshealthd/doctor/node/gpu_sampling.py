"""NVML shows the GPUs that are on the PCI bus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.snapshot_check import snapshot_check
from dshealthd.plural import plural

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext


def _looked(context: NodeContext) -> str:
    expected = context.series.value("gpus_expected") or 0
    return (
        f"{plural(expected, 'NVIDIA GPU')} on the PCI bus, and NVML responds"
        if expected
        else "no NVIDIA GPU on the PCI bus"
    )


CHECK = snapshot_check(
    "gpu-metrics-gone",
    "gpu-metrics",
    "NVML shows the GPUs that are on the PCI bus",
    ("gpu_bus",),
    _looked,
)
