"""The facts of a node that must be the same on all nodes of a job, as text by name."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dshealthd.doctor.node_context import NodeContext

_VERSIONS = ("driver", "cuda", "nvml")


def facts(context: NodeContext) -> dict[str, str]:
    """Return the known facts of this node."""
    series = context.series
    found = {}
    if not context.elsewhere:
        found = {"kernel": os.uname().release, "architecture": os.uname().machine}
    for point in series("gpu_driver_info"):
        found |= {f"gpu {name}": point.labels.get(name, "unknown") for name in _VERSIONS}
    if (visible := series.value("gpus_visible")) is not None:
        found["gpus"] = f"{visible:g}"
        found["gpu models"] = _joined(
            point.labels.get("name", "unknown") for point in series("gpu_info")
        )
    if (links := [point.value for point in series("nvlinks_up")]) and sum(links):
        found["nvlinks up"] = f"{sum(links):g}"
    ports = list(series("infiniband_port_up"))
    if ports:
        found["infiniband ports up"] = f"{sum(point.value for point in ports):g}"
        found["infiniband rates"] = _joined(
            f"{point.value * 8e-9:g} Gb/s"
            for point in series("infiniband_port_rate_bytes_per_second")
        )
        found["infiniband firmware"] = _joined(
            point.labels.get("firmware", "unknown") for point in series("infiniband_device_info")
        )
    for labels, value in series("sysctl_value"):
        found[f"sysctl {labels.get('sysctl', 'unknown')}"] = f"{value:g}"
    for labels, _ in series("software_info", training_job=""):
        name = " of ".join(filter(None, map(labels.get, ("component", "environment"))))
        found["kernel" if name == "kernel" else f"version of {name}"] = labels.get(
            "version", "unknown"
        )
    size = series.value("filesystem_size_bytes", path="/dev/shm")  # noqa: S108 - shared memory
    if size is not None:
        found["shared memory"] = f"{size / (1 << 30):.0f} GiB"
    return found


def _joined(values: Iterable[str]) -> str:
    return ", ".join(sorted(set(values)))
