"""Probes reach the other nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.probed import looked, unless_probed
from dshealthd.doctor.snapshot_check import snapshot_check

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext


def _looked(context: NodeContext) -> str:
    return looked(context, "suspects this node of failing")


CHECK = snapshot_check(
    "nccl-remote-error",
    "probe-failures",
    "Probes reach the other nodes",
    (),
    _looked,
    unless_probed,
)
