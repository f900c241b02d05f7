"""The agent runs with its files as they are now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.snapshot_check import snapshot_check

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext


def _looked(_context: NodeContext) -> str:
    return "no file failed to be read again"


CHECK = snapshot_check(
    "config-reload-failed",
    "agent-config",
    "The agent runs with its files as they are now",
    (),
    _looked,
)
