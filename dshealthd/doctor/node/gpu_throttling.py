"""GPUs are neither hot nor throttled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.check import Outcome, Result
from dshealthd.doctor.snapshot_check import snapshot_check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.node_context import NodeContext


def _more(context: NodeContext) -> Iterator[Result]:
    """Yield the GPUs that do not report whether heat or power throttles them."""
    telling = {(point.labels["gpu"],) for point in context.series("gpu_throttle_active")}
    for (gpu,) in sorted(context.series.parts("gpu_up", "gpu") - telling):
        yield Result(
            Outcome.UNKNOWN,
            f"GPU {gpu} does not report whether it is throttled",
            remedy=f"nvidia-smi -i {gpu} -q -d PERFORMANCE,TEMPERATURE",
            component=f"gpu {gpu}",
        )


def _looked(context: NodeContext) -> str:
    hottest = max(
        (point.value for point in context.series("gpu_temperature_celsius", sensor="core")),
        default=None,
    )
    if not context.series.parts("gpu_up", "gpu"):
        return "no GPU"
    degrees = "none reports its temperature" if hottest is None else f"hottest: {hottest:g} °C"
    return f"no GPU is throttled; {degrees}"


CHECK = snapshot_check(
    "gpu-throttled",
    "gpu-throttling",
    "GPUs are neither hot nor throttled",
    ("gpu",),
    _looked,
    _more,
)
