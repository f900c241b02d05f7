"""Findings about GPUs, from NVML and the driver's log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.findings.finding import Sign
from dshealthd.findings.limits import source as limit_source

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dshealthd.findings.series import Series

HUNG = frozenset(("timeout", "stuck", "crashed"))
"""Reasons that mean a call did not return."""
XIDS_APPLICATION = frozenset(("13", "31", "43", "45", "68", "69", "141"))
"""Xids that an application causes, or that can be ignored, according to NVIDIA's catalogue."""
XIDS_MEMORY = frozenset(("48", "95"))
XIDS_EXCHANGE = frozenset(("64",))
XIDS_RESET = frozenset(("46", "62", "109", "110", "119", "120", "136", "140", "143", "158"))
XIDS_NVLINK = frozenset(("144", "145", "146", "147", "148", "149", "150"))
"""For these the log line gives the severity; 74 is always fatal to the link."""
_XID = "xid_last_timestamp_seconds"
NVML = ("gpu", "ecc", "nvlink", "nvlink_domain", "pcie", "mig", "gpu_processes", "gpm")
"""Collectors that call NVML."""


def recent(
    series: Series, xids: frozenset[str], wall: float
) -> Iterator[tuple[Mapping[str, str], float]]:
    """Yield the GPUs' Xids that are recent at Unix time `wall`, and when each was last logged."""
    for labels, at in series(_XID, xid=xids):
        if at > wall - series.limits.xid_recent_seconds:
            yield labels, at


def off_bus(series: Series, wall: float) -> Iterator[tuple[Mapping[str, str], float]]:
    """Yield GPUs off the bus (Xid 79) at Unix time `wall`, and when each Xid was logged.

    An Xid counts for ten minutes whatever NVML says. After that it counts for as long as a GPU is
    missing or has a fault, but not against a GPU that NVML reads again.
    """
    down, well = series.parts("gpu_fault", "gpu"), _well(series)
    expected, visible = series.value("gpus_expected"), series.value("gpus_visible")
    fewer = expected is not None and visible is not None and visible < expected
    for labels, at in series(_XID, xid="79"):
        recently = at > wall - series.limits.xid_recent_seconds
        if recently or ((fewer or (labels["gpu"],) in down) and labels["gpu"] not in well):
            yield labels, at


def _well(series: Series) -> set[str]:
    """Return the GPUs that NVML reads without an error."""
    read = {point.labels["gpu"] for point in series("gpu_up") if point.value}
    return read - {gpu for (gpu,) in series.parts("gpu_fault", "gpu")}


def _logged(series: Series, alert: str, xids: frozenset[str], wall: float) -> Iterator[Sign]:
    for labels, at in recent(series, xids, wall):
        yield Sign(alert=alert, labels=labels, source=f"dshealthd_{_XID}", since=at)


