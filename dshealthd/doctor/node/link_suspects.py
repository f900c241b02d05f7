"""No probe suspects a link of this node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.snapshot_check import snapshot_check
from dshealthd.plural import plural

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext


def _looked(context: NodeContext) -> str:
    rounds = sum(point.value for point in context.series("probe_rounds_total"))
    return f"{plural(rounds, 'round')} with other nodes, none that suspects a link of this node"


CHECK = snapshot_check(
    "bad-link",
    "link-suspects",
    "No probe suspects a link of this node",
    (),
    _looked,
    alerts="DshealthdLink",
)
