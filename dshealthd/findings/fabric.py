"""Findings about the ports of the fabric, their adapters and the network's interfaces."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from dshealthd.core.collector import gauge
from dshealthd.findings.finding import Sign
from dshealthd.findings.past import HOUR, MINUTES_5, MINUTES_15, WEEK
from dshealthd.findings.series import (
    RECENT,
    Series,
    by,
    each,
    each_over,
    flagged,
    logged,
    over,
    short_name,
)

if TYPE_CHECKING:
    Port = tuple[str, str]

BLIP = 30.0
"""Seconds that a port must be down to be found so (the hold), as NVSentinel and gpud have it."""
IN_JOB = 7.0
"""The same on a node with a job. NCCL gives a connection up after 30 s (NCCL_IB_RETRY_CNT 7 of
NCCL_IB_TIMEOUT 20, 4.096 µs * 2^20): 23 s of them pass with a sample (5 s), a scrape (5 s), a round
of the rules (5 s) and Alertmanager's wait for other nodes (8 s). A link that retrains takes less.
"""
DISABLED = "disabled"
DOWN = 600.0
"""Seconds for which an interface that was down remains a finding: it may go down again."""
NEVER = {
    "local_link_integrity_errors": "has local link integrity errors",
    "excessive_buffer_overrun_errors": "has buffer overruns",
    "req_rnr_retries_exceeded": "has lost a connection to a peer that was too slow to receive",
}
"""Types of errors of which a healthy port has none."""
RISING = {
    "link_error_recovery": ("infiniband_recovery_per_minute", 60.0, "has link error recoveries"),
    "port_rcv_errors": ("infiniband_receive_errors_per_second", 1.0, "has receive errors"),
    "port_xmit_discards": (
        "infiniband_discards_per_second",
        1.0,
        "discards packets, as with congestion or a wrong PFC setting",
    ),
    "roce_slow_restart": ("roce_slow_restarts_per_second", 1.0, "restarts RoCE flows slowly"),
}
"""Types of errors of which some are healthy: their limit, its seconds, and words for them."""
NDR = 5e10
"""Bytes per second from which a link may have fewer symbol errors."""
SYMBOL_ERRORS = (
    (NDR, 720.0, "infiniband_symbol_errors_in_12m"),
    (NDR, 7500.0, "infiniband_symbol_errors_in_125m"),
    (0.0, HOUR, "infiniband_symbol_errors_in_1h"),
)
"""The lowest rate, the time and the limit of its symbol errors."""
ADAPTER, DEGRADED = "DshealthdAdapterTrouble", "DshealthdNetworkPortDegraded"
AN_ADAPTER = "an adapter"
UNMANAGED = "has a link, but no subnet manager has configured it"
UNLIKE = "runs at a lower rate than most ports of its kind of board"
ADAPTER_FAILED = {
    "adapter_failure": "has failed, according to its driver",
    "adapter_command_timed_out": "does not answer its driver's commands",
}
ADAPTER_TROUBLE = {
    "adapter_overheated": ("is too hot", 1, RECENT),
    "adapter_power_insufficient": ("gets too little power from its slot", 1, RECENT),
    "module_error": ("reports an error of its cable or module", 1, RECENT),
    "module_unplugged": ("has had its cable or module unplugged", 1, RECENT),
    "transmit_timeout": ("has a transmit queue that timed out", 1, RECENT),
    # Tools cause a few on a healthy adapter.
    "adapter_command_failed": ("fails commands of its driver", 10, RECENT),
    # The ports' own findings tell of single ones.
    "link_down": ("loses its link repeatedly", 3, HOUR),
}
"""Lines of the kernel log: words for them, how many are a fault, and within how many seconds."""
PORTS = gauge("dshealthd_infiniband_ports", "Ports that the collector sees.")
LONG_DOWN = gauge(
    "dshealthd_infiniband_port_long_down", "1 if down for longer than a blip.", "device", "port"
)
"""Derived here, for their past; not exported."""


def ports(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield fabric ports and network interfaces that were in use and are down."""
    ethernet = _ethernet(series)
    interfaces = {
        _pair(labels): labels["interface"] for labels, _ in series("infiniband_port_info")
    }
    told = set()
    in_job = any(ranks for _, ranks in series("job_ranks")) or series.has("job_step")
    for port, state in _down(series).items():
        told.add(interfaces.get(port))
        # An Ethernet port that has moved no RDMA may be one for management.
        if port in ethernet:
            yield _link_down(ethernet[port] or "/".join(port), "infiniband_port_up")
            continue
        alert, name = "DshealthdFabricPortDown", "infiniband_port_up"
        hold = IN_JOB if in_job else None
        yield Sign(alert, state, part="/".join(port), value=0, source=name, hold=hold)
    used = _used_interfaces(series)
    for labels, value in series("network_up"):
        device = labels["device"]
        if not value and device in used - told and _settled(series):
            yield _link_down(device, "network_up")


