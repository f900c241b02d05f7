"""The clock is synchronized."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.snapshot_check import snapshot_check

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext


def _looked(context: NodeContext) -> str:
    offset = context.series.value("clock_offset_seconds")
    return "synchronized" if offset is None else f"synchronized, off by {offset:.3g} s"


CHECK = snapshot_check(
    "clock-unsynchronized",
    "clock",
    "The clock is synchronized",
    ("clock",),
    _looked,
)
