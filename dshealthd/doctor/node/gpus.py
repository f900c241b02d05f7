"""Every GPU on the PCI bus responds to NVML."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.check import Outcome, Result
from dshealthd.doctor.snapshot_check import snapshot_check
from dshealthd.plural import plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.node_context import NodeContext


def _more(context: NodeContext) -> Iterator[Result]:
    """Yield the GPUs on the PCI bus that cannot be queried because there is no NVML."""
    expected = context.series.value("gpus_expected")
    if expected and context.series.value("gpus_visible") is None:
        yield Result(
            Outcome.UNKNOWN,
            f"{plural(expected, 'NVIDIA GPU')} on the PCI bus, but no NVML to query them",
            remedy="nvidia-smi; dmesg | grep -i nvrm",
        )


def _looked(context: NodeContext) -> str:
    series = context.series
    visible = series.value("gpus_visible")
    if visible is None:
        return "no NVIDIA GPU on the PCI bus"
    names = sorted({point.labels["name"] for point in series("gpu_info")})
    expected = series.value("gpus_expected")
    bus = "" if expected is None else f", {expected:g} on the PCI bus"
    return f"{plural(visible, 'GPU')} in NVML{bus}: {', '.join(names)}"


CHECK = snapshot_check(
    "gpu-lost", "gpus", "Every GPU responds", ("gpu_bus", "gpu", "mig"), _looked, _more
)
