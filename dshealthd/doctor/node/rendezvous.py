"""Ports and connections with which ranks meet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.collectors.rendezvous import parse_ports
from dshealthd.core.text import plural
from dshealthd.doctor.check import Outcome, Result
from dshealthd.doctor.snapshot_check import snapshot_check
from dshealthd.linux.local_network import local_ports

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.node_context import NodeContext


def _listeners_problems(context: NodeContext) -> Iterator[Result]:
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


def _listeners(context: NodeContext) -> str:
    listeners = sum(point.value for point in context.series("rendezvous_listeners"))
    ports = context.series.value("rendezvous_ports") or 0.0
    return f"{plural(listeners, 'listener')} on {plural(ports, 'rendezvous port')}, none orphaned"


LISTENERS = snapshot_check(
    "address-in-use",
    "listeners",
    "No orphan holds a rendezvous port",
    ("rendezvous",),
    _listeners,
    _listeners_problems,
)


def _ports_problems(context: NodeContext) -> Iterator[Result]:
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


def _ports(context: NodeContext) -> str:
    series = context.series
    used = series.value("tcp_ephemeral_ports_used") or 0.0
    total = series.value("tcp_ephemeral_ports") or 0.0
    waiting = series.value("rendezvous_sockets", state="time_wait") or 0.0
    return (
        f"{used:g} of {total:g} ephemeral ports in use, {plural(waiting, 'socket')} on "
        "rendezvous ports in TIME_WAIT"
    )


PORTS = snapshot_check(
    "time-wait",
    "ports",
    "Ports are free, and rendezvous ports are not ephemeral",
    ("tcp", "tcp_limits", "rendezvous"),
    _ports,
    _ports_problems,
    reads_host=True,
)


def _rendezvous_connections(context: NodeContext) -> str:
    name = "rendezvous_client_sockets"
    connected = context.series.value(name, state="established") or 0.0
    waiting = context.series.value(name, state="syn_sent") or 0.0
    return (
        f"{plural(connected, 'connection')} to rendezvous ports, "
        f"{f'{waiting:g}' if waiting else 'none'} waiting for an answer"
    )


RENDEZVOUS_CONNECTIONS = snapshot_check(
    "rendezvous-unreachable",
    "rendezvous-connections",
    "Connections to rendezvous ports are answered",
    ("rendezvous",),
    _rendezvous_connections,
)