def inforom(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings for GPUs whose infoROM is corrupted."""
    name = "gpu_inforom_valid"
    for labels, value in series(name):
        if value == 0:
            yield Sign(
                alert="DshealthdGpuInforomCorrupted",
                labels=labels,
                value=value,
                source=f"dshealthd_{name}",
            )


def _flags(series: Series, alert: str, *names: str) -> Iterator[Sign]:
    """Yield a sign for each series of these GPU metrics that is 1."""
    for name in names:
        for labels, value in series(name):
            if value == 1:
                yield Sign(alert=alert, labels=labels, value=value, source=f"dshealthd_{name}")


def gpus(series: Series, wall: float) -> Iterator[Sign]:
    """Yield findings for GPUs that are lost, missing or unreadable."""
    expected, visible = series.value("gpus_expected"), series.value("gpus_visible")
    fewer = expected is not None and visible is not None and visible < expected
    well = _well(series)
    for labels, value in series("gpu_fault"):
        lost = labels["reason"] == "gpu_lost" or (labels["reason"] == "not_found" and not fewer)
        if value and lost:
            yield Sign(alert="DshealthdGpuLost", labels=labels, source="dshealthd_gpu_fault")
    for labels, at in off_bus(series, wall):
        yield Sign(alert="DshealthdGpuLost", labels=labels, source=f"dshealthd_{_XID}", since=at)
    fallen = {labels["gpu"] for labels, _ in series(_XID, xid="79")} - well
    fallen |= {labels["gpu"] for labels, _ in recent(series, frozenset(("79",)), wall)}
    unread = {point.labels["gpu"] for point in series("gpu_up") if not point.value}
    for labels, value in series("gpu_fault"):
        other = labels["reason"] not in HUNG | {"gpu_lost", "not_found"}
        if value and other and labels["gpu"] in unread - fallen:
            yield Sign(alert="DshealthdGpuUnreadable", labels=labels, source="dshealthd_gpu_fault")
    lost = any(series("gpu_fault", reason="gpu_lost"))
    if fewer and expected is not None and visible is not None and not lost and not fallen:
        yield Sign(
            alert="DshealthdGpuMissing",
            value=expected - visible,
            limit=0,
            limit_source="dshealthd_gpus_expected",
            source="dshealthd_gpus_visible",
        )


def memory(series: Series, wall: float) -> Iterator[Sign]:
    """Yield findings for GPU memory errors, and for GPUs that the driver wants reset."""
    failed = series.parts("gpu_remapped_rows_failed", "gpu")
    failed |= series.parts("gpu_memory_unrepairable", "gpu")
    uncorrected = set()
    name = "gpu_ecc_errors_total"
    for labels, value in series(name, type="uncorrected", counter="volatile"):
        if value > 0:
            uncorrected.add((labels["gpu"],))
            if (labels["gpu"],) not in failed:
                yield Sign(
                    alert="DshealthdGpuMemoryErrorUncorrected",
                    labels=labels,
                    value=value,
                    limit=0,
                    source=f"dshealthd_{name}",
                )
    for sign in _logged(series, "DshealthdGpuMemoryErrorUncorrected", XIDS_MEMORY, wall):
        if (sign.labels["gpu"],) not in failed:
            yield sign
    yield from _flags(
        series,
        "DshealthdGpuRowRemapFailed",
        "gpu_remapped_rows_failed",
        "gpu_memory_unrepairable",
    )
    yield from _logged(series, "DshealthdGpuRowRemapFailed", XIDS_EXCHANGE, wall)
    yield from _flags(series, "DshealthdGpuSramWornOut", "gpu_sram_threshold_exceeded")
    broken = failed | uncorrected
    pending = [
        *_flags(
            series,
            "DshealthdGpuRowRemapPending",
            "gpu_remapped_rows_pending",
            "gpu_retired_pages_pending",
            "gpu_repair_pending",
        ),
        *_logged(series, "DshealthdGpuRowRemapPending", frozenset(("63",)), wall),
    ]
    yield from (sign for sign in pending if (sign.labels["gpu"],) not in broken)
    yield from _reset(series, wall, broken)
    worn = series.parts("gpu_sram_threshold_exceeded", "gpu")
    name, limit = "gpu_ecc_location_errors_total", "sram_uncorrected_aggregate"
    for labels, value in series(name, location="sram", type="uncorrected", counter="aggregate"):
        if value > series.limit(limit) and (labels["gpu"],) not in worn:
            yield Sign(
                alert="DshealthdGpuSramErrors",
                labels=labels,
                value=value,
                limit=series.limit(limit),
                limit_source=limit_source(limit),
                source=f"dshealthd_{name}",
            )


def _reset(series: Series, wall: float, broken: set[tuple[str, ...]]) -> Iterator[Sign]:
    """Yield GPUs that need a reset, unless they have a worse finding, and unclassified Xids."""
    worse = frozenset(("48", "64", "74", "79", "95")) | XIDS_NVLINK
    known = {(labels["gpu"],) for labels, _ in recent(series, worse, wall)} | broken
    known |= {(point.labels["gpu"],) for point in series("gpu_up") if not point.value}
    wanted = [
        Sign(
            alert="DshealthdGpuResetNeeded",
            labels=labels,
            value=value,
            limit=0,
            source="dshealthd_gpu_recovery_action",
        )
        for labels, value in series("gpu_recovery_action")
        if value > 0
    ]
    wanted += _logged(series, "DshealthdGpuResetNeeded", XIDS_RESET, wall)
    asked: dict[str, tuple[float, str]] = {}
    for labels, at in series("xid_recovery_action_last_timestamp_seconds"):
        entry = at, labels["action"]
        asked[labels["pci"]] = max(asked.get(labels["pci"], entry), entry)
    wanted += [
        sign
        for sign in _logged(series, "DshealthdGpuResetNeeded", frozenset(("154",)), wall)
        if asked.get(sign.labels["pci"], (0.0, "none"))[1] != "none"
    ]
    yield from (sign for sign in wanted if (sign.labels["gpu"],) not in known)
    told = XIDS_APPLICATION | XIDS_MEMORY | XIDS_EXCHANGE | XIDS_RESET | {"63", "74", "79", "154"}
    fatal = {
        point.labels["pci"]: point.value
        for point in series("xid_nvlink_last_timestamp_seconds", severity="fatal")
    }
    for labels, at in series(_XID):
        new = at > wall - series.limits.xid_recent_seconds and labels["xid"] not in told
        link = labels["xid"] in XIDS_NVLINK and at <= fatal.get(labels["pci"], 0.0)
        if new and not link:
            yield Sign(
                alert="DshealthdGpuErrorLogged",
                labels=labels,
                source=f"dshealthd_{_XID}",
                since=at,
            )


def driver(series: Series, wall: float) -> Iterator[Sign]:
    """Yield findings for NVML that hangs or cannot be loaded, and for unmonitored GPUs."""
    hung = [*series("collector_failing", collector=NVML, reason=HUNG)]
    hung += [point for point in series("worker_stuck", worker="device") if point.value > 0]
    if hung and not any(off_bus(series, wall)):
        yield Sign(alert="DshealthdNvmlHung", source="dshealthd_collector_failing")
    up = series.value("collector_up", collector="gpu")
    for labels, _ in series("collector_failing", collector="gpu"):
        other = labels["reason"] not in HUNG | {"waiting", "expired", "internal"}
        if other and up == 0 and not any(series("gpu_up")):
            yield Sign(
                alert="DshealthdNvmlFailing", labels=labels, source="dshealthd_collector_failing"
            )
    expected = series.value("gpus_expected")
    if not expected:
        return
    available = series.value("collector_available", collector="gpu")
    if available == 0:
        yield Sign(alert="DshealthdGpusReleased", value=expected, source="dshealthd_gpus_expected")
    elif not any(series("gpu_up")) and not any(series("collector_failing", collector="gpu")):
        yield Sign(
            alert="DshealthdGpuMetricsGone", value=expected, source="dshealthd_gpus_expected"
        )


RULES = (gpus, memory, inforom, driver)
