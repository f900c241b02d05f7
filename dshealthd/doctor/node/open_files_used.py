"""Open files are below their limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.snapshot_check import snapshot_check

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext


def _looked(context: NodeContext) -> str:
    used = context.series.value("open_files", scope="system") or 0
    limit = context.series.value("open_files_limit", scope="system") or 0
    return f"{used:g} of {limit:g} files open system-wide; no process is near its limit"


CHECK = snapshot_check(
    "open-files",
    "open-files",
    "Open files are below their limits",
    ("open_files",),
    _looked,
)
