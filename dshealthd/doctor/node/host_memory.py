"""The host has free memory and does not swap."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.collectors.memory import parse_meminfo
from dshealthd.core.host import read
from dshealthd.doctor.check import Outcome, Result
from dshealthd.doctor.snapshot_check import snapshot_check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.node_context import NodeContext

SWAP_USED = 0.5
"""Share of swap in use above which it is a warning: idle pages alone rarely fill half of it."""
_GIB = 1 << 30


def _more(context: NodeContext) -> Iterator[Result]:
    fields = parse_meminfo(read(context.host.proc("meminfo")))
    if missing := [name for name in ("SwapTotal", "SwapFree") if name not in fields]:
        message = f"no {' and '.join(missing)} in meminfo"
        raise ValueError(message)
    total, free = fields["SwapTotal"], fields["SwapFree"]
    if total and (total - free) / total > SWAP_USED:
        yield Result(
            Outcome.WARNING,
            f"{(total - free) / _GIB:.1f} of {total / _GIB:.1f} GiB of swap are in use: offloaded "
            "optimizer states and data loaders become very slow once they are swapped out",
            remedy="sudo swapoff -a && sudo swapon -a",
            value=f"{(total - free) / total:.0%}",
            limit=f"{SWAP_USED:.0%}",
            source="dshealthd's own: idle pages alone rarely fill half of the swap",
            component="swap",
        )


def _looked(context: NodeContext) -> str:
    available = context.series.value("memory_available_bytes") or 0.0
    total = context.series.value("memory_total_bytes") or 0.0
    return f"{available / _GIB:.0f} of {total / _GIB:.0f} GiB of memory available"


CHECK = snapshot_check(
    "host-memory-pressure",
    "host-memory",
    "The host has free memory",
    ("memory", "pressure"),
    _looked,
    _more,
    reads_host=True,
)