def _link_down(device: str, source: str) -> Sign:
    sign = Sign(DEGRADED, "is down and was in use", part=device, value=0, source=source)
    return dataclasses.replace(sign, apart="down", hold=BLIP, keep=DOWN)


def names_in_faults(part: str) -> set[str]:
    """Return how the collector names a port (`mlx5_3/1`) that it cannot read, or its device."""
    device, _, port = part.lower().partition("/")
    return {f"infiniband {device}", f"infiniband {device} port {port}"}


def _settled(series: Series, seconds: float = 0.0) -> bool:
    """Return whether ports have had time to train, and `seconds` more, since the node booted."""
    uptime = series.value("uptime_seconds")
    return uptime is None or uptime > series.limits.port_settle_seconds + seconds


def fabric_up(series: Series) -> bool:
    """Return whether a port of InfiniBand is up, or one of RoCE that has moved RDMA."""
    return bool(series.parts("infiniband_port_up", "device", "port") - _ethernet(series).keys())


def _ethernet(series: Series) -> dict[Port, str]:
    """Return the Ethernet ports that have moved no RDMA in a week, with their interface or ""."""
    name = "infiniband_port_info"
    now = series.parts(name, "device", "port", link_layer="InfiniBand")
    moved = {
        _pair(labels)
        for labels, value in series.peak("infiniband_port_transmit_bytes_total", WEEK)
        if value > series.limits.roce_fabric_bytes
    }
    known = {
        _pair(labels): labels["interface"]
        for labels, _ in series.peak(name, WEEK, link_layer="Ethernet")
    }
    return {port: interface for port, interface in known.items() if port not in moved | now}


def _down(series: Series) -> dict[Port, str]:
    """Return the ports that are down though they were up, with their physical state.

    Not those of InfiniBand that an operator has disabled, and none while they may train after a
    boot.
    """
    used = series.parts("infiniband_port_flaps_total", "device", "port") | {
        _pair(labels) for labels, value in series.peak("infiniband_port_up", WEEK) if value
    }
    # Ethernet's drivers call every port disabled whose interface has no carrier (the kernel's
    # mlx5_query_port_roce, bnxt_re_query_port, irdma_query_port).
    ethernet = series.parts("infiniband_port_info", "device", "port", link_layer="Ethernet")
    states = {
        port: "no carrier" if (port in ethernet and state == DISABLED) else state
        for labels, value in series("infiniband_port_physical_state")
        if value and (port := _pair(labels)) and (state := labels["state"])
    }
    if not _settled(series):
        return {}
    return {
        port: states.get(port, "gone").replace("_", " ")
        for port in (_pair(labels) for labels, value in series("infiniband_port_up") if not value)
        if port in used and states.get(port) != DISABLED
    }


def _used_interfaces(series: Series) -> set[str]:
    return {
        labels["device"]
        for labels, value in series.peak("network_receive_bytes_total", WEEK)
        if value > series.limits.network_used_bytes
    }


