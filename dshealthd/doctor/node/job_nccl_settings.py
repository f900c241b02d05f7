"""NCCL's variables in running jobs fit the node, and NCCL reads them."""

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
        lambda variable, problem: "NCCL_" in variable and problem != "disabled",
        "ip -br link; ibdev2netdev; env | grep NCCL_",
    )


def _looked(context: NodeContext) -> str:
    runs = len(list(context.series("job_ranks")))
    return f"{plural(runs, 'training run')} on this node; none has a wrong NCCL variable"


CHECK = snapshot_check(
    "nccl-environment",
    "job-nccl-settings",
    "NCCL's variables in running jobs fit the node",
    ("job_environment",),
    _looked,
    _more,
)
