"""Faults of a node of the fleet, as its series show them, and the one alert that each leads to."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.symptoms.fleet.nodes import Node
    from tests.symptoms.fleet.series import Series, Value


class Fault(NamedTuple):
    """What is put over a node's series, and what must come of it."""

    symptom: str
    component: str
    metric: str
    labels: Mapping[str, str]
    """Of the series that changes or is new."""
    value: Callable[[int], Value]
    """Its value so many minutes after the fault began."""


def _gpu(node: Node, **more: str) -> dict[str, str]:
    return {"gpu": "0", "uuid": f"{node.cluster}-{node.name}-0"} | more


def _pci(**more: str) -> dict[str, str]:
    return {"gpu": "0", "pci": "0000:01:00.0"} | more


def _always(value: float) -> Callable[[int], Value]:
    return lambda _: value


def catalogue(node: Node, began: float) -> list[Fault]:
    """Return every fault, for a node at which it begins at this Unix time."""
    return [
        Fault("gpu-lost", "gpu", "gpu_fault", _gpu(node, reason="gpu_lost"), _always(1)),
        Fault("gpu-lost", "gpu", "xid_last_timestamp_seconds", _pci(xid="79"), _always(began)),
        Fault("gpu-lost", "gpu", "gpus_visible", {}, _always(1)),
        *(
            Fault(
                "nccl-all-reduce-failed",
                "gpu",
                "xid_last_timestamp_seconds",
                _pci(xid=xid),
                _always(began),
            )
            for xid in ("48", "64", "95", "119", "46", "94")
        ),
        Fault(
            "nccl-all-reduce-failed",
            "gpu",
            "gpu_ecc_errors_total",
            _gpu(node, type="uncorrected", counter="volatile"),
            _always(1),
        ),
        Fault("nccl-all-reduce-failed", "gpu", "gpu_remapped_rows_failed", _gpu(node), _always(1)),
        Fault("nccl-all-reduce-failed", "gpu", "gpu_remapped_rows_pending", _gpu(node), _always(1)),
        Fault("nccl-all-reduce-failed", "gpu", "gpu_recovery_action", _gpu(node), _always(1)),
        Fault("bad-link", "gpu", "nvlinks_up", _gpu(node), _always(17)),
        Fault("bad-link", "gpu", "xid_last_timestamp_seconds", _pci(xid="74"), _always(began)),
        Fault(
            "bad-link", "nic", "infiniband_port_up", {"device": "mlx5_0", "port": "1"}, _always(0)
        ),
        Fault(
            "bad-link",
            "nic",
            "infiniband_port_rate_bytes_per_second",
            {"device": "mlx5_0", "port": "1"},
            _always(1.25e10),
        ),
        Fault("bad-link", "nic", "network_up", {"device": "eth0"}, _always(0)),
        Fault(
            "gpu-throttled",
            "gpu",
            "gpu_throttle_active",
            _gpu(node, reason="hw_thermal_slowdown"),
            _always(1),
        ),
        Fault(
            "gpu-throttled",
            "gpu",
            "gpu_temperature_celsius",
            _gpu(node, sensor="core"),
            _always(91),
        ),
        Fault("cpu-offload-slow", "gpu", "pcie_link_width", _gpu(node), _always(8)),
        Fault(
            "nvml-broken",
            "node",
            "collector_failing",
            {"collector": "gpu", "reason": "timeout"},
            _always(1),
        ),
        Fault(
            "checkpoint-path",
            "path",
            "path_failing",
            {"path": "/ckpt", "reason": "timeout"},
            _always(1),
        ),
        Fault(
            "checkpoint-path",
            "node",
            "disk_request_seconds_total",
            {"disk": "nvme0n1", "operation": "write"},
            lambda minute: 1e9 + 6_000.0 * minute,
        ),
        Fault("checkpoint-path", "node", "processes_stuck", {}, _always(3)),
        Fault("disk-full", "path", "filesystem_free_bytes", {"path": "/data"}, _always(1e11)),
        Fault("open-files", "node", "open_files", {"scope": "system"}, _always(8.9e6)),
        Fault("host-memory-pressure", "node", "memory_available_bytes", {}, _always(1e10)),
        Fault("loopback-refused", "node", "loopback_up", {}, _always(0)),
        Fault("clock-unsynchronized", "node", "clock_synchronized", {}, _always(0)),
        Fault(
            "probes-missing",
            "node",
            "probe_peer_disagrees",
            {"peer": "elsewhere", "reason": "members"},
            _always(1),
        ),
        Fault("agent-gone", "node", "up", {}, _always(0)),
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
        row[minute] = fault.value(minute - start)
