"""Shared memory (`/dev/shm`) is large enough and has free space."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.snapshot_check import snapshot_check
from dshealthd.findings.storage import SHARED_MEMORY

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext


def _looked(context: NodeContext) -> str:
    size = context.series.value("filesystem_size_bytes", path=SHARED_MEMORY)
    free = context.series.value("filesystem_free_bytes", path=SHARED_MEMORY) or 0.0
    if size is None:
        return f"{SHARED_MEMORY} is not among collectors.filesystem.paths"
    return f"{SHARED_MEMORY} has {free / 1e9:.1f} of {size / 1e9:.1f} GB free"


CHECK = snapshot_check(
    "shared-memory", "shared-memory", "Shared memory is large enough", ("filesystem",), _looked
)
