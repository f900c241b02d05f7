"""No collective is stuck."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.snapshot_check import snapshot_check

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext


def _looked(_context: NodeContext) -> str:
    return "NCCL RAS reports no stuck communicator in the jobs on this node"


CHECK = snapshot_check(
    "nccl-timeout",
    "collectives",
    "No collective is stuck",
    ("nccl_ras",),
    _looked,
)