def degraded(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield fabric ports that work, with errors, at a low rate or not all the time."""
    yield from _flapping(series)
    yield from _slow(series)
    yield from each(_never_well(series), hold=MINUTES_5)
    errors = "infiniband_port_errors_total"
    for type_, reason in NEVER.items():
        for labels, value in series.rise(errors, RECENT, type=type_):
            if value > 0:
                yield _sign(labels, reason, value)
    for type_, (limit, per, reason) in RISING.items():
        rises = series.rise(errors, RECENT, type=type_)
        yield from each_over(series, DEGRADED, rises, limit, errors, reason, divisor=RECENT / per)
    yield from _symbol_errors(series)


def _slow(series: Series) -> Iterator[Sign]:
    """Yield ports that have run at less than their best rate for five minutes, while up."""
    name, apart = "infiniband_port_rate_bytes_per_second", _ethernet(series).keys()
    down = {_pair(labels) for labels, value in series("infiniband_port_up") if not value}
    best = {_pair(labels): value for labels, value in series.peak(name, WEEK)}
    for labels, value in series.highest(name, MINUTES_5, full=True):
        limit = best[_pair(labels)]
        there = series.value(name, **labels) is not None
        if there and value < limit and _pair(labels) not in apart | down and _settled(series):
            reason = "runs at a lower rate than it did"
            yield Sign(DEGRADED, reason, labels, value=value, limit=limit, source=name)


def _never_well(series: Series) -> Iterator[Sign]:
    """Yield ports of InfiniBand that are not what the agent remembers of no port: linked, but not
    configured by a subnet manager, or slower than most others of their kind of board.

    A port without a cable, or one that a single other port exceeds, may be meant so.
    """
    if not _settled(series):
        return
    apart = series.parts("infiniband_port_info", "device", "port", link_layer="Ethernet")
    up = {
        pair: value
        for labels, value in series("infiniband_port_up")
        if (pair := _pair(labels)) not in apart
    }
    unmanaged = series.parts("infiniband_port_physical_state", "device", "port", state="link_up")
    for port in (
        unmanaged & {port for port, value in up.items() if not value} - _down(series).keys()
    ):
        yield Sign(DEGRADED, UNMANAGED, part="/".join(port), value=0, source="infiniband_port_up")
    name = "infiniband_port_rate_bytes_per_second"
    rates = {pair: rate for labels, rate in series(name) if up.get(pair := _pair(labels))}
    boards = {labels["device"]: labels["board"] for labels, _ in series("infiniband_device_info")}
    best = {_pair(labels): value for labels, value in series.peak(name, WEEK)}
    for port, rate in rates.items():
        board = boards.get(port[0])  # of an unknown kind, no other is known to be like it
        alike = [
            other for (device, _), other in rates.items() if board and boards.get(device) == board
        ]
        faster = [other for other in alike if other > rate]
        # One that was faster itself is found for that.
        if 1 < len(faster) > (len(alike) - 1) / 2 and best.get(port, rate) <= rate:
            part, limit = "/".join(port), min(faster)
            yield Sign(DEGRADED, UNLIKE, part=part, value=rate, limit=limit, source=name)


def _pair(labels: Mapping[str, str]) -> Port:
    return labels["device"], labels["port"]


def _sign(labels: Mapping[str, str], reason: str, value: float) -> Sign:
    return Sign(DEGRADED, reason, labels, value=value, source="infiniband_port_errors_total")


def _flapping(series: Series) -> Iterator[Sign]:
    """Yield ports that go down again and again, and those that were down for a moment.

    One that is down, or was for longer than a blip, is found as down.
    """
    errors = "infiniband_port_errors_total"
    for labels, value in series.rise(errors, 3 * HOUR, type="link_downed"):
        if value > series.limits.link_downed_in_3h:
            yield _sign(labels, "goes down again and again", value)
    for labels, value in series.rise("infiniband_port_flaps_total", 12 * HOUR):
        if value >= series.limits.infiniband_flaps_in_12h:
            yield _sign(labels, "goes down again and again", value)
    series.add(
        LONG_DOWN(float(not value), *_pair(labels))
        for labels, value in series.highest("infiniband_port_up", BLIP, full=True)
    )
    name = short_name(LONG_DOWN)
    found = {_pair(labels) for labels, value in series.highest(name, MINUTES_15) if value}
    found |= {_pair(labels) for labels, value in series("infiniband_port_up") if not value}
    for labels, value in series.rise(errors, RECENT, type="link_downed"):
        if value > 0 and _pair(labels) not in found and _settled(series, RECENT):
            yield _sign(labels, "was down for a moment; a job there may have ended or hung", value)


def _symbol_errors(series: Series) -> Iterator[Sign]:
    """Yield ports with more symbol errors than a link of their rate may have.

    Links have many while they train: after a boot, or when they come up again.
    """
    name = "infiniband_port_errors_total"
    reason = "has more symbol errors than its cable should cause"
    rates = {_pair(labels): v for labels, v in series("infiniband_port_rate_bytes_per_second")}
    for least, seconds, limit in SYMBOL_ERRORS:
        up = {_pair(labels) for labels, v in series.lowest("infiniband_port_up", seconds) if v}
        for labels, value in series.rise(name, seconds, type="symbol_error"):
            port = _pair(labels)
            of_rate = (rates.get(port, -1.0) >= NDR) == (least == NDR) and port in rates
            if of_rate and port in up and _settled(series, seconds):
                yield from over(series, DEGRADED, value, limit, name, reason, labels)


def adapters(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about adapters, from the kernel's log, and about ports that are missing."""
    for event, reason in ADAPTER_FAILED.items():
        # A line is logged once; the adapter stays broken until its driver or firmware is restarted.
        lines = logged(series, ADAPTER, event, part=AN_ADAPTER, reason=reason)
        yield from each(lines, apart="failed", keep=HOUR)
    for event, (reason, least, seconds) in ADAPTER_TROUBLE.items():
        lines = logged(series, ADAPTER, event, part=AN_ADAPTER, at_least=least, seconds=seconds)
        yield from each(lines, reason=reason, mild=True, hold=120.0)
    yield from each(_missing_ports(series), mild=True, hold=120.0)


def _missing_ports(series: Series) -> Iterator[Sign]:
    """Yield that the node has fewer ports than it had within the last week."""
    there = sum(
        len(list(points))
        for points in (
            series("infiniband_port_up"),
            series("infiniband_port_state", state="elsewhere"),
        )
    )
    if there:
        series.add([PORTS(there)])
    before = list(series.highest(short_name(PORTS), WEEK))
    collector = "infiniband"
    works = series.value("collector_up", collector=collector) == 1
    if not works and (there or series.value("collector_available", collector=collector) != 0):
        return  # it fails or is switched off: ports that it does not see may be there
    name = "infiniband_port_up"
    reason = "of InfiniBand or RoCE are fewer than within the last week"
    for _, most in before:
        if there < most:
            yield Sign(ADAPTER, reason, part="ports", value=most - there, limit=0, source=name)


def network(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield network interfaces in use that are slower than they were, flap or have errors."""
    yield from each(_interfaces(series), hold=MINUTES_5)


def _interfaces(series: Series) -> Iterator[Sign]:
    name = "network_speed_bytes_per_second"
    used = _used_interfaces(series)
    best = {labels["device"]: value for labels, value in series.peak(name, WEEK)}
    for labels, value in series(name):
        device = labels["device"]
        if device in used and value < (most := best.get(device, 0.0)):
            reason = "has negotiated a lower speed than it had"
            yield Sign(DEGRADED, reason, part=device, value=value, limit=most, source=name)
    name, limit = "network_carrier_changes_total", "link_downed_in_3h"
    uptime, reason = series.value("uptime_seconds"), "loses its carrier again and again"
    booted = uptime is not None and uptime <= 3 * HOUR
    for labels, changes in series.rise(name, 3 * HOUR):
        device = labels["device"]
        if device in used and not booted:
            yield from over(series, DEGRADED, changes / 2, limit, name, reason, part=device)
    name, limit = "network_receive_errors_total", "network_errors_per_second"
    sent = series.rise("network_transmit_errors_total", RECENT)
    for device, value in by((*series.rise(name, RECENT), *sent), "device").items():
        yield from over(
            series, DEGRADED, value / RECENT, limit, name, "has bad packets", part=device
        )


def gpu_direct(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield what keeps adapters from GPU memory, on nodes whose fabric is up."""
    if not fabric_up(series):
        return
    alert, name = "DshealthdGpuDirectOff", "gpu_direct_peer_memory"
    reason = "nvidia_peermem is not loaded, and driver or kernel have no DMA-BUF"
    yield from flagged(series, alert, name, reason, at=0.0, value=0.0)
    name = "gpu_direct_translated_gpus"
    if translated := series.value(name):
        reason = "an IOMMU translates the addresses of GPUs"
        yield Sign(alert, reason, apart="IOMMU", value=translated, limit=0, source=name)


RULES = (ports, degraded, adapters, network, gpu_direct)
