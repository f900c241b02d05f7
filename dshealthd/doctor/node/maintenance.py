"""This node is not in maintenance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.snapshot_check import snapshot_check

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext


def _looked(_context: NodeContext) -> str:
    return "this node is not in maintenance"


CHECK = snapshot_check("maintenance", "maintenance", "This node is not in maintenance", (), _looked)
