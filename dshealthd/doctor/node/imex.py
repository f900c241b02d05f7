"""IMEX runs where it is configured for a multi-node NVLink fabric.

Only such nodes are judged. Elsewhere the service may be installed and idle, and without a list of
nodes jobs run without it.
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
        return "the GPUs are not part of a multi-node NVLink fabric"
    if nodes[0] < 2:  # noqa: PLR2004 - two nodes make a fabric
        return f"{NODES} lists no other nodes: jobs run without NVLink between nodes"
    return f"{DAEMON} runs for {nodes[0]:g} nodes"


CHECK = snapshot_check(
    "bad-link",
    "imex",
    "IMEX runs where it is configured for a multi-node fabric",
    ("nvlink_domain",),
    _looked,
    alerts="DshealthdImex",
)
