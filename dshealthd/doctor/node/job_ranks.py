"""No rank of a running job is used twice on this node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.check import Outcome, Result
from dshealthd.doctor.snapshot_check import snapshot_check
from dshealthd.plural import plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.node_context import NodeContext


def _more(context: NodeContext) -> Iterator[Result]:
    ranks: dict[tuple[str, str], list[str]] = {}
    for labels, processes in context.series("job_processes"):
        if processes > 1:
            ranks.setdefault((labels["job"], labels["run"]), []).append(labels["rank"])
    for (job, _), twice in ranks.items():
        yield Result(
            Outcome.WARNING,
            f"job {job} has more than one process here for rank {', '.join(sorted(twice))}: an "
            "earlier run is still running, or two nodes have the same --node-rank",
            remedy="ps -eo pid,lstart,args | grep -- local_rank  # then end the older ones",
            component=job,
        )


def _looked(context: NodeContext) -> str:
    runs = len(list(context.series("job_ranks")))
    return f"{plural(runs, 'training run')} on this node; no rank is used twice"


CHECK = snapshot_check(
    "rendezvous-env-mismatch",
    "job-ranks",
    "No rank of a running job is used twice",
    ("job_environment",),
    _looked,
    _more,
)
