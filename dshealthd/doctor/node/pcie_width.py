"""PCIe links have their full width."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.snapshot_check import snapshot_check

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext


def _looked(context: NodeContext) -> str:
    widths = sorted({int(point.value) for point in context.series("pcie_link_width")})
    return (
        f"all GPUs have their full width: {', '.join(f'x{width}' for width in widths)}"
        if widths
        else "no GPU"
    )


CHECK = snapshot_check(
    "cpu-offload-slow",
    "pcie",
    "PCIe links have their full width",
    ("pcie",),
    _looked,
)
