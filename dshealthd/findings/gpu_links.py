"""Findings about the links of this node's GPUs: NVLink, the daemons that manage it, and PCIe."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from dshealthd.findings.finding import Sign
from dshealthd.findings.past import HOUR, MINUTES_5, MINUTES_15, WEEK
from dshealthd.findings.series import (
    RECENT,
    Point,
    Series,
    by,
    each,
    each_over,
    flagged,
    logged,
    over,
)

FABRIC_COMPLETE = 3
"""nvmlGpuFabricInfo: GPU_FABRIC_STATE_COMPLETED."""
FABRIC_VERSIONS = frozenset(("5.0", "6.0"))
"""NVLink versions whose switch links need registration; on older ones state 0 is not a fault."""
_CORRECTED = "have errors that they repair"
NVLINK_ERRORS = {
    **dict.fromkeys(
        ("replay", "recovery", "link_recovery", "receive"),
        ("nvlink_errors_per_minute", 60.0, _CORRECTED),
    ),
    "crc": ("nvlink_crc_per_second", 1.0, "have CRC errors"),
}
"""Types of errors: their limit, its seconds, and words for them. Not retransmissions of NVLink 5,
which is how a link repairs what its bit error ratio allows: some a second, over all of a GPU's.
"""
GENERATION_5 = 5
PCIE, FABRIC = "DshealthdPcieDegraded", "DshealthdNvlinkFabricUnhealthy"
MANAGERS = {"nvlsm": "nvlsm, the subnet manager of NVLink,", "nv-fabricmanager": "Fabric Manager"}
"""The daemons that NVSwitches take, the one that the other waits for first."""
OFF_FABRIC = "GPUs are not registered with the NVLink fabric, or it calls them unhealthy"
DEVICE = "a PCIe device"
"""The part where the kernel's log does not name it."""
IOMMU_FAULTS = 10
"""Lines within ten minutes; a few come with a device that is reset."""
PCIE_EVENTS = {
    "pcie_slot_down": "has lost its link",
    "pcie_containment": "was cut off after an error",
    "pcie_recovery_failed": "did not recover from an error",
    "pcie_error_fatal": "has had fatal errors",
}
"""Lines of the kernel log of which one is a fault, the most telling first."""


