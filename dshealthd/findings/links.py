"""Findings about the links of this node's GPUs: NVLink and PCIe."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dshealthd.findings.finding import Sign
from dshealthd.findings.gpus import recent
from dshealthd.findings.host import RECENT, logged, over
from dshealthd.findings.limits import source as limit_source

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.findings.series import Series

FABRIC_COMPLETE = 3
"""nvmlGpuFabricInfo: GPU_FABRIC_STATE_COMPLETED."""
FABRIC_VERSIONS = frozenset(("5.0", "6.0"))
"""NVLink versions whose switch links need registration; on older ones state 0 is not a fault."""

GENERATION_5 = 5
DEVICE = "a PCIe device"
"""The part where the kernel's log names it and its events do not."""
IOMMU_FAULTS = 10
"""Lines within ten minutes; a few come with a device that is reset."""
PCIE_EVENTS = {
    "pcie_slot_down": "the kernel lost the link of a slot",
    "pcie_containment": "the kernel cut off a port after an error",
    "pcie_recovery_failed": "a device did not recover from an error",
    "pcie_error_uncorrected": "the kernel logged uncorrected errors",
}
"""Lines of the kernel log of which one is a fault, the most telling first."""


def nvlink(series: Series, wall: float) -> Iterator[Sign]:
    """Yield findings about GPUs with fewer NVLinks than usual here, and links with errors."""
    down = {point.labels["gpu"] for point in series("gpu_up") if not point.value}
    uptime = series.value("uptime_seconds")
    settled = uptime is not None and uptime > series.limits.nvlink_settle_seconds
    up = {point.labels["gpu"]: point for point in series("nvlinks_up")}
    most = max((point.value for point in up.values()), default=0)
    switch = {point.labels["gpu"]: point.value for point in series("nvlinks", remote="switch")}
    for gpu, (labels, value) in up.items():
        # A GPU without links is not compared with its neighbours: it may not be bridged.
        usual = max(switch.get(gpu, 0), most if value > 0 else 0)
        if settled and value < usual and gpu not in down:
            yield Sign(
                alert="DshealthdNvlinkFault",
                labels=labels,
                value=value,
                limit=usual,
                limit_source="dshealthd_nvlinks" if gpu in switch else "dshealthd_nvlinks_up",
                source="dshealthd_nvlinks_up",
            )
    since = wall - series.limits.xid_recent_seconds
    fatal = (
        (point.labels, point.value)
        for point in series("xid_nvlink_last_timestamp_seconds", severity="fatal")
        if point.value > since
    )
    for labels, at in (*recent(series, frozenset(("74",)), wall), *fatal):
        if labels["gpu"] not in down:
            yield Sign(
                alert="DshealthdNvlinkFault",
                labels=labels,
                source="dshealthd_xid_last_timestamp_seconds",
                since=at,
            )
    sick = {point.labels["gpu"] for point in series("gpu_fabric_healthy") if point.value == 0}
    wanted = {
        point.labels["gpu"] for point in series("nvlinks", remote="switch", version=FABRIC_VERSIONS)
    }
    sick |= {
        point.labels["gpu"]
        for point in series("gpu_fabric_state")
        if 0 < point.value < FABRIC_COMPLETE or (not point.value and point.labels["gpu"] in wanted)
    }
    if sick and settled:
        yield Sign(
            alert="DshealthdNvlinkFabricUnhealthy",
            value=len(sick),
            limit=0,
            source="dshealthd_gpu_fabric_state",
        )
    name, limit = "nvlink_effective_bit_error_ratio", "nvlink_bit_error_ratio"
    for labels, value in series(name):
        if value > series.limit(limit):
            yield Sign(
                alert="DshealthdNvlinkBitErrors",
                labels=labels,
                value=value,
                limit=series.limit(limit),
                limit_source=limit_source(limit),
                source=f"dshealthd_{name}",
            )
    for labels, value in series("sxid_errors_total", severity="fatal"):
        if value > 0:
            yield Sign(
                alert="DshealthdNvswitchError",
                labels=labels,
                value=value,
                limit=0,
                source="dshealthd_sxid_errors_total",
            )


