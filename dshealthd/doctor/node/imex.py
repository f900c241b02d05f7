"""IMEX runs where it is set up for an NVLink fabric of several nodes.

Judged only there: on nodes whose GPUs are no part of such a fabric the service may be installed and
idle, and where nobody has listed its nodes, jobs do without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.snapshot_check import snapshot_check
from dshealthd.linux.imex import DAEMON, NODES

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext


def _looked(context: NodeContext) -> str:
    nodes = [point.value for point in context.series("imex_nodes")]
    if not nodes:
        return "the GPUs are no part of an NVLink fabric of several nodes"
    if nodes[0] < 2:  # noqa: PLR2004 - two nodes make a fabric
        return f"{NODES} lists no other nodes: jobs do without NVLink between nodes"
    return f"{DAEMON} runs for {nodes[0]:g} nodes"


CHECK = snapshot_check(
    "bad-link",
    "imex",
    "IMEX runs where it is set up for a fabric of several nodes",
    ("nvlink_domain",),
    _looked,
    alerts="DshealthdImex",
)