def nvlink(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield GPUs with fewer NVLinks than they had, or whose driver reports a failed link."""
    lost = {labels["gpu"] for labels, value in series("gpu_up") if not value}
    # With MIG the links are off. They train after a boot and after a reset of the GPU.
    lost |= {gpu for (gpu,) in series.parts("gpu_mode_info", "gpu", mig="on")}
    training = _restarted(series)
    alert, name = "DshealthdNvlinkDown", "nvlinks_up"
    before = {labels["uuid"]: value for labels, value in series.peak(name, WEEK)}
    switch = by(series("nvlinks", remote="switch"), "gpu")
    here = list(series(name))
    most, others = max((value for _, value in here), default=0), by(_of_others(here), "gpu")
    for labels, value in here:
        gpu = labels["gpu"]
        # Bridges come in pairs and not between all GPUs: neighbors say little, unless all of them
        # have more links than one. To NVSwitches all GPUs have as many.
        theirs = most if switch else (others.get(gpu, 0) if value > 0 else 0)
        usual = max(before.get(labels["uuid"], 0), switch.get(gpu, 0), theirs)
        if value < usual and gpu not in lost | training and _settled(series):
            yield Sign(
                alert,
                "links are down",
                labels,
                value=value,
                limit=usual,
                limit_source="dshealthd_nvlinks" if gpu in switch else f"dshealthd_{name}",
                source=name,
            )
    # Xids stand until the GPU is reset or the node boots.
    for name, wanted in (
        ("xid_last_timestamp_seconds", {"xid": "74"}),
        ("xid_nvlink_last_timestamp_seconds", {"severity": "fatal"}),
    ):
        for labels, at in series(name, **wanted):
            if labels["gpu"] not in lost:
                yield Sign(alert, "the driver reports a failed link", labels, source=name, since=at)
    alert, name = "DshealthdGpuResetNeeded", "sxid_errors_total"
    for labels, value in series(name, severity="fatal"):
        if value > 0:
            part, reason = f"NVSwitch {labels['nvswitch']}", "a fatal error (SXid) since boot"
            yield Sign(alert, reason, part=part, hold=0.0, value=value, limit=0, source=name)


def _of_others(points: Sequence[Point]) -> Iterator[Point]:
    """Yield the only GPU of three or more that has less than the others, with what they have."""
    most = max((value for _, value in points), default=0)
    fewer = [labels for labels, value in points if value < most]
    if len(fewer) == 1 and len(points) > 2:  # noqa: PLR2004 - of two, it may be either
        yield Point(fewer[0], most)


def _settled(series: Series) -> bool:
    """Return whether NVLinks have had time to train since the node booted."""
    uptime = series.value("uptime_seconds")
    return uptime is None or uptime > series.limits.nvlink_settle_seconds


def _restarted(series: Series) -> set[str]:
    """Return the GPUs that were reset, or their driver reloaded, while NVLinks may still train.

    Both restart the energy counter.
    """
    name = "gpu_energy_joules_total"
    return {
        labels["gpu"]
        for labels, most in series.highest(name, series.limits.nvlink_settle_seconds)
        if most > (series.value(name, **labels) or 0)
    }


def nvlink_errors(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield GPUs whose NVLinks work, with errors or slowly."""
    alert, name = "DshealthdNvlinkDegraded", "gpu_nvlink_errors_total"
    for type_, (limit, per, reason) in NVLINK_ERRORS.items():
        for labels, errors in series.rise(name, MINUTES_15, type=type_):
            value = errors * per / MINUTES_15
            if value >= series.limit(limit):
                yield Sign(alert, reason, labels, value=value, limit=limit, source=name)
    name, limit = "nvlink_effective_bit_error_ratio", "nvlink_bit_error_ratio"
    reason = "have more bit errors than they can correct"
    yield from each_over(series, alert, series(name), limit, name, reason)
    name = "nvlink_speed_bytes_per_second"
    best = {labels["uuid"]: value for labels, value in series.peak(name, WEEK)}
    model = {labels["uuid"]: labels["name"] for labels, _ in series("gpu_info")}
    most: defaultdict[str | None, float] = defaultdict(float)
    for labels, value in series(name):
        of_model = model.get(labels["uuid"])
        most[of_model] = max(most[of_model], value)
    for labels, value in series.highest(name, MINUTES_5, full=True):
        usual = max(best.get(labels["uuid"], 0), most[model.get(labels["uuid"])])
        # The speed is that of active links, of which a GPU without a bridge has none.
        if 0 < value < usual and series.value(name, **labels) is not None:
            reason = "run slower than they did, or than another GPU's"
            yield Sign(alert, reason, labels, value=value, limit=usual, source=name)


def nvlink_domain(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about GPUs off the NVLink fabric or outside their domain, and about IMEX."""
    name = "nvlink_domain_info"
    now = {labels["gpu"]: _domain(labels) for labels, _ in series(name)}
    before = {labels["uuid"]: _domain(labels) for labels, _ in series.peak(name, WEEK)}
    if not _settled(series):
        return
    yield from _off_fabric(series, now or before)
    registered = {
        labels["gpu"]
        for labels, value in series("gpu_fabric_state")
        if value == FABRIC_COMPLETE and (now or labels["uuid"] in before)
    }
    most = max(Counter(now.values()).values(), default=0)
    if outside := len(registered | now.keys()) - most:
        # Compares with the node's other GPUs and with its own past: nodes of one domain may be in
        # different cliques (partitions).
        yield Sign(
            FABRIC,
            "GPUs are outside the NVLink domain or clique of the others, or that the node was in",
            apart="domain",
            mild=True,
            hold=MINUTES_5,
            value=outside,
            limit=0,
            source=name,
        )
    nodes = series.value("imex_nodes")
    for name, state in (("imex_running", "running"), ("imex_listening", "listening")):
        if nodes is not None and nodes > 1:
            reason = f"nvidia-imex, configured for several nodes, is not {state}"
            silent = flagged(series, FABRIC, name, reason, at=0.0, value=nodes)
            yield from each(silent, apart="IMEX", mild=True, hold=120.0)


def fabric_manager(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield that daemons which manage this node's NVSwitches are not running.

    Where they have not been seen running for a week and are not to start, it may be on purpose.
    """
    name = "fabric_manager_running"
    seen = {labels["daemon"] for labels, value in series.peak(name, WEEK) if value}
    running = {labels["daemon"]: value for labels, value in series(name)}
    stopped = [daemon for daemon in MANAGERS if running.get(daemon) == 0]
    if not stopped or not _settled(series):
        return
    verb = "is" if len(stopped) == 1 else "are"
    yield Sign(
        "DshealthdFabricManagerDown",
        f"{' and '.join(MANAGERS[daemon] for daemon in stopped)} {verb} not running",
        mild=seen.isdisjoint(stopped) and not series.value("fabric_manager_enabled"),
        value=0,
        source=name,
    )


def _domain(labels: Mapping[str, str]) -> str:
    return f"{labels['domain']}/{labels['clique']}"


def _off_fabric(series: Series, domains: Mapping[str, str]) -> Iterator[Sign]:
    """Yield how many GPUs are not in a healthy fabric.

    The part is the node's domain of several nodes, if it has one: it is what nodes share that lose
    their fabric at once.
    """
    sick = {labels["gpu"] for labels, value in series("gpu_fabric_healthy") if value == 0}
    wanted = {
        labels["gpu"] for labels, _ in series("nvlinks", remote="switch", version=FABRIC_VERSIONS)
    }
    sick |= {
        labels["gpu"]
        for labels, value in series("gpu_fabric_state")
        if 0 < value < FABRIC_COMPLETE or (not value and labels["gpu"] in wanted)
    }
    if sick:
        common = Counter(domains.values()).most_common(1)
        part, source = common[0][0] if common else "", "gpu_fabric_state"
        yield Sign(FABRIC, OFF_FABRIC, part=part, value=len(sick), limit=0, source=source)


def pcie(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about PCIe links that are narrow, slow under load, or have errors."""
    yield from each((*_slow_pcie(series), *_pcie_errors(series)), mild=True)
    fatal = [
        Sign(PCIE, "has had fatal errors", labels, value=value, source="pcie_errors_total")
        for labels, value in series.rise("pcie_errors_total", RECENT, type="fatal")
        if value > 0
    ]
    for event, reason in PCIE_EVENTS.items():
        fatal += logged(series, PCIE, event, part=DEVICE, reason=reason)
    # One is logged once, and what it broke stays broken.
    yield from each(fatal, apart="fatal", hold=0.0, keep=HOUR)


def _slow_pcie(series: Series) -> Iterator[Sign]:
    """Yield PCIe links of GPUs that are narrow, slow under load, or retransmit."""
    busy = {
        labels["gpu"]
        for labels, value in series("gpu_utilization_ratio")
        if value > series.limits.gpu_busy_ratio
    }
    width = "pcie_link_width"
    # A virtual machine does not see its slots: what the link had, or all other GPUs have, is usual.
    usual = by((*series.peak(width, WEEK), *_of_others(list(series(width)))), "gpu", max)
    for name, lost in (
        (width, "has lost lanes"),
        ("pcie_link_generation", "runs below its generation under load"),
    ):
        most = {labels["gpu"]: value for labels, value in series(f"{name}_max")}
        for labels, value in series(name):
            gpu = labels["gpu"]
            limit = most.get(gpu, usual.get(gpu, 0) if name == width else 0)
            # An idle GPU lowers its PCIe generation to save power, but never the width.
            if value < limit and (name == width or gpu in busy):
                yield Sign(
                    PCIE,
                    lost,
                    labels,
                    value=value,
                    limit=limit,
                    limit_source=f"dshealthd_{name}_max" if gpu in most else f"dshealthd_{name}",
                    source=name,
                )
    gen5 = {
        labels["gpu"]
        for labels, value in series("pcie_link_generation_max")
        if value >= GENERATION_5
    }
    replays = series.rise("pcie_replays_total", RECENT)
    corrected = series.rise("pcie_errors_total", RECENT, type="correctable")
    for name, reason, rises in (
        ("pcie_replays_total", "retransmits packets after errors", replays),
        ("pcie_errors_total", "counts many corrected errors", corrected),
    ):
        for labels, errors in rises:
            # A link of twice the rate may have twice as many errors.
            gen = "gen5_" if labels["gpu"] in gen5 else ""
            allowed = f"pcie_replays_{gen}per_minute"
            yield from over(series, PCIE, errors * 60 / RECENT, allowed, name, reason, labels)


def _pcie_errors(series: Series) -> Iterator[Sign]:
    """Yield errors that are not fatal, counted by GPUs at their end or in the kernel's log."""
    limit, errors = "pcie_nonfatal_errors_in_15m", "pcie_errors_total"
    rises = series.rise(errors, MINUTES_15, type="nonfatal")
    yield from each_over(series, PCIE, rises, limit, errors, "counts non-fatal errors")
    nonfatal = series.limit(limit)
    corrected = series.limit("pcie_replays_per_minute") * RECENT / 60
    for event, lines, seconds, reason in (
        ("pcie_error_nonfatal", nonfatal + 1, MINUTES_15, "has had non-fatal errors"),
        ("pcie_error_corrected", corrected + 1, RECENT, "has many corrected errors"),
        ("iommu_fault", IOMMU_FAULTS, RECENT, "accesses memory that the IOMMU does not allow it"),
    ):
        signs = logged(series, PCIE, event, part=DEVICE, at_least=lines, seconds=seconds)
        yield from each(signs, reason=reason)


RULES = (nvlink, nvlink_errors, nvlink_domain, fabric_manager, pcie)
