"""No rank of a running job requests a GPU that it cannot see."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.environment_problems import problems
from dshealthd.doctor.snapshot_check import snapshot_check
from dshealthd.plural import plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.check import Result
    from dshealthd.doctor.node_context import NodeContext


def _more(context: NodeContext) -> Iterator[Result]:
    yield from problems(
        context,
        lambda variable, _problem: variable in {"LOCAL_RANK", "CUDA_VISIBLE_DEVICES"},
        "echo $CUDA_VISIBLE_DEVICES; nvidia-smi -L  # as many as ranks on this node?",
    )


def _looked(context: NodeContext) -> str:
    runs = len(list(context.series("job_ranks")))
    return f"{plural(runs, 'training run')} on this node; every rank sees the GPU that it requests"


CHECK = snapshot_check(
    "device-ordinal",
    "job-devices",
    "Ranks of running jobs see their GPUs",
    ("job_environment",),
    _looked,
    _more,
)
