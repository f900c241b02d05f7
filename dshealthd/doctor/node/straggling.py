"""This node is as fast as its peers in probes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.snapshot_check import snapshot_check
from dshealthd.plural import plural

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext


def _looked(context: NodeContext) -> str:
    rounds = sum(point.value for point in context.series("probe_rounds_total"))
    return f"{plural(rounds, 'round')} with other nodes, none that accuses this node of being slow"


CHECK = snapshot_check(
    "straggler",
    "straggler",
    "This node is as fast as its peers in probes",
    (),
    _looked,
)
