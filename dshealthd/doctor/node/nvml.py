"""NVML responds, and its version matches the driver's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.snapshot_check import snapshot_check

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext


def _looked(context: NodeContext) -> str:
    labels = next((point.labels for point in context.series("gpu_driver_info")), None)
    if labels is None:
        return "no driver, and no NVIDIA GPU that needs one"
    return f"driver {labels['driver']}, CUDA {labels['cuda']}, NVML {labels['nvml']}"


CHECK = snapshot_check("nvml-broken", "nvml", "NVML responds", ("gpu", "gpu_processes"), _looked)
