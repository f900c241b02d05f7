"""What the judge remembers of this node's GPUs: resets, returns to the bus, and how many there
were.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from dshealthd.core import schema
from dshealthd.core.collector import gauge

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dshealthd.findings.series import Point, Series

BEFORE = gauge("dshealthd_gpus_before", "Most GPUs that this node has had on its PCI bus.")
"""Derived here for the rules; not exported."""
_FIGURE = schema.Number(0, sys.float_info.max)
_XID = "xid_last_timestamp_seconds"
_LOGGED = (_XID, "xid_nvlink_last_timestamp_seconds", "xid_recovery_action_last_timestamp_seconds")
"""Metrics with the time of an Xid as their value."""


class GpuHistory:
    """Remembers until when a GPU's Xids no longer count, and how many GPUs the node had.

    The kernel log keeps Xids until the next boot, but a reset of the GPU ends what they report. It
    restarts the GPU's energy counter. An Xid 79 also ends once NVML reads the GPU again: without
    this memory, a GPU that hangs in NVML days later would be reported as lost because of it.
    """

    def __init__(self) -> None:
        """Know of none."""
        self._energy: dict[str, float] = {}
        """Last reading of each GPU's energy counter in joules, by UUID."""
        self._reset: dict[str, float] = {}
        """Unix time of the last reset, by PCI address, or by index where that is not known."""
        self._returned: dict[str, float] = {}
        """Unix time of the last Xid 79 that is over, by PCI address."""
        self._most = 0.0
        self._settled = 0.0
        """Unix time of the last look."""

    def settle(self, series: Series, wall: float) -> None:
        """Drop the Xids that are over from `series`; `wall` is the Unix time in seconds."""
        # By address: while one GPU is missing, the indices of those after it shift.
        address = {
            (labels["gpu"], labels["uuid"]): labels["pci"] for labels, _ in series("gpu_info")
        }
        self._note_resets(series, wall, address)
        read = {(labels["gpu"], labels["uuid"]) for labels, value in series("gpu_up") if value}
        back = {pci for gpu, pci in address.items() if gpu in read}
        for labels, at in series(_XID, xid="79"):
            if labels["pci"] in back and at <= wall - series.limits.xid_recent_seconds:
                self._returned[labels["pci"]] = at
        for name in _LOGGED:
            series.drop(name, self._over)
        count = series.value("gpus_expected")
        self._most = max(self._most, count or 0.0)
        if self._most:
            series.add([BEFORE(self._most)])
        self._settled = wall

    def _note_resets(
        self, series: Series, wall: float, address: Mapping[tuple[str, str], str]
    ) -> None:
        uptime = series.value("uptime_seconds")
        if uptime is not None and wall - uptime > self._settled:
            self._energy = {}  # a boot ends older Xids by itself, and may have logged new ones
        for labels, joules in series("gpu_energy_joules_total"):
            gpu, uuid = labels["gpu"], labels["uuid"]
            if joules < self._energy.get(uuid, 0.0):
                self._reset[address.get((gpu, uuid), gpu)] = wall
            self._energy[uuid] = joules

    def _over(self, point: Point) -> bool:
        pci, gpu = point.labels["pci"], point.labels["gpu"]
        ends = [self._reset[key] for key in (pci, gpu) if key in self._reset]
        if point.labels.get("xid") == "79" and pci in self._returned:
            ends.append(self._returned[pci])
        return any(point.value <= end for end in ends)

    def document(self) -> Mapping[str, Any]:
        """Return what it remembers, for JSON."""
        return {
            "energy": self._energy,
            "reset": self._reset,
            "returned": self._returned,
            "most": self._most,
            "settled": self._settled,
        }

    def restore(self, document: Mapping[str, Any]) -> None:
        """Restore what `document` returned.

        Raise SchemaError if it is not that, and restore nothing.
        """
        with schema.reading("the GPUs' past"):
            energy, reset, returned = (
                {key: _FIGURE.read(value, name) for key, value in document[name].items()}
                for name in ("energy", "reset", "returned")
            )
            most = _FIGURE.read(document["most"], "most")
            settled = _FIGURE.read(document["settled"], "settled")
        self._most, self._settled = most, settled
        self._energy, self._reset, self._returned = energy, reset, returned
