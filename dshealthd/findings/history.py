"""The history of findings: when each began, and which GPUs have returned."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dshealthd.findings.finding import Finding, Verdict
from dshealthd.findings.limits import LIMITS

if TYPE_CHECKING:
    from dshealthd.findings.series import Series

_XID = "xid_last_timestamp_seconds"


class FirstSeen:
    """Remembers when each finding was first seen, until a judgement does not repeat it.

    Judgements come every ten seconds, which is its resolution.
    """

    def __init__(self) -> None:
        """Know of none."""
        self._first: dict[tuple[str, str, str], float] = {}

    def update(self, verdict: Verdict, wall: float) -> Verdict:
        """Return the verdict with `since` filled in; `wall` is the Unix time in seconds."""
        self._first = {
            finding.key: self._first.get(finding.key, wall) for finding in verdict.findings
        }
        return Verdict(tuple(map(self._dated, verdict.findings)))

    def _dated(self, finding: Finding) -> Finding:
        if finding.since is not None:
            return finding
        return dataclasses.replace(finding, since=self._first[finding.key])


class ReturnedGpus:
    """Remembers GPUs that NVML has read again since they fell off the bus.

    The kernel log keeps their Xid 79 until the next boot. Without this memory, a GPU that hangs in
    NVML days later would be reported as lost because of that Xid. The alert gets the same from
    Prometheus (`dshealthd:gpu:returned_timestamp_seconds`), where it survives a restart of the
    agent.
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
            if labels["pci"] in back and at <= wall - LIMITS["xid_recent_seconds"]:
                self._until[labels["pci"]] = at
        series.drop(
            _XID,
            lambda point: (
                point.labels["xid"] == "79"
                and point.value <= self._until.get(point.labels["pci"], 0.0)
            ),
        )
