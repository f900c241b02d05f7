"""Findings about heat: GPUs that are hot, or throttled by heat or power."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dshealthd.findings.finding import Sign
from dshealthd.findings.limits import source as limit_source
from dshealthd.findings.series import Series, by, each, keyed

THROTTLED = "DshealthdGpuThrottled"
AGAIN = 60.0
"""Seconds within which throttling comes again where it cools the GPU and then ends."""
AFTER_HEAT = 600.0
"""Seconds after throttling by heat in which the hardware's other signals are its echo."""
BY_POWER = ("hw_slowdown", "hw_power_brake_slowdown")
_THROTTLE = "gpu_throttle_active"


def heat(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield GPUs that are too hot, by their own limits where they report any; the worst first."""
    yield from _throttled(series, "is too hot: its hardware slows it down", "hw_thermal_slowdown")
    yield from _too_hot(series)
    yield from _margins(series)
    yield from _throttled(series, "is too hot: the driver lowers its clocks", "sw_thermal_slowdown")


def power(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield GPUs that are slowed down by the power brake."""
    by_heat = {labels["gpu"] for labels in _active(series, AFTER_HEAT, "hw_thermal_slowdown")}
    brake = _throttled(series, "is slowed down by the power brake, not by heat", *BY_POWER)
    yield from each((sign for sign in brake if sign.labels["gpu"] not in by_heat), apart="power")


def _active(series: Series, seconds: float, *reasons: str) -> Iterator[Mapping[str, str]]:
    """Yield the GPUs that are or were throttled for one of these reasons within some seconds."""
    for point in (
        *series(_THROTTLE, reason=reasons),
        *series.highest(_THROTTLE, seconds, reason=reasons),
    ):
        if point.value == 1:
            yield point.labels


def _throttled(series: Series, why: str, *reasons: str) -> Iterator[Sign]:
    for labels in _active(series, AGAIN, *reasons):
        yield Sign(THROTTLED, why, {"gpu": labels["gpu"]}, value=1, source=_THROTTLE)


def _too_hot(series: Series) -> Iterator[Sign]:
    """Compare temperatures with each GPU's own limits, or with the configured where it has none."""
    name = "gpu_temperature_celsius"
    limits = keyed(series("gpu_temperature_limit_celsius"), "gpu", "limit")
    margins = {labels["gpu"] for labels, _ in series("gpu_temperature_margin_celsius")}
    for labels, value in series(name, sensor=("core", "memory")):
        gpu, core = labels["gpu"], labels["sensor"] == "core"
        slow = limits.get((gpu, "slowdown")) if core else None
        most = limits.get((gpu, "max_operating" if core else "memory_max"))
        own = "dshealthd_gpu_temperature_limit_celsius"
        critical, hot = (slow, own), (most, own)
        if core and slow is None:
            critical = _configured(series, "gpu_temperature_critical_celsius")
        if core and slow is None and most is None and gpu not in margins:
            hot = _configured(series, "gpu_temperature_celsius")
        above = "above its highest operating temperature"
        for why, (limit, source), over in (
            ("at its slowdown temperature", critical, value >= (critical[0] or 1e9)),
            (above if core else f"memory {above}", hot, _hotter(value, hot[0], most is not None)),
        ):
            if over:
                yield Sign(
                    THROTTLED,
                    f"is too hot: {why}",
                    labels,
                    value=value,
                    limit=limit,
                    limit_source=source,
                    source=name,
                )
                break


def _configured(series: Series, name: str) -> tuple[float, str]:
    return series.limit(name), limit_source(name)


def _hotter(value: float, limit: float | None, strict: bool) -> bool:  # noqa: FBT001 - local
    """Return whether a temperature is too high. A GPU may run at its own highest operating one."""
    return limit is not None and (value > limit if strict else value >= limit)


def _margins(series: Series) -> Iterator[Sign]:
    """Compare the degrees left to the limit, on GPUs that report margins."""
    name = "gpu_temperature_margin_celsius"
    limits = by(series("gpu_temperature_margin_limit_celsius", limit="slowdown"), "gpu")
    for labels, value in series(name):
        limit = limits.get(labels["gpu"])
        slow = limit is not None and value <= limit
        if slow or value <= 0:
            why = "at its slowdown" if slow else "no margin left to its highest operating"
            yield Sign(
                THROTTLED,
                f"is too hot: {why} temperature",
                labels,
                value=value,
                limit=limit if slow else 0,
                limit_source="dshealthd_gpu_temperature_margin_limit_celsius" if slow else "",
                source=name,
            )


RULES = (heat, power)
