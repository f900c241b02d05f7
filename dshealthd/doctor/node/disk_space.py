"""File systems have free space."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.snapshot_check import snapshot_check

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext


def _looked(context: NodeContext) -> str:
    paths = sorted(point.labels["path"] for point in context.series("filesystem_size_bytes"))
    return f"enough free space at {', '.join(paths)}"


CHECK = snapshot_check(
    "disk-full",
    "disk-space",
    "File systems have free space",
    ("filesystem",),
    _looked,
)
