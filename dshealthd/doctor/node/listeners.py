"""No orphan of an earlier run listens on a rendezvous port."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.collectors.rendezvous import parse_ports
from dshealthd.doctor.check import Outcome, Result
from dshealthd.doctor.snapshot_check import snapshot_check
from dshealthd.plural import plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.node_context import NodeContext


def _more(context: NodeContext) -> Iterator[Result]:
    """Yield the listeners on rendezvous ports that may be orphans."""
    unknown = context.series.value("rendezvous_listeners", orphaned="unknown")
    if unknown:
        first, last = parse_ports(getattr(context.config.collectors["rendezvous"], "ports", ""))
        yield Result(
            Outcome.UNKNOWN,
            f"the owner of {plural(unknown, 'listener')} on rendezvous ports is unknown: it was "
            "not found in time, belongs to another user, or is in a container",
            remedy=f"sudo ss -ltnp 'sport >= :{first} and sport <= :{last}'",
            value=f"{unknown:g}",
            limit="0",
            source="dshealthd_rendezvous_listeners",
        )


def _looked(context: NodeContext) -> str:
    listeners = sum(point.value for point in context.series("rendezvous_listeners"))
    ports = context.series.value("rendezvous_ports") or 0.0
    return f"{plural(listeners, 'listener')} on {plural(ports, 'rendezvous port')}, none orphaned"


CHECK = snapshot_check(
    "address-in-use",
    "listeners",
    "No orphan holds a rendezvous port",
    ("rendezvous",),
    _looked,
    _more,
)
