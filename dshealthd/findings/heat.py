"""Findings about heat: GPUs that are hot, or throttled by heat or power."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.findings.finding import Sign
from dshealthd.findings.limits import source as limit_source

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.findings.series import Series


def heat(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield GPUs that are hot or throttled, by their own limits where they report any."""
    throttle = "gpu_throttle_active"
    halved = series.parts(throttle, "gpu", "uuid", reason="hw_thermal_slowdown")
    for alert, reasons in (
        ("DshealthdGpuThermalSlowdown", ("hw_thermal_slowdown",)),
        ("DshealthdGpuSlowedByHardware", ("hw_slowdown", "hw_power_brake_slowdown")),
        ("DshealthdGpuThermallyLimited", ("sw_thermal_slowdown",)),
    ):
        for labels, value in series(throttle, reason=reasons):
            told = (
                labels["gpu"],
                labels["uuid"],
            ) in halved and alert != "DshealthdGpuThermalSlowdown"
            if value == 1 and not told:
                yield Sign(alert=alert, labels=labels, value=value, source=f"dshealthd_{throttle}")
    for sign in (*_too_hot(series), *_margins(series)):
        if (sign.labels["gpu"], sign.labels["uuid"]) not in halved:
            yield sign


def _too_hot(series: Series) -> Iterator[Sign]:
    """Compare temperatures with each GPU's own limits, or with the fleet's where it has none."""
    name = "gpu_temperature_celsius"
    limits = {
        (point.labels["gpu"], point.labels["limit"]): point.value
        for point in series("gpu_temperature_limit_celsius")
    }
    margins = {point.labels["gpu"] for point in series("gpu_temperature_margin_celsius")}
    for labels, value in series(name, sensor=("core", "memory")):
        gpu, core = labels["gpu"], labels["sensor"] == "core"
        slow = limits.get((gpu, "slowdown")) if core else None
        most = limits.get((gpu, "max_operating" if core else "memory_max"))
        own = "dshealthd_gpu_temperature_limit_celsius"
        critical, hot = (slow, own), (most, own)
        if core and slow is None:
            text = "gpu_temperature_critical_celsius"
            critical = series.limit(text), limit_source(text)
        if core and most is None and gpu not in margins:
            text = "gpu_temperature_celsius"
            hot = series.limit(text), limit_source(text)
        for alert, (limit, source), over in (
            ("DshealthdGpuTemperatureCritical", critical, value >= (critical[0] or 1e9)),
            ("DshealthdGpuHot", hot, _hotter(value, hot[0], strict=most is not None)),
        ):
            if over:
                yield Sign(
                    alert=alert,
                    labels=labels,
                    value=value,
                    limit=limit,
                    limit_source=source,
                    source=f"dshealthd_{name}",
                )
                break


def _hotter(value: float, limit: float | None, *, strict: bool) -> bool:
    """Return whether `value` is too hot. A GPU may run at its own highest operating temperature."""
    return limit is not None and (value > limit if strict else value >= limit)


def _margins(series: Series) -> Iterator[Sign]:
    """Compare the degrees left to the limit, on GPUs that report margins."""
    name = "gpu_temperature_margin_celsius"
    limits = {
        point.labels["gpu"]: point.value
        for point in series("gpu_temperature_margin_limit_celsius", limit="slowdown")
    }
    for labels, value in series(name):
        limit = limits.get(labels["gpu"])
        slow = limit is not None and value <= limit
        if slow or value <= 0:
            yield Sign(
                alert="DshealthdGpuTemperatureCritical" if slow else "DshealthdGpuHot",
                labels=labels,
                value=value,
                limit=limit if slow else 0,
                limit_source="dshealthd_gpu_temperature_margin_limit_celsius" if slow else "",
                source=f"dshealthd_{name}",
            )


RULES = (heat,)
