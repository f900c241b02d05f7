"""Whether this node is fit to train: findings that end or spoil a job on it, from what the agent's own collectors saw last.

They are those of the alerts that page for a GPU or NVML (`gpu-lost`, `nvml-broken`, `nccl-all-reduce-failed` among the symptoms), as far as
one moment on one node tells them. What is slow, hot or elsewhere is not among them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from dshealthd.collector import Reason
from dshealthd.result import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dshealthd.collector import Sample
    from dshealthd.snapshot import Latest, Snapshot

RECENT = 600.0
"""Seconds for which an Xid counts, as `dshealthd:threshold:xid_recent_seconds` has it: the log does not say when the GPU is well again."""
_HUNG = frozenset((Reason.TIMEOUT, Reason.STUCK, Reason.CRASHED))
_NOT_THE_NODE = frozenset((Reason.PERMISSION_DENIED, Reason.MALFORMED, Reason.INTERNAL, Reason.EXPIRED))
"""Why a source cannot be read although the node may be well: it is the agent that may not, or cannot."""
_SOURCES = ("gpu", "gpu_bus", "ecc", "kernel_log")
"""The collectors that it takes to know, those of them that run."""


class Check(enum.StrEnum):
    """What is wrong."""

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


_XIDS = {
    **dict.fromkeys(("79",), Check.GPU_LOST),
    **dict.fromkeys(("48", "95"), Check.MEMORY_UNCORRECTED),
    **dict.fromkeys(("64",), Check.MEMORY_WORN_OUT),
    **dict.fromkeys(("46", "62", "109", "110", "119", "120", "136", "140", "143", "158"), Check.RESET_NEEDED),
}
"""Xids that no restart of a job clears; the same as in the alerts."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that makes the node unfit."""

    check: Check
    part: str
    """`gpu 3`, a name of the probes, or the whole `node`."""
    detail: str

    def __str__(self) -> str:
        """Return one line for people."""
        return f"{self.check} ({self.part}): {self.detail}"


@dataclass(frozen=True, slots=True)
class Fitness:
    """What is known of the node."""

    findings: tuple[Finding, ...]
    unknown: tuple[str, ...]
    """What could not be looked at, one line each."""

    @property
    def fit(self) -> bool | None:
        """False with a finding; None if there is none but not everything could be looked at."""
        return False if self.findings else None if self.unknown else True


class Accusation(NamedTuple):
    """Whom this agent's probes accuse; the labels of `dshealthd_suspect`."""

    kind: str
    component: str
    reason: str


def fitness(snapshot: Snapshot, accusations: Iterable[Accusation], name: str, *, now: float, wall: float) -> Fitness:
    """Judge the node that the probes know as `name` (empty where they do not) by the last results and by accusations.

    `now` is the monotonic time in seconds, `wall` the Unix time.
    """
    latest = {entry.name: entry for entry in snapshot if entry.name in _SOURCES}
    samples = _by_name(sample for entry in latest.values() for sample in snapshot.samples(entry))
    findings = {(finding.check, finding.part): finding for finding in _gpus(samples, wall)}
    unknown = []
    for entry in latest.values():
        for reason, fault in entry.reasons(now).items():
            detail = fault.detail if fault is not None else entry.result.detail
            if entry.name in {"gpu", "ecc"} and reason in _HUNG:
                finding = Finding(Check.NVML_BROKEN, "node", f"a call did not return ({reason}): {detail}")
                findings.setdefault((finding.check, finding.part), finding)
            elif entry.name == "gpu" and entry.result.outcome is Outcome.ERROR and reason not in _NOT_THE_NODE and not samples["gpu_up"]:
                findings[Check.NVML_BROKEN, "node"] = Finding(Check.NVML_BROKEN, "node", f"{reason}: {detail}")
            else:
                unknown.append(f"{entry.name}: {reason}: {detail}")
        if entry.sampled is None:
            unknown.append(f"{entry.name}: not sampled yet")
    if (unwatched := _unwatched(latest, samples)) is not None:
        unknown.append(unwatched)
    for kind, component, why in accusations:
        if kind in {"node", "gpu", "nic"} and name and component.partition("/")[0] == name:
            findings[Check.SUSPECT, component] = Finding(Check.SUSPECT, component, f"in probes: {why}")
    return Fitness(tuple(findings.values()), tuple(unknown))


def _gpus(samples: _Samples, wall: float) -> Iterator[Finding]:
    """Yield what NVML and the kernel's log say of GPUs."""
    faults = [sample.labels for sample in samples["gpu_fault"] if sample.value]
    down = {sample.labels[0] for sample in samples["gpu_up"] if not sample.value}
    for gpu, uuid, reason in faults:
        if reason == Reason.GPU_LOST:
            yield Finding(Check.GPU_LOST, f"gpu {gpu}", f"{uuid} is lost to NVML")
        elif gpu in down and reason not in _NOT_THE_NODE:
            yield Finding(Check.GPU_UNREADABLE, f"gpu {gpu}", f"{uuid} cannot be read: {reason}")
    expected, visible = samples["gpus_expected"], samples["gpus_visible"]
    if expected and visible and visible[0].value < expected[0].value:
        yield Finding(Check.GPU_MISSING, "node", f"{visible[0].value:g} GPUs of the {expected[0].value:g} on the PCI bus")
    for sample in samples["gpu_ecc_errors_total"]:
        gpu, uuid, kind, counted = sample.labels
        if kind == "uncorrected" and counted == "volatile" and sample.value:
            detail = f"{sample.value:g} ECC errors of {uuid} could not be corrected since its driver was loaded"
            yield Finding(Check.MEMORY_UNCORRECTED, f"gpu {gpu}", detail)
    for name, text in (("gpu_remapped_rows_failed", "no spare rows are left"), ("gpu_sram_threshold_exceeded", "too many SRAM errors")):
        for sample in samples[name]:
            if sample.value:
                yield Finding(Check.MEMORY_WORN_OUT, f"gpu {sample.labels[0]}", f"{sample.labels[1]}: {text}")
    for sample in samples["gpu_recovery_action"]:
        if sample.value:
            yield Finding(Check.RESET_NEEDED, f"gpu {sample.labels[0]}", f"the driver asks for recovery action {sample.value:g}")
    failing = {gpu for gpu, _, _ in faults}
    for sample in samples["xid_last_timestamp_seconds"]:
        gpu, pci, xid = sample.labels
        if xid in _XIDS and (wall - sample.value < RECENT or (xid == "79" and gpu in failing)):
            yield Finding(_XIDS[xid], f"gpu {gpu or pci}", f"Xid {xid} in the kernel's log")


def _unwatched(latest: dict[str, Latest], samples: _Samples) -> str | None:
    """Say that there are GPUs and nobody looks at them: no driver, or an operator wants them free."""
    if not samples["gpus_expected"] or not samples["gpus_expected"][0].value:
        return None
    if "gpu" not in latest:
        return "gpu: the collector is disabled"
    result = latest["gpu"].result
    return f"gpu: {result.detail}" if result.outcome is Outcome.NOT_AVAILABLE and latest["gpu"].sampled is not None else None


class _Samples(dict[str, list["Sample"]]):
    """Samples by the name of their metric without prefix; empty where there are none."""

    def __missing__(self, name: str) -> list[Sample]:
        return []


def _by_name(samples: Iterable[Sample]) -> _Samples:
    found = _Samples()
    for sample in samples:
        found.setdefault(sample.metric.name.removeprefix("dshealthd_"), []).append(sample)
    return found
