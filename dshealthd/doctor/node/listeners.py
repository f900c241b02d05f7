"""No orphan of an earlier run listens on a rendezvous port."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.snapshot_check import snapshot_check
from dshealthd.plural import plural

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext


def _looked(context: NodeContext) -> str:
    listeners = sum(point.value for point in context.series("rendezvous_listeners"))
    ports = context.series.value("rendezvous_ports") or 0.0
    return (
        f"{plural(listeners, 'listener')} on {plural(ports, 'rendezvous port')}, none left behind"
    )


CHECK = snapshot_check(
    "address-in-use",
    "listeners",
    "No orphan holds a rendezvous port",
    ("rendezvous",),
    _looked,
)
