"""No probe suspects a link of this node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.probed import looked, unless_probed
from dshealthd.doctor.snapshot_check import snapshot_check

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext


def _looked(context: NodeContext) -> str:
    return looked(context, "suspects a link of this node")


CHECK = snapshot_check(
    "bad-link",
    "link-suspects",
    "No probe suspects a link of this node",
    (),
    _looked,
    unless_probed,
    alerts="DshealthdLink",
)
