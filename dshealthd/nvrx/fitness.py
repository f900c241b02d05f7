"""Whether this node is fit to train: what the health check for NVRx takes from the findings.

Findings count that end or spoil a job on this node and that no restart of the job clears. What is
slow, hot or elsewhere does not, and neither does a job's own trouble.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dshealthd.findings.finding import State

if TYPE_CHECKING:
    from dshealthd.findings.finding import Finding, Verdict

_SOURCES = frozenset(("gpu", "gpu_bus", "ecc", "kernel_log"))
"""The collectors that it takes to know, those of them that run."""
_UNWATCHED = frozenset(("DshealthdGpusReleased", "DshealthdGpuMetricsGone"))
"""Alerts for GPUs at which nobody looks: the node may be well."""


OF_THE_AGENT = frozenset(("permission_denied", "malformed", "internal", "expired"))
"""Why a GPU or NVML cannot be read although the node may be well: the agent may not, or cannot."""


class FitnessCheck(enum.StrEnum):
    """What is wrong; the values of the label `check`."""

    GPU_LOST = "gpu_lost"
    GPU_MISSING = "gpu_missing"
    """NVML lists fewer GPUs than are on the PCI bus."""
    GPU_UNREADABLE = "gpu_unreadable"
    NVML_BROKEN = "nvml_broken"
    """It hangs, or cannot be loaded."""
    MEMORY_UNCORRECTED = "memory_uncorrected"
    """An ECC error since the driver was loaded that could not be corrected."""
    MEMORY_WORN_OUT = "memory_worn_out"
    """No spare rows are left, or too many errors of SRAM: the GPU is to be exchanged."""
    RESET_NEEDED = "reset_needed"
    """The driver asks for a reset or a reboot, or has logged an Xid that takes one."""
    SUSPECT = "suspect"
    """This agent's probes accuse its own node, or a part of it."""


CHECKS = {
    "DshealthdGpuLost": FitnessCheck.GPU_LOST,
    "DshealthdGpuMissing": FitnessCheck.GPU_MISSING,
    "DshealthdGpuUnreadable": FitnessCheck.GPU_UNREADABLE,
    "DshealthdNvmlHung": FitnessCheck.NVML_BROKEN,
    "DshealthdNvmlFailing": FitnessCheck.NVML_BROKEN,
    "DshealthdGpuMemoryErrorUncorrected": FitnessCheck.MEMORY_UNCORRECTED,
    "DshealthdGpuRowRemapFailed": FitnessCheck.MEMORY_WORN_OUT,
    "DshealthdGpuSramWornOut": FitnessCheck.MEMORY_WORN_OUT,
    "DshealthdGpuResetNeeded": FitnessCheck.RESET_NEEDED,
    "DshealthdProbeResultWrong": FitnessCheck.SUSPECT,
    "DshealthdProbeFails": FitnessCheck.SUSPECT,
    "DshealthdProbeHung": FitnessCheck.SUSPECT,
    "DshealthdStraggler": FitnessCheck.SUSPECT,
    "DshealthdLinkSuspect": FitnessCheck.SUSPECT,
}
"""Checks by the alert of the finding."""


@dataclass(frozen=True, slots=True)
class FailedCheck:
    """One check that failed."""

    check: FitnessCheck
    part: str
    """`GPU 3`, a name of the probes, or the whole `node`."""
    detail: str

    def __str__(self) -> str:
        """Return one line for people."""
        return f"{self.check} ({self.part}): {self.detail}"


@dataclass(frozen=True, slots=True)
class Fitness:
    """What is known of the node."""

    failures: tuple[FailedCheck, ...]
    unknown: tuple[str, ...]
    """What could not be looked at, one line each."""

    @property
    def fit(self) -> bool | None:
        """False with a finding; None if there is none but not all of fitness could be looked at."""
        return False if self.failures else None if self.unknown else True


def fitness(verdict: Verdict) -> Fitness:
    """Return what the findings of one moment mean for a job that is to start here."""
    failures = []
    unknown = []
    for finding in verdict.findings:
        check = CHECKS.get(finding.alert)
        unread = finding.severity is State.UNKNOWN and not _SOURCES.isdisjoint(finding.origins)
        agents = check is not None and finding.reason in OF_THE_AGENT
        if unread or agents or finding.alert in _UNWATCHED:
            unknown.append(finding.detail)
        elif check is not None and not _elsewhere(finding):
            failures.append(FailedCheck(check, finding.part or "node", finding.detail))
    return Fitness(tuple(failures), tuple(unknown))


def _elsewhere(finding: Finding) -> bool:
    """Tell whether a finding is about a link, whose other end, not this node, may be unfit."""
    return "--" in finding.part
