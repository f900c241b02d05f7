"""The address and port where ranks meet can be used."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from dshealthd.core.host import read
from dshealthd.doctor.check import Result, check_of, critical, ok, unknown, warning
from dshealthd.doctor.job.sources import rendezvous
from dshealthd.doctor.remedies import paste
from dshealthd.findings.finding import State
from dshealthd.jobs.environment import is_loopback
from dshealthd.linux.local_network import local_ports
from dshealthd.linux.sock_diag import TcpState
from dshealthd.linux.tcp_sockets import parse_tcp
from dshealthd.probe.members.own_name import local_addresses

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.job.context import JobContext


REMEDY = "hostname -I"
PRIVILEGED = 1024
"""The kernel's default of net.ipv4.ip_unprivileged_port_start (ip(7))."""
MAX_SOCKETS = 16 << 20
"""Maximum bytes of `/proc/net/tcp`: about 100,000 sockets."""


def _address(context: JobContext, address: str) -> Iterator[Result]:
    meeting, nodes = context.rendezvous, context.layout.nodes
    shown = address[:255]
    where = f"{shown} ({meeting.source})"
    several = nodes is not None and nodes > 1
    if is_loopback(address):
        yield _loopback(context, where, several=several)
        return
    resolved = rendezvous.resolve([address])[address]
    if not resolved.addresses:
        yield Result(
            State.UNKNOWN if resolved.is_unknown or context.runs_elsewhere else State.CRITICAL,
            f"{where} does not resolve: {resolved.problem}",
            remedy=paste("getent", "hosts", address),
            component="MASTER_ADDR",
        )
        return
    if resolved.is_loopback and (several or nodes is None):
        yield Result(
            State.CRITICAL if several else State.WARNING,
            f"{where} resolves to {resolved.addresses[0]} here, which only this machine can reach:"
            " /etc/hosts or DNS gives the host name a loopback address",
            remedy=f"grep -n 127 /etc/hosts; {REMEDY}",
            value=resolved.addresses[0],
            component="MASTER_ADDR",
        )
        return
    hosts = context.hosts
    if hosts and address not in hosts:
        others = rendezvous.resolve(hosts)
        known = {one for host in others.values() for one in host.addresses}
        if all(host.addresses for host in others.values()) and known.isdisjoint(resolved.addresses):
            yield warning(
                f"{where} is {resolved.addresses[0]}, which is not the address of any node of the"
                " job",
                remedy=f"getent hosts {hosts[0]}",
                value=resolved.addresses[0],
                component="MASTER_ADDR",
            )
            return
    yield ok(f"{where} is {', '.join(resolved.addresses[:3])}")


def _loopback(context: JobContext, where: str, *, several: bool) -> Result:
    nodes = context.layout.nodes
    if several:
        default = context.rendezvous.is_default
        option = " --master-addr is missing;" if default else ""
        return critical(
            f"{where} is each node's own loopback, but the job has {nodes} nodes:{option} only"
            " ranks on the same node would meet",
            remedy=REMEDY,
            value=context.rendezvous.address,
            limit="an address that all nodes can reach",
            component="MASTER_ADDR",
        )
    if nodes is None and not context.rendezvous.is_default:
        return unknown(
            f"{where} works for a single-node job, but the job's number of nodes is unknown",
            component="MASTER_ADDR",
        )
    return ok(f"{where} works for a single-node job")


ADDRESS = check_of(
    lambda job: job.rendezvous.address,
    "no rendezvous address is given (MASTER_ADDR, -- COMMAND)",
    "rendezvous-unreachable",
    "master-address",
    "Other nodes can reach the rendezvous address",
    _address,
    deadline=2 * rendezvous.RESOLVE_DEADLINE + 4,
)


def _port(context: JobContext, written: str) -> Iterator[Result]:
    meeting = context.rendezvous
    port = meeting.port
    if port == 0 and meeting.source == "--rdzv-endpoint" and context.layout.nodes == 1:
        yield ok("0 lets the kernel choose a free port")
        return
    if port is None or not 0 < port <= rendezvous.MAX_PORT:
        yield critical(
            f"{written[:40]!r} is not a port of the rendezvous",
            remedy="dshealthd free-port",
            value=written[:40],
            limit=f"1 to {rendezvous.MAX_PORT}",
            component="MASTER_PORT",
        )
        return
    if context.runs_elsewhere or not _is_here(context):
        yield ok(f"{port} is a port; whether it is free is seen where the job's script runs")
        return
    with contextlib.suppress(ValueError, ArithmeticError, OSError):  # cut off, or hidden
        yield _judged(port, _sockets(context))
    if (result := _range(context, port)) is not None:
        yield result


def _is_here(context: JobContext) -> bool:
    """Return whether this node opens the port, as far as known."""
    hosts = context.hosts
    address = context.rendezvous.address or "".join(hosts[:1])
    if not address:
        return True
    resolved = rendezvous.resolve([address])[address]
    return resolved.is_loopback or bool({*local_addresses(context.host)} & {*resolved.addresses})


def _sockets(context: JobContext) -> str:
    text = read(context.host.proc("net/tcp"), MAX_SOCKETS)
    with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
        text += read(context.host.proc("net/tcp6"), MAX_SOCKETS)
    return text


def _judged(port: int, tables: str) -> Result:
    states = {found.state for found in parse_tcp(tables) if found.port == port}
    if TcpState.LISTEN in states:
        return critical(
            f"port {port} is taken on this node: something listens on it",
            remedy=f"ss -Hltnp 'sport = :{port}'",
            value=str(port),
            limit="a port without a listener",
            component="MASTER_PORT",
        )
    if states:
        kind = "in TIME_WAIT" if states == {TcpState.TIME_WAIT} else "in use"
        return warning(
            f"port {port} has connections {kind} on this node, from an earlier run or"
            " another program",
            remedy="dshealthd free-port",
            value=str(port),
            component="MASTER_PORT",
        )
    return ok(f"port {port} is free on this node now")


def _range(context: JobContext, port: int) -> Result | None:
    """Return what is wrong with the port number itself; None if nothing is."""
    if port < PRIVILEGED:
        return warning(
            f"port {port} is privileged: only root may open it",
            remedy="dshealthd free-port",
            value=str(port),
            limit=str(PRIVILEGED),
            source="ip(7), net.ipv4.ip_unprivileged_port_start",
            component="MASTER_PORT",
        )
    try:
        assigned = local_ports(context.host)
    except (OSError, ValueError, ArithmeticError) as error:
        return unknown(
            f"whether the kernel assigns port {port} to connections is unknown: {error}",
            source="net.ipv4.ip_local_port_range",
            component="MASTER_PORT",
        )
    if port in assigned:
        return warning(
            f"port {port} is in the ephemeral range, so any connection may take it before the job",
            remedy="dshealthd free-port",
            value=str(port),
            limit=f"outside {assigned}",
            source="net.ipv4.ip_local_port_range and ip_local_reserved_ports",
            component="MASTER_PORT",
        )
    return None


PORT = check_of(
    lambda job: job.rendezvous.port_text,
    "no rendezvous port is given (MASTER_PORT)",
    "address-in-use",
    "master-port",
    "The rendezvous port is free",
    _port,
    deadline=rendezvous.RESOLVE_DEADLINE + 4,
)
