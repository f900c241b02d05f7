"""No node gets more ranks than it has visible GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.core.text import plural, printable
from dshealthd.doctor.check import Check, Outcome, Result
from dshealthd.doctor.job.sources.remedies import paste
from dshealthd.doctor.job.sources.slurm_script import gpus_per_node
from dshealthd.jobs.visible_devices import visible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.job.context import JobContext

_ORDERS = frozenset({"PCI_BUS_ID", "FASTEST_FIRST"})
_EXPLICIT = frozenset({"include", "exclude", "num-gpus", "num-accelerators", "num-nodes"})


def applies(context: JobContext) -> bool:
    """Whether the ranks per node are known, or variables choose GPUs."""
    return context.layout.ranks_per_node is not None or any(
        name in context.variables for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
    )


def run(context: JobContext) -> Iterator[Result]:
    """Yield whatever leaves a rank without its own GPU."""
    if not applies(context):
        yield Result(Outcome.UNKNOWN, "the number of ranks per node is unknown (--launch)")
        return
    found = [*_order(context), *_ranks(context)]
    yield from found
    if not found:
        ranks = context.layout.ranks_per_node
        counted = (
            f"{plural(ranks, 'rank')} per node ({context.layout.source})"
            if ranks
            else "an unknown number of ranks"
        )
        limit = context.gpus_per_node
        gpus = ", an unknown number of GPUs per node"
        if limit:
            gpus = f", {plural(limit, 'GPU')} per node"
        elif _is_counted_by_ssh(context):
            gpus = "; the check `ssh` counts each host's GPUs"
        yield Result(Outcome.OK, f"{counted}{gpus}")


def _order(context: JobContext) -> Iterator[Result]:
    order = context.variables.get("CUDA_DEVICE_ORDER")
    if order is not None and order not in _ORDERS:
        yield Result(
            Outcome.WARNING,
            printable(f"CUDA_DEVICE_ORDER={order[:40]} is invalid; CUDA uses FASTEST_FIRST"),
            remedy="export CUDA_DEVICE_ORDER=PCI_BUS_ID",
            value=printable(order[:40]),
            limit=" or ".join(sorted(_ORDERS)),
            source="CUDA programming guide, environment variables",
            component="CUDA_DEVICE_ORDER",
        )
    names = context.gpus.value.names if context.gpus and context.gpus.value else ()
    chosen = context.variables.get("CUDA_VISIBLE_DEVICES", "")
    if order is None and len(set(names)) > 1 and chosen[:1].isdecimal():
        yield Result(
            Outcome.WARNING,
            f"this node's GPUs differ ({', '.join(sorted(set(names)))}): without"
            " CUDA_DEVICE_ORDER=PCI_BUS_ID, CUDA_VISIBLE_DEVICES numbers them differently from"
            " nvidia-smi",
            remedy="export CUDA_DEVICE_ORDER=PCI_BUS_ID",
            component="CUDA_DEVICE_ORDER",
        )


def _ranks(context: JobContext) -> Iterator[Result]:
    gpus, per_node = context.gpus_per_node, context.layout.ranks_per_node
    text = context.variables.get("CUDA_VISIBLE_DEVICES")
    limit = gpus
    if text is not None and "$" not in text:
        ignored = _ignores_visible(context)
        if ignored:
            yield Result(
                Outcome.WARNING,
                f"deepspeed ignores CUDA_VISIBLE_DEVICES={printable(text[:40])} because of"
                f" {ignored}",
                remedy=paste("deepspeed", "--include", f"localhost:{text}"),
                source="deepspeed/launcher/runner.py, main",
                component="CUDA_VISIBLE_DEVICES",
            )
        else:
            seen = visible(text, gpus)
            problem = "lists a GPU twice, so CUDA shows none" if seen.repeated else ""
            if seen.missing:
                problem = f"names a GPU that does not exist: the node has {gpus}"
            if problem:
                yield Result(
                    Outcome.CRITICAL,
                    f"CUDA_VISIBLE_DEVICES={printable(text[:40])} {problem}",
                    remedy="unset CUDA_VISIBLE_DEVICES",
                    value=printable(text[:40]),
                    limit="" if gpus is None else f"0 to {gpus - 1}",
                    source="torch.cuda._parse_visible_devices",
                    component="CUDA_VISIBLE_DEVICES",
                )
            limit = len(seen.devices)
    if per_node is None:
        return
    if limit is None:
        if _is_counted_by_ssh(context):
            return
        yield Result(
            Outcome.UNKNOWN,
            f"{plural(per_node, 'rank')} per node ({context.layout.source}); the number of GPUs"
            f" per node is unknown: {_why(context)}",
        )
    elif per_node > limit:
        yield Result(
            Outcome.CRITICAL,
            f"{plural(per_node, 'rank')} per node ({context.layout.source}) but"
            f" {plural(limit, 'visible GPU')}: local rank {limit} fails with"
            " `invalid device ordinal`",
            remedy=f"sbatch --gpus-per-node={per_node} ..."
            if _is_of_slurm(context)
            else "nvidia-smi -L",
            value=str(per_node),
            limit=str(limit),
            source="CUDA_VISIBLE_DEVICES" if limit != gpus else _source(context),
            component="LOCAL_RANK",
        )


def _ignores_visible(context: JobContext) -> str:
    """Return what makes `deepspeed` ignore CUDA_VISIBLE_DEVICES; empty if it does not."""
    inner = context.launcher.find("deepspeed") if context.launcher else None
    if inner is None:
        return ""
    if inner.options.get("include") == f"localhost:{context.variables['CUDA_VISIBLE_DEVICES']}":
        return ""  # the same GPUs, as the remedy suggests
    options = sorted(_EXPLICIT & inner.options.keys())
    return (
        ", ".join(f"--{name.replace('-', '_')}" for name in options) if not context.members else ""
    )


def _is_counted_by_ssh(context: JobContext) -> bool:
    """Whether the check `ssh` compares each host's GPUs with its ranks."""
    return bool(context.layout.hosts) and context.by_ssh


def _why(context: JobContext) -> str:
    problem = context.gpus.problem if context.gpus else ""
    return f"{problem or 'NVML was not queried'} (--gpus-per-node)"


def _is_of_slurm(context: JobContext) -> bool:
    return context.gpus_wanted is None and gpus_per_node(context.slurm_options) is not None


def _source(context: JobContext) -> str:
    if _is_of_slurm(context):
        return "the job's request of Slurm"
    return "--gpus-per-node" if context.gpus_wanted is not None else "NVML of this node"


CHECK: Check[JobContext] = Check(
    "device-ordinal", "ranks-and-gpus", "Every rank has its own GPU", run
)
