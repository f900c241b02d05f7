"""Ports are free for rendezvous and for connections, and the two ranges do not overlap."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.collectors.rendezvous import parse_ports
from dshealthd.collectors.tcp_limits import parse_range, parse_reserved
from dshealthd.core.host import read
from dshealthd.doctor.check import Outcome, Result
from dshealthd.doctor.snapshot_check import snapshot_check
from dshealthd.plural import plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.node_context import NodeContext


def _more(context: NodeContext) -> Iterator[Result]:
    """Yield an overlap of ranges: a connection may hold the port that a job needs to bind."""
    options = context.config.collectors["rendezvous"]
    ports = getattr(options, "ports", "")
    first, last = parse_ports(ports)
    ephemeral = parse_range(read(context.host.proc("sys/net/ipv4/ip_local_port_range")))
    reserved = parse_reserved(read(context.host.proc("sys/net/ipv4/ip_local_reserved_ports")))
    free = sorted(set(range(first, last + 1)) & set(ephemeral) - reserved)
    if free:
        text = f"{ephemeral[0]}-{ephemeral[-1]}"
        yield Result(
            Outcome.WARNING,
            f"rendezvous ports {free[0]}-{free[-1]} are inside the ephemeral range {text}: an "
            "outgoing connection can hold one that a job needs to bind",
            remedy=f"sudo sysctl -w net.ipv4.ip_local_reserved_ports={free[0]}-{free[-1]}",
            value=f"{free[0]}-{free[-1]}",
            limit=f"outside of {text}",
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
