"""Ports are free for rendezvous and for connections, and the two ranges do not overlap."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.collectors.rendezvous import parse_ports
from dshealthd.doctor.check import Outcome, Result
from dshealthd.doctor.snapshot_check import snapshot_check
from dshealthd.linux.local_network import local_ports
from dshealthd.plural import plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.node_context import NodeContext


def _more(context: NodeContext) -> Iterator[Result]:
    """Yield an overlap of ranges: a connection may hold the port that a job needs to bind."""
    options = context.config.collectors["rendezvous"]
    ports = getattr(options, "ports", "")
    first, last = parse_ports(ports)
    assigned = local_ports(context.host)
    free = [port for port in range(first, last + 1) if port in assigned]
    if free:
        yield Result(
            Outcome.WARNING,
            f"rendezvous ports {free[0]}-{free[-1]} are inside the ephemeral range {assigned}: an "
            "outgoing connection can hold one that a job needs to bind",
            remedy=f"sudo {assigned.reserving(free[0], free[-1])}",
            value=f"{free[0]}-{free[-1]}",
            limit=f"outside of {assigned}",
            source="net.ipv4.ip_local_port_range",
            component=f"ports {free[0]}-{free[-1]}",
        )


def _looked(context: NodeContext) -> str:
    series = context.series
    used = series.value("tcp_ephemeral_ports_used") or 0.0
    total = series.value("tcp_ephemeral_ports") or 0.0
    waiting = series.value("rendezvous_sockets", state="time_wait") or 0.0
    return (
        f"{used:g} of {total:g} ephemeral ports in use, {plural(waiting, 'socket')} on "
        "rendezvous ports in TIME_WAIT"
    )


CHECK = snapshot_check(
    "time-wait",
    "ports",
    "Ports are free, and rendezvous ports are not ephemeral",
    ("tcp", "tcp_limits", "rendezvous"),
    _looked,
    _more,
    reads_host=True,
)
