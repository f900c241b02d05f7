"""The GPUs that have returned to the bus since they fell off it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dshealthd.findings.series import Series

_XID = "xid_last_timestamp_seconds"


class ReturnedGpus:
    """Remembers GPUs that NVML has read again since they fell off the bus.

    The kernel log keeps their Xid 79 until the next boot. Without this memory, a GPU that hangs in
    NVML days later would be reported as lost because of that Xid.
    """

    def __init__(self) -> None:
        """Know of none."""
        self._until: dict[str, float] = {}
        """Unix time of the last Xid 79 that is resolved, by PCI address."""

    def settle(self, series: Series, wall: float) -> None:
        """Drop resolved Xids 79 from `series`; `wall` is the Unix time in seconds."""
        read = {
            (point.labels["gpu"], point.labels["uuid"]) for point in series("gpu_up") if point.value
        }
        # By address: while one GPU is missing, the indices of those after it shift.
        back = {
            point.labels["pci"]
            for point in series("gpu_info")
            if (point.labels["gpu"], point.labels["uuid"]) in read
        }
        for labels, at in series(_XID, xid="79"):
            if labels["pci"] in back and at <= wall - series.limits.xid_recent_seconds:
                self._until[labels["pci"]] = at
        series.drop(
            _XID,
            lambda point: (
                point.labels["xid"] == "79"
                and point.value <= self._until.get(point.labels["pci"], 0.0)
            ),
        )

    def document(self) -> Mapping[str, float]:
        """Return what it remembers, for JSON."""
        return self._until

    def restore(self, document: Mapping[str, float]) -> None:
        """Restore what `document` returned. Raise TypeError or ValueError if it is not that."""
        self._until = {str(pci): float(at) for pci, at in dict(document).items()}
