"""Probes run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.snapshot_check import snapshot_check

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext


def _looked(context: NodeContext) -> str:
    up = context.series.value("probe_up")
    return "no probes are configured" if up is None else "probes run"


CHECK = snapshot_check(
    "probes-missing",
    "probe-rounds",
    "Probes run",
    (),
    _looked,
)
