"""This node is as fast as its peers in probes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.probed import looked, unless_probed
from dshealthd.doctor.snapshot_check import snapshot_check

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext


def _looked(context: NodeContext) -> str:
    return looked(context, "suspects this node of being slow")


CHECK = snapshot_check(
    "straggler",
    "straggler",
    "This node is as fast as its peers in probes",
    (),
    _looked,
    unless_probed,
)
