"""The states of the model fit into GPU and host memory, by DeepSpeed's own estimators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.core.host import read
from dshealthd.doctor.check import Check, Outcome, Result

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.job_context import JobContext

NEARLY = 0.85
"""Share of a GPU's memory that states may take before activations have no room."""
GIB = 1 << 30
ERROR = (
    "counts parameters, gradients and Adam's states alone, without activations, buckets and"
    " fragmentation"
)
"""What DeepSpeed says of its estimators in its documentation (docs/code-docs/source/memory.rst)."""


def applies(context: JobContext) -> bool:
    """Whether the size of the model, and so the memory of its states, is known."""
    return context.parameters is not None and context.config is not None


def run(context: JobContext) -> Iterator[Result]:
    """Yield the states of the model that do not fit into memory."""
    inspection = context.inspection
    if context.parameters is None or inspection is None:
        why = "(--parameters)" if context.parameters is None else context.why_not_inspected
        yield Result(Outcome.UNKNOWN, f"memory is not estimated: {why}")
        return
    if inspection.settings is None:
        yield Result(
            Outcome.UNKNOWN, "memory is not estimated: DeepSpeed refuses the configuration"
        )
        return
    stage = inspection.settings["stage"]
    if not stage:
        yield Result(
            Outcome.UNKNOWN,
            "memory is not estimated: DeepSpeed has no estimator without ZeRO",
            source=f"DeepSpeed {inspection.version}",
        )
        return
    estimate = inspection.estimate
    if "gpu" not in estimate:
        known = "nodes and ranks of the job are not known (--ranks, --hostfile, --launch)"
        yield Result(
            Outcome.UNKNOWN, f"memory is not estimated: {estimate.get('problem') or known}"
        )
        return
    source = f"{estimate['function']} of DeepSpeed {inspection.version}, which {ERROR}"
    yield _gpu(context, estimate["gpu"], stage, source)
    if (result := _host(context, estimate["host"], source)) is not None:
        yield result


def _gpu(context: JobContext, needed: int, stage: int, source: str) -> Result:
    memory = context.memory_of_gpu
    text = f"states of {context.parameters:,} parameters take {needed / GIB:.1f} GiB of each GPU"
    if memory is None:
        return Result(
            Outcome.UNKNOWN,
            f"{text} at least; how much one has is not known (--gpu-memory)",
            source=source,
        )
    share = needed / memory
    outcome = Outcome.OK
    if share > NEARLY:
        outcome = Outcome.CRITICAL if share >= 1 else Outcome.WARNING
    relation = "does not fit" if share >= 1 else "fits"
    advice = ""
    if outcome is not Outcome.OK:
        advice = ": a higher ZeRO stage, offload_optimizer or more GPUs take less of each"
        if stage == 3:  # noqa: PLR2004 - the highest stage
            advice = ": offload_optimizer, offload_param or more GPUs take less of each"
    return Result(
        outcome,
        f"{text} of {memory / GIB:.1f} GiB, which {relation}{advice}",
        remedy="" if outcome is Outcome.OK else "nvidia-smi --query-gpu=memory.total --format=csv",
        value=f"{needed / GIB:.1f} GiB",
        limit=f"{memory / GIB:.1f} GiB",
        source=source,
        component="GPU memory",
    )


def _host(context: JobContext, needed: int, source: str) -> Result | None:
    """Return what is wrong with the memory of this node for the states of the model."""
    try:
        lines = read(context.host.proc("meminfo")).splitlines()
        (total,) = (int(line.split()[1]) << 10 for line in lines if line.startswith("MemTotal:"))
    except (OSError, ValueError, IndexError):
        return Result(
            Outcome.UNKNOWN, "the memory of this node is not known", source="/proc/meminfo"
        )
    if needed <= total:
        return None
    inspection = context.inspection
    settings = (inspection.settings if inspection else None) or {}
    offloaded = "cpu" in (settings.get("offload_optimizer"), settings.get("offload_param"))
    # without offload it is what ranks take that load the whole model before they share it
    subject = (
        "offloaded states take"
        if offloaded
        else "ranks that each load the whole model on the CPU, without deepspeed.zero.Init, take"
    )
    return Result(
        Outcome.CRITICAL if offloaded else Outcome.WARNING,
        f"{subject} {needed / GIB:.1f} GiB of each node's memory, and this one has"
        f" {total / GIB:.1f} GiB",
        remedy="free -g",
        value=f"{needed / GIB:.1f} GiB",
        limit=f"{total / GIB:.1f} GiB",
        source=source,
        component="host memory",
    )


CHECK: Check[JobContext] = Check(
    "cuda-oom", "model-memory", "States of the model fit into memory", run
)
