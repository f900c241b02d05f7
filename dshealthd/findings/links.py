"""Findings about the links of this node's GPUs and adapters: NVLink, PCIe, InfiniBand."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dshealthd.findings.finding import Sign
from dshealthd.findings.gpus import recent
from dshealthd.findings.limits import source as limit_source

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.findings.series import Series

FABRIC_COMPLETE = 3
"""nvmlGpuFabricInfo: GPU_FABRIC_STATE_COMPLETED."""
FABRIC_VERSIONS = frozenset(("5.0", "6.0"))
"""NVLink versions whose switch links need registration; on older ones state 0 is not a fault."""


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
    """Yield findings about PCIe links that are too narrow, or too slow while GPUs are busy."""
    busy = {
        point.labels["gpu"]
        for point in series("gpu_utilization_ratio")
        if point.value > series.limits.gpu_busy_ratio
    }
    for name in ("pcie_link_width", "pcie_link_generation"):
        most = {point.labels["gpu"]: point.value for point in series(f"{name}_max")}
        for labels, value in series(name):
            limit = most.get(labels["gpu"])
            # An idle GPU lowers its PCIe generation to save power, but never the width.
            counts = name == "pcie_link_width" or labels["gpu"] in busy
            if limit is not None and value < limit and counts:
                yield Sign(
                    alert="DshealthdPcieLinkDegraded",
                    labels=labels,
                    value=value,
                    limit=limit,
                    limit_source=f"dshealthd_{name}_max",
                    source=f"dshealthd_{name}",
                )


def infiniband(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about InfiniBand ports that went down since the agent started.

    A port that was never up may be unwired.
    """
    moved = {
        (point.labels["device"], point.labels["port"])
        for point in series("infiniband_port_transmit_bytes_total")
        if point.value > series.limits.roce_fabric_bytes
    }
    apart = series.parts("infiniband_port_info", "device", "port", link_layer="Ethernet") - moved
    apart |= series.parts("infiniband_port_physical_state", "device", "port", state="disabled")
    flapped = series.parts("infiniband_port_flaps_total", "device", "port")
    for labels, value in series("infiniband_port_up"):
        port = labels["device"], labels["port"]
        if value == 0 and port in flapped and port not in apart:
            yield Sign(
                alert="DshealthdInfinibandPortDown",
                labels=labels,
                value=value,
                source="dshealthd_infiniband_port_up",
            )


RULES = (nvlink, nvlink_domain, pcie, infiniband)
