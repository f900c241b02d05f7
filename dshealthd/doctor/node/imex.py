"""IMEX runs where it is set up for an NVLink fabric of several nodes.

Judged only there: on nodes whose GPUs are no part of such a fabric the service may be installed and
idle, and where nobody has listed its nodes, jobs do without.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from dshealthd.core.host import read
from dshealthd.doctor.check import Outcome, Result
from dshealthd.doctor.snapshot_check import snapshot_check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.core.host import Host
    from dshealthd.doctor.node_context import NodeContext

NODES = "/etc/nvidia-imex/nodes_config.cfg"
DAEMON = "nvidia-imex"


def parse_nodes(text: str) -> list[str]:
    """Return the addresses of a nodes_config.cfg."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def _nodes(host: Host) -> list[str]:
    try:
        return parse_nodes(read(host.root(NODES)))
    except FileNotFoundError:
        return []


def _runs(host: Host) -> bool:
    for pid in filter(str.isdecimal, os.listdir(host.procfs)):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if read(host.proc(f"{pid}/comm")).strip() == DAEMON:
                return True
    return False


def _cliques(context: NodeContext) -> set[float]:
    return {point.value for point in context.series("gpu_fabric_clique")}


def _more(context: NodeContext) -> Iterator[Result]:
    cliques = _cliques(context)
    if len(cliques) > 1:
        shown = ", ".join(f"{clique:g}" for clique in sorted(cliques))
        yield Result(
            Outcome.WARNING,
            f"GPUs of this node are in different NVLink cliques: {shown}",
            remedy="nvidia-smi -q | grep -A4 Fabric",
            component="fabric",
        )
    nodes = _nodes(context.host)
    if cliques and len(nodes) > 1 and not _runs(context.host):
        yield Result(
            Outcome.WARNING,
            f"{NODES} lists {len(nodes)} nodes, and no {DAEMON} runs: NCCL cannot use NVLink "
            "between nodes",
            remedy=f"sudo systemctl restart {DAEMON}; nvidia-imex-ctl -N",
            source=NODES,
            component="imex",
        )


def _looked(context: NodeContext) -> str:
    if not _cliques(context):
        return "the GPUs are no part of an NVLink fabric of several nodes"
    nodes = _nodes(context.host)
    if len(nodes) < 2:  # noqa: PLR2004 - two nodes make a fabric
        return f"{NODES} lists no other nodes: jobs do without NVLink between nodes"
    return f"{DAEMON} runs for {len(nodes)} nodes"


CHECK = snapshot_check(
    "bad-link",
    "imex",
    "IMEX runs where it is set up for a fabric of several nodes",
    ("nvlink",),
    _looked,
    _more,
    alerts="none of the alerts",
    reads_host=True,
)