def nvlink_domain(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about GPUs outside the node's NVLink domain, and IMEX that is down."""
    uptime = series.value("uptime_seconds")
    if uptime is None or uptime <= series.limits.nvlink_settle_seconds:
        return
    cliques = {
        point.labels["gpu"]: (point.labels["domain"], point.labels["clique"])
        for point in series("nvlink_domain_info")
    }
    if not cliques:
        return
    registered = {
        point.labels["gpu"]
        for point in series("gpu_fabric_state")
        if point.value == FABRIC_COMPLETE
    }
    _, most = Counter(cliques.values()).most_common(1)[0]
    if outside := len(registered | cliques.keys()) - most:
        yield Sign(
            alert="DshealthdNvlinkDomainMismatch",
            value=outside,
            limit=0,
            source="dshealthd_nvlink_domain_info",
        )
    nodes = series.value("imex_nodes")
    for name in ("imex_running", "imex_listening"):
        if nodes is not None and nodes > 1 and series.value(name) == 0:
            yield Sign(alert="DshealthdImexDown", value=0, source=f"dshealthd_{name}")


def pcie(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about PCIe links that are narrow, slow under load, or have errors."""
    busy = {
        point.labels["gpu"]
        for point in series("gpu_utilization_ratio")
        if point.value > series.limits.gpu_busy_ratio
    }
    for name, lost in (
        ("pcie_link_width", "has lost lanes"),
        ("pcie_link_generation", "runs below its generation under load"),
    ):
        most = {point.labels["gpu"]: point.value for point in series(f"{name}_max")}
        for labels, value in series(name):
            limit = most.get(labels["gpu"])
            # An idle GPU lowers its PCIe generation to save power, but never the width.
            counts = name == "pcie_link_width" or labels["gpu"] in busy
            if limit is not None and value < limit and counts:
                yield Sign(
                    alert="DshealthdPcieDegraded",
                    labels={**labels, "reason": lost},
                    value=value,
                    limit=limit,
                    limit_source=f"dshealthd_{name}_max",
                    source=f"dshealthd_{name}",
                )
    gen5 = {
        point.labels["gpu"]
        for point in series("pcie_link_generation_max")
        if point.value >= GENERATION_5
    }
    for labels, replays in series.rise("pcie_replays_total", RECENT):
        # A link of twice the rate may have twice as many errors.
        allowed = (
            "pcie_replays_gen5_per_minute" if labels["gpu"] in gen5 else "pcie_replays_per_minute"
        )
        yield from over(
            series,
            "DshealthdPcieDegraded",
            replays * 60 / RECENT,
            allowed,
            "pcie_replays_total",
            {**labels, "reason": "retransmits packets after errors"},
        )
    yield from _pcie_errors(series)


def _pcie_errors(series: Series) -> Iterator[Sign]:
    """Yield errors that GPUs count at their end of the link, and those in the kernel's log."""
    errors, hour = "pcie_errors_total", "pcie_corrected_errors_per_hour"
    for labels, value in series.rise(errors, RECENT, type="fatal"):
        if value > 0:
            yield Sign(
                alert="DshealthdPcieErrors",
                labels={**labels, "reason": "fatal errors"},
                value=value,
                source=f"dshealthd_{errors}",
            )
    for type_, seconds, limit, reason in (
        ("nonfatal", 900.0, "pcie_nonfatal_errors_in_15m", "counts non-fatal errors"),
        ("correctable", 3600.0, hour, "counts many corrected errors"),
    ):
        for labels, value in series.rise(errors, seconds, type=type_):
            yield from over(
                series,
                "DshealthdPcieDegraded",
                value,
                limit,
                errors,
                {**labels, "reason": reason},
            )
    for event, reason in PCIE_EVENTS.items():
        yield from logged(series, "DshealthdPcieErrors", event, part=DEVICE, reason=reason)
    yield from logged(
        series,
        "DshealthdPcieDegraded",
        "pcie_error_corrected",
        at_least=series.limit(hour) + 1,
        seconds=3600.0,
        part=DEVICE,
        reason="has many corrected errors",
    )
    yield from logged(
        series,
        "DshealthdPcieDegraded",
        "iommu_fault",
        at_least=IOMMU_FAULTS,
        part=DEVICE,
        reason="accesses memory that the IOMMU does not allow it",
    )


RULES = (nvlink, nvlink_domain, pcie)
