"""The agent runs with its current files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.snapshot_check import snapshot_check

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext


def _looked(_context: NodeContext) -> str:
    return "every file was reloaded"


CHECK = snapshot_check(
    "config-reload-failed",
    "agent-config",
    "The agent runs with its current files",
    (),
    _looked,
)
