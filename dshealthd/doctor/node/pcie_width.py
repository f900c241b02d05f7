"""PCIe links have their full width."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.check import Outcome, Result
from dshealthd.doctor.snapshot_check import snapshot_check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.node_context import NodeContext


def _more(context: NodeContext) -> Iterator[Result]:
    """Yield the GPUs whose PCIe link width is unknown."""
    series = context.series
    wide, possible = (
        {(point.labels["gpu"],) for point in series(name)}
        for name in ("pcie_link_width", "pcie_link_width_max")
    )
    for (gpu,) in sorted(series.parts("gpu_up", "gpu") - (wide & possible)):
        yield Result(
            Outcome.UNKNOWN,
            f"GPU {gpu} does not report its PCIe link width",
            remedy=f"nvidia-smi -i {gpu} -q | grep -A 8 'GPU Link Info'",
            component=f"gpu {gpu}",
        )


def _looked(context: NodeContext) -> str:
    widths = sorted({int(point.value) for point in context.series("pcie_link_width")})
    return (
        f"all GPUs have their full PCIe width: {', '.join(f'x{width}' for width in widths)}"
        if widths
        else "no GPU"
    )


CHECK = snapshot_check(
    "cpu-offload-slow",
    "pcie",
    "PCIe links have their full width",
    ("pcie",),
    _looked,
    _more,
)
