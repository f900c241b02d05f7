"""GPU memory has no uncorrected errors, and no GPU needs a reset."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.snapshot_check import snapshot_check
from dshealthd.plural import plural

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext


def _looked(context: NodeContext) -> str:
    gpus = len(list(context.series("gpu_up")))
    if not gpus:
        return "no GPU, and no GPU error in the kernel log"
    counted = {point.labels["gpu"] for point in context.series("gpu_ecc_errors_total")}
    without = (
        f"; {plural(gpus - len(counted), 'does', 'do')} not count errors"
        if len(counted) < gpus
        else ""
    )
    return f"no uncorrected error, pending remap or recent Xid on {plural(gpus, 'GPU')}{without}"


CHECK = snapshot_check(
    "nccl-all-reduce-failed",
    "gpu-memory",
    "GPU memory is sound: ECC, row remaps, Xids",
    ("ecc", "kernel_log"),
    _looked,
)
