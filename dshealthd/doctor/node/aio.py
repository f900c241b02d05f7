"""Asynchronous I/O requests are available for NVMe offload."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.snapshot_check import snapshot_check

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext


def _looked(context: NodeContext) -> str:
    used = context.series.value("aio_requests") or 0
    limit = context.series.value("aio_requests_limit") or 0
    return f"{used:g} of {limit:g} asynchronous I/O requests in use (fs.aio-max-nr)"


CHECK = snapshot_check(
    "nvme-offload",
    "aio-requests",
    "Asynchronous I/O requests are available for NVMe offload",
    ("kernel",),
    _looked,
)
