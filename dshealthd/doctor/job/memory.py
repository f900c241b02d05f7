"""Model states fit into memory, and what is offloaded has a place."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from dshealthd.core.host import read
from dshealthd.doctor.check import Result, check_of, critical, ok, unknown
from dshealthd.doctor.job.sources.remedies import paste
from dshealthd.findings.finding import State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.job.context import JobContext


NEARLY = 0.85
"""Share of a GPU's memory above which model states leave no room for activations."""

GIB = 1 << 30

ERROR = (
    "counts only parameters, gradients and Adam's states, without activations, buckets and"
    " fragmentation"
)
"""The limits of the estimators, by DeepSpeed's documentation (docs/code-docs/source/memory.rst)."""


def _memory(context: JobContext, _parameters: int) -> Iterator[Result]:
    inspection = context.inspection
    if inspection is None:
        yield unknown(f"memory is not estimated: {context.why_not_inspected}")
        return
    if inspection.settings is None:
        yield unknown("memory is not estimated: DeepSpeed refuses the configuration")
        return
    stage = inspection.settings["stage"]
    if not stage:
        yield unknown(
            "memory is not estimated: DeepSpeed has no estimator without ZeRO",
            source=f"DeepSpeed {inspection.version}",
        )
        return
    estimate = inspection.estimate
    if "gpu" not in estimate:
        known = "nodes and ranks of the job are unknown (--ranks, --hostfile, --launch)"
        yield unknown(f"memory is not estimated: {estimate.get('problem') or known}")
        return
    source = f"{estimate['function']} of DeepSpeed {inspection.version}, which {ERROR}"
    yield _gpu(context, estimate["gpu"], stage, source)
    if (result := _host(context, estimate["host"], source)) is not None:
        yield result


def _gpu(context: JobContext, needed: int, stage: int, source: str) -> Result:
    memory = context.memory_of_gpu
    text = f"states of {context.parameters:,} parameters need {needed / GIB:.1f} GiB per GPU"
    if memory is None:
        return unknown(
            f"{text} at least; the memory of a GPU is unknown (--gpu-memory)", source=source
        )
    share = needed / memory
    outcome = State.OK
    if share > NEARLY:
        outcome = State.CRITICAL if share >= 1 else State.WARNING
    relation = "does not fit" if share >= 1 else "fits"
    advice = ""
    if outcome is not State.OK:
        advice = ": a higher ZeRO stage, offload_optimizer or more GPUs reduce it"
        if stage == 3:  # noqa: PLR2004 - the highest stage
            advice = ": offload_optimizer, offload_param or more GPUs reduce it"
    return Result(
        outcome,
        f"{text}, which {relation} in {memory / GIB:.1f} GiB{advice}",
        remedy="" if outcome is State.OK else "nvidia-smi --query-gpu=memory.total --format=csv",
        value=f"{needed / GIB:.1f} GiB",
        limit=f"{memory / GIB:.1f} GiB",
        source=source,
        component="GPU memory",
    )


def _host(context: JobContext, needed: int, source: str) -> Result | None:
    """Return a result if this node's memory is too small or unknown; None if it suffices."""
    try:
        lines = read(context.host.proc("meminfo")).splitlines()
        (total,) = (int(line.split()[1]) << 10 for line in lines if line.startswith("MemTotal:"))
    except (OSError, ValueError, IndexError):
        return unknown("the memory size of this node is unknown", source="/proc/meminfo")
    if needed <= total:
        return None
    inspection = context.inspection
    settings = (inspection.settings if inspection else None) or {}
    offloaded = "cpu" in (settings.get("offload_optimizer"), settings.get("offload_param"))
    # without offload, it is the memory of ranks that load the whole model before partitioning it
    subject = (
        "offloaded states need"
        if offloaded
        else "ranks that each load the whole model on the CPU, without deepspeed.zero.Init, need"
    )
    return Result(
        State.CRITICAL if offloaded else State.WARNING,
        f"{subject} {needed / GIB:.1f} GiB of each node's memory, but this node has"
        f" {total / GIB:.1f} GiB",
        remedy="free -g",
        value=f"{needed / GIB:.1f} GiB",
        limit=f"{total / GIB:.1f} GiB",
        source=source,
        component="host memory",
    )


MEMORY = check_of(
    lambda job: job.parameters if job.config else None,
    "memory is not estimated: (--parameters, --deepspeed-config)",
    "cuda-oom",
    "model-memory",
    "Model states fit into memory",
    _memory,
)


_BLOCKS = ("offload_optimizer", "offload_param")


def _offload(_context: JobContext, paths: dict[str, str]) -> Iterator[Result]:
    for key, path in paths.items():
        problem = _problem(path)
        shown = path[:255]
        if problem:
            yield critical(
                f"{key}: {shown} {problem}",
                remedy=paste("mkdir", "-p", "--", path),
                source="deepspeed/runtime/zero/stage3.py",
                component=f"zero_optimization.{key}.nvme_path",
            )
        else:
            yield ok(f"{key}: {shown} is a writable directory")


def _paths(context: JobContext) -> dict[str, str]:
    """Return the directories on NVMe to which the configuration offloads, by its block."""
    zero = (context.document or {}).get("zero_optimization")
    found = {}
    for key in _BLOCKS:
        block = zero.get(key) if isinstance(zero, dict) else None
        if isinstance(block, dict) and block.get("device") == "nvme":
            path = block.get("nvme_path")
            if isinstance(path, str) and path and "\0" not in path:
                found[key] = path
    return found


def _problem(path: str) -> str:
    """Return why DeepSpeed cannot use the offload directory, in which it creates a folder."""
    try:
        status = os.stat(path)
    except OSError as error:
        return f"cannot be used: {error.strerror}"
    if not stat.S_ISDIR(status.st_mode):
        return "is not a directory"
    return "" if os.access(path, os.W_OK | os.X_OK) else "is not writable by this user"


OFFLOAD = check_of(
    _paths,
    "the configuration names no offload directory",
    "nvme-offload",
    "offload-path",
    "Offload directories can be used",
    _offload,
)
