"""No NCCL with a known defect is in use or installed in a known environment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.snapshot_check import snapshot_check

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext


def _summary(context: NodeContext) -> str:
    found = {point.labels["version"] for point in context.series("software_info", component="nccl")}
    return f"no known defect in NCCL {', '.join(sorted(found))}" if found else "no NCCL in use"


CHECK = snapshot_check(
    "nccl-known-bad",
    "nccl-releases",
    "No NCCL release with a known defect is in use",
    ("software",),
    _summary,
)
