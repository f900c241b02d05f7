"""Faults of a node of the fleet, as its series show them, and the one alert that each leads to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from tests.symptoms.fleet.nodes import Node
from tests.symptoms.fleet.series import Series, Value


class Fault(NamedTuple):
    """What is put over a node's series, and what must come of it."""

    symptom: str
    component: str
    metric: str
    labels: Mapping[str, str]
    """Of the series that changes or is new."""
    value: float | Callable[[int], Value] = 1.0
    """Its value, or what it is so many minutes after the fault began."""


PORT = {"device": "mlx5_0", "port": "1"}
XID, TEMPERATURE = "xid_last_timestamp_seconds", "gpu_temperature_celsius"
HUNG = {"collector": "gpu", "reason": "timeout"}
PATH = {"path": "/ckpt", "reason": "timeout"}
DISK = {"disk": "nvme0n1", "operation": "write"}


def catalogue(node: Node, began: float) -> list[Fault]:
    """Return every fault, for a node at which it begins at this Unix time."""
    gpu = {"gpu": "0", "uuid": f"{node.cluster}-{node.name}-0"}
    pci = {"gpu": "0", "pci": "0000:01:00.0"}
    uncorrected = gpu | {"type": "uncorrected", "counter": "volatile"}
    hot = gpu | {"reason": "hw_thermal_slowdown"}
    members = {"peer": "elsewhere", "reason": "members"}
    error, rate = "nccl-all-reduce-failed", "infiniband_port_rate_bytes_per_second"
    return [
        Fault("gpu-lost", "gpu", "gpu_fault", gpu | {"reason": "gpu_lost"}),
        Fault("gpu-lost", "gpu", XID, pci | {"xid": "79"}, began),
        Fault("gpu-lost", "gpu", "gpus_visible", {}),
        *(
            Fault(error, "gpu", XID, pci | {"xid": xid}, began)
            for xid in ("48", "64", "95", "119", "46", "94")
        ),
        Fault(error, "gpu", "gpu_ecc_errors_total", uncorrected),
        Fault(error, "gpu", "gpu_remapped_rows_failed", gpu),
        Fault(error, "gpu", "gpu_remapped_rows_pending", gpu),
        Fault(error, "gpu", "gpu_recovery_action", gpu),
        Fault("bad-link", "gpu", "nvlinks_up", gpu, 17),
        Fault("bad-link", "gpu", XID, pci | {"xid": "74"}, began),
        Fault("bad-link", "nic", "infiniband_port_up", PORT, 0),
        Fault("bad-link", "nic", rate, PORT, 1.25e10),
        Fault("bad-link", "nic", "network_up", {"device": "eth0"}, 0),
        Fault("gpu-throttled", "gpu", "gpu_throttle_active", hot),
        Fault("gpu-throttled", "gpu", TEMPERATURE, gpu | {"sensor": "core"}, 91),
        Fault("cpu-offload-slow", "gpu", "pcie_link_width", gpu, 8),
        Fault("nvml-broken", "node", "collector_failing", HUNG),
        Fault("checkpoint-path", "path", "path_failing", PATH),
        Fault(
            "checkpoint-path",
            "node",
            "disk_request_seconds_total",
            DISK,
            lambda minute: 1e9 + 6_000.0 * minute,
        ),
        Fault("checkpoint-path", "node", "processes_stuck", {}, 3),
        Fault("disk-full", "path", "filesystem_free_bytes", {"path": "/data"}, 1e11),
        Fault("open-files", "node", "open_files", {"scope": "system"}, 8.9e6),
        Fault("host-memory-pressure", "node", "memory_available_bytes", {}, 1e10),
        Fault("loopback-refused", "node", "loopback_up", {}, 0),
        Fault("clock-unsynchronized", "node", "clock_synchronized", {}, 0),
        Fault("probes-missing", "node", "probe_peer_disagrees", members),
        Fault("agent-gone", "node", "up", {}, 0),
    ]


def inject(fault: Fault, node: Node, series: Series, start: int, minutes: int) -> None:
    """Put a fault over the series of a node, for so many minutes."""
    name = fault.metric if fault.metric == "up" else f"dshealthd_{fault.metric}"
    labels = dict(fault.labels) | node.target
    over = range(start, min(start + minutes, series.minutes))
    if name == "up":
        rows = dict(series.of(node.address, node.cluster))
        for key, values in rows.items():
            for minute in over:
                values[minute] = 0.0 if key.startswith("up{") else None
        return
    row = series.get(name, labels) or series.put(name, labels, [None] * series.minutes)
    for minute in over:
        row[minute] = fault.value(minute - start) if callable(fault.value) else fault.value
