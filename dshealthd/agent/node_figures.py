"""One figure per node, of what it has by GPU: what comparisons of nodes need, in a few series.

A fleet of 10,000 nodes has 80,000 series of each figure by GPU; the shipped rules and the dashboard
*Fleet* read these instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dshealthd.core.collector import Sample, gauge
from dshealthd.core.result import CollectionOutcome
from dshealthd.findings.series import Series

if TYPE_CHECKING:
    from dshealthd.core.snapshot import Snapshot

CLASS = gauge(
    "dshealthd_node_class_info",
    "1; the most common GPU model of the node, by which nodes are compared; none without GPUs. "
    "Absent while unknown.",
    "model",
)
UP = gauge("dshealthd_node_gpus_up", "GPUs of the node that answer.")
UTILIZATION = gauge("dshealthd_node_gpu_utilization_ratio", "Mean utilization of the node's GPUs.")
POWER = gauge("dshealthd_node_gpu_power_watts", "Total power of the node's GPUs that report it.")
TEMPERATURE = gauge(
    "dshealthd_node_gpu_temperature_celsius", "Core temperature of the node's hottest GPU."
)
CLOCK = gauge(
    "dshealthd_node_gpu_clock_hertz",
    "Lowest SM clock of the node's busy GPUs, ignoring GPUs at their default power limit, which "
    "is normal.",
)

NONE = "none"
"""The class of a node without GPUs."""


def samples(snapshot: Snapshot, busy: float) -> Iterator[Sample]:
    """Yield the figures of the GPUs as collected last; none for what nothing is known of.

    A GPU computes if its utilization is above `busy`.
    """
    latest = snapshot.get("gpu")
    series = Series(() if latest is None else snapshot.samples(latest))
    models = Counter(labels["name"] for labels, _ in series("gpu_info"))
    if models:
        # The first of equally many by name: a node's class must not flap.
        yield CLASS(1.0, min(models, key=lambda name: (-models[name], name)))
    elif _has_no_gpus(snapshot):
        yield CLASS(1.0, NONE)
    if up := [value for _, value in series("gpu_up")]:
        yield UP(sum(up))
    if used := {labels["gpu"]: value for labels, value in series("gpu_utilization_ratio")}:
        yield UTILIZATION(sum(used.values()) / len(used))
    if power := [value for _, value in series("gpu_power_watts")]:
        yield POWER(sum(power))
    if cores := [value for _, value in series("gpu_temperature_celsius", sensor="core")]:
        yield TEMPERATURE(max(cores))
    clocks = [
        clock
        for labels, clock in series("gpu_clock_hertz", domain="sm")
        if used.get(labels["gpu"], 0.0) > busy and not _held_by_default(series, labels["gpu"])
    ]
    if clocks:
        yield CLOCK(min(clocks))


def _has_no_gpus(snapshot: Snapshot) -> bool:
    """Return whether it is known that the node has no GPUs: not before the first sample, nor while
    the driver does not answer.
    """
    latest = snapshot.get("gpu")
    return latest is None or (
        latest.sampled is not None and latest.result.outcome is CollectionOutcome.NOT_AVAILABLE
    )


def _held_by_default(series: Series, gpu: str) -> bool:
    """Return whether a GPU is held down by its power limit, and nobody has lowered that."""
    enforced = series.value("gpu_power_limit_watts", gpu=gpu, limit="enforced")
    default = series.value("gpu_power_limit_watts", gpu=gpu, limit="default")
    held = series.value("gpu_throttle_active", gpu=gpu, reason="sw_power_cap") == 1
    return held and enforced is not None and default is not None and enforced >= default
