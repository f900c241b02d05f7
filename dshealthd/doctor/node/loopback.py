"""TCP works on the loopback interface."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.snapshot_check import snapshot_check

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext


def _looked(context: NodeContext) -> str:
    seconds = context.series.value("loopback_connect_seconds") or 0.0
    return f"a TCP connection to 127.0.0.1 takes {seconds * 1e3:.2g} ms"


CHECK = snapshot_check(
    "loopback-refused",
    "loopback",
    "TCP works on the loopback interface",
    ("loopback",),
    _looked,
)
