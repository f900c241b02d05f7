"""Whether this node is fit to train, from its findings."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from dshealthd.findings import agent, gpu_links, gpus
from dshealthd.findings.finding import State, Verdict
from dshealthd.findings.judgement import rule_name

_SOURCES = ("gpu", "gpu_bus", "ecc", "kernel_log", "findings")
"""Collectors without which fitness is unknown, as far as they run; and the judgement."""
_RULES = {rule_name(rule) for rule in (*gpus.RULES, gpu_links.nvlink, agent.suspects_here)}
"""The rules whose findings fail checks, as they are named where a defect has ended one."""
_UNWATCHED = "DshealthdGpusUnwatched"
"""The finding that GPUs are not monitored: the node may be healthy."""

_COMPUTES_WRONG = "DshealthdComputesWrong"


class FitnessCheck(enum.StrEnum):
    """Checks that can fail; the values of the label `check`."""

    GPU_LOST = "gpu_lost"
    """A GPU is off the PCI bus or cannot be read, or the node has fewer than it had."""
    NVML_BROKEN = "nvml_broken"
    """NVML hangs, or cannot be loaded."""
    MEMORY_UNCORRECTED = "memory_uncorrected"
    """An uncorrectable ECC error since the last reset that was not contained."""
    MEMORY_WORN_OUT = "memory_worn_out"
    """No spare rows left, or too many SRAM errors: replace the GPU."""
    RESET_NEEDED = "reset_needed"
    """The driver requests a reset or a reboot, or has logged an Xid that needs one."""
    SUSPECT = "suspect"
    """This agent's probes suspect its own node, or a part of it."""


CHECKS = {
    "DshealthdGpuLost": FitnessCheck.GPU_LOST,
    "DshealthdNvmlBroken": FitnessCheck.NVML_BROKEN,
    "DshealthdGpuSramWornOut": FitnessCheck.MEMORY_WORN_OUT,
    "DshealthdGpuResetNeeded": FitnessCheck.RESET_NEEDED,
    _COMPUTES_WRONG: FitnessCheck.SUSPECT,
    "DshealthdProbeFails": FitnessCheck.SUSPECT,
    "DshealthdNodeSlow": FitnessCheck.SUSPECT,
    "DshealthdLinkSuspect": FitnessCheck.SUSPECT,
}
"""Checks by the alert of the finding."""
BY_REASON = {
    **dict.fromkeys(gpus.UNCORRECTED, FitnessCheck.MEMORY_UNCORRECTED),
    **dict.fromkeys(gpus.UNREPAIRABLE, FitnessCheck.MEMORY_WORN_OUT),
}
"""Of GPUs that need a reset, those with bad memory."""


@dataclass(frozen=True, slots=True)
class FailedCheck:
    """One check that failed."""

    check: FitnessCheck
    part: str
    """`GPU 3`, a part as the probes name it, or `node` for the whole node."""
    detail: str

    def __str__(self) -> str:
        """Return the failure as one line of text."""
        return f"{self.check} ({self.part}): {self.detail}"


@dataclass(frozen=True, slots=True)
class Fitness:
    """Failed checks of the node, and what could not be checked."""

    failures: tuple[FailedCheck, ...]
    unknown: tuple[str, ...]
    """What could not be checked, one line each."""

    @property
    def fit(self) -> bool | None:
        """False if a check failed; None if none did but some could not be made; else True."""
        return False if self.failures else None if self.unknown else True


def fitness(verdict: Verdict) -> Fitness:
    """Return what a verdict means for a job that is about to start here."""
    failures = []
    unknown = []
    for finding in verdict.findings:
        check = CHECKS.get(finding.alert)
        if check is FitnessCheck.RESET_NEEDED:
            check = BY_REASON.get(finding.reason, check)
        unread = finding.severity is State.UNKNOWN and not (
            _RULES.union(_SOURCES).isdisjoint(finding.origins)
        )
        starting = not finding.alert  # nothing follows from what is not found yet
        if unread or starting or finding.alert == _UNWATCHED:
            unknown.append(finding.detail)
        elif finding.alert == _COMPUTES_WRONG and finding.severity is State.WARNING:
            continue  # bits that differ without a wrong result prove nothing yet
        elif check is not None and "--" not in finding.part:  # a link's other end may be it
            failures.append(FailedCheck(check, finding.part or "node", finding.detail))
    return Fitness(tuple(failures), tuple(unknown))
