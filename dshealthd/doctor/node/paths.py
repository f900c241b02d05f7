"""Configured paths respond and are writable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.snapshot_check import snapshot_check

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext


def _looked(context: NodeContext) -> str:
    written = sorted(point.labels["path"] for point in context.series("path_writable"))
    paths = sorted(point.labels["path"] for point in context.series("filesystem_size_bytes"))
    tested = f"a write test passed at {', '.join(written)}" if written else "none has a write test"
    return f"{', '.join(paths)} respond; {tested}"


CHECK = snapshot_check(
    "checkpoint-path",
    "paths",
    "Configured paths respond and are writable",
    ("filesystem",),
    _looked,
)
