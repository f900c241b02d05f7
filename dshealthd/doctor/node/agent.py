"""The agent of this node and its files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.core.text import plural
from dshealthd.doctor.snapshot_check import snapshot_check
from dshealthd.findings.agent import FILES

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext


def _agent_config(context: NodeContext) -> str:
    failed = [file for name, file in FILES.items() if context.series.value(name) == 0]
    return f"reloaded, but not: {', '.join(failed)}" if failed else "every file was reloaded"


AGENT_CONFIG = snapshot_check(
    "config-reload-failed",
    "agent-config",
    "The agent runs with its current files",
    (),
    _agent_config,
)


def _agent_workers(context: NodeContext) -> str:
    stuck = sum(point.value for point in context.series("worker_stuck"))
    return f"{plural(stuck, 'worker')} cannot be killed"


AGENT_WORKERS = snapshot_check(
    "collector-failing",
    "agent-workers",
    "No worker of the agent is stuck",
    (),
    _agent_workers,
)


def _maintenance(_context: NodeContext) -> str:
    return "this node is not in maintenance"


MAINTENANCE = snapshot_check(
    "maintenance", "maintenance", "This node is not in maintenance", (), _maintenance
)
