"""No running job disables NVLink, shared memory or InfiniBand."""

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
    """Yield the transports that a running job disables although the node has them."""
    nvlink = any(point.value for point in context.series("nvlinks_up"))
    network = any(point.value for point in context.series("infiniband_port_up"))

    def there(variable: str, problem: str) -> bool:
        if problem != "disabled":
            return False
        if "P2P" in variable:
            return nvlink
        return network if variable in {"NCCL_IB_DISABLE", "NCCL_NET"} else True

    yield from problems(context, there, "unset NCCL_P2P_DISABLE NCCL_IB_DISABLE NCCL_SHM_DISABLE")


def _looked(context: NodeContext) -> str:
    runs = len(list(context.series("job_ranks")))
    return f"{plural(runs, 'training run')} on this node; none disables NVLink, shared memory or InfiniBand"


CHECK = snapshot_check(
    "p2p-disabled",
    "job-transports",
    "Running jobs use the fast transports",
    ("job_environment",),
    _looked,
    _more,
)
