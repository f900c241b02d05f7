"""What the judge remembers of this node's GPUs: resets, returns to the bus, and how many there
were.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dshealthd.core.collector import gauge

if TYPE_CHECKING:
    from dshealthd.findings.series import Point, Series

BEFORE = gauge("dshealthd_gpus_before", "Most GPUs that this node has had on its PCI bus.")
"""Derived here for the rules; not exported."""
_XID = "xid_last_timestamp_seconds"
_LOGGED = (_XID, "xid_nvlink_last_timestamp_seconds", "xid_recovery_action_last_timestamp_seconds")
"""Metrics with the time of an Xid as their value."""


@dataclass(slots=True)
class GpuHistory:
    """Remembers until when a GPU's Xids no longer count, and how many GPUs the node had.

    The kernel log keeps Xids until the next boot, but a reset of the GPU ends what they report. It
    restarts the GPU's energy counter. An Xid 79 also ends once NVML reads the GPU again: without
    this memory, a GPU that hangs in NVML days later would be reported as lost because of it.
    """

    energy: dict[str, float] = field(default_factory=dict)
    """Last reading of each GPU's energy counter in joules, by UUID."""
    reset: dict[str, float] = field(default_factory=dict)
    """Unix time of the last reset, by PCI address, or by index where that is not known."""
    returned: dict[str, float] = field(default_factory=dict)
    """Unix time of the last Xid 79 that is over, by PCI address."""
    most: float = 0.0
    """Most GPUs that the node has had."""
    settled: float = 0.0
    """Unix time of the last look."""

    def settle(self, series: Series, wall: float) -> None:
        """Drop the Xids that are over from `series`; `wall` is the Unix time in seconds."""
        # By address: while one GPU is missing, the indices of those after it shift.
        address = {
            (labels["gpu"], labels["uuid"]): labels["pci"] for labels, _ in series("gpu_info")
        }
        self._record_resets(series, wall, address)
        read = {(labels["gpu"], labels["uuid"]) for labels, value in series("gpu_up") if value}
        back = {pci for gpu, pci in address.items() if gpu in read}
        for labels, at in series(_XID, xid="79"):
            if labels["pci"] in back and at <= wall - series.limits.xid_recent_seconds:
                self.returned[labels["pci"]] = at
        for name in _LOGGED:
            series.drop(name, self._over)
        count = series.value("gpus_expected")
        self.most = max(self.most, count or 0.0)
        if self.most:
            series.add([BEFORE(self.most)])
        self.settled = wall

    def _record_resets(
        self, series: Series, wall: float, address: Mapping[tuple[str, str], str]
    ) -> None:
        uptime = series.value("uptime_seconds")
        if uptime is not None and wall - uptime > self.settled:
            self.energy = {}  # a boot ends older Xids by itself, and may have logged new ones
        for labels, joules in series("gpu_energy_joules_total"):
            gpu, uuid = labels["gpu"], labels["uuid"]
            if joules < self.energy.get(uuid, 0.0):
                self.reset[address.get((gpu, uuid), gpu)] = wall
            self.energy[uuid] = joules

    def _over(self, point: Point) -> bool:
        pci, gpu = point.labels["pci"], point.labels["gpu"]
        ends = [self.reset[key] for key in (pci, gpu) if key in self.reset]
        if point.labels.get("xid") == "79" and pci in self.returned:
            ends.append(self.returned[pci])
        return any(point.value <= end for end in ends)
