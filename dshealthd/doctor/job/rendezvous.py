"""The address and port where ranks meet can be used."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dshealthd.core.host import read
from dshealthd.doctor.check import Result, check_of, critical, ok, unknown, warning
from dshealthd.doctor.job.sources import rendezvous
from dshealthd.doctor.remedies import paste
from dshealthd.jobs.environment import is_loopback
from dshealthd.linux.local_network import local_ports
from dshealthd.linux.sock_diag import TcpState
from dshealthd.linux.tcp_tables import parse_tcp
from dshealthd.probe.members.local_membership import is_local

if TYPE_CHECKING:
    from dshealthd.doctor.job.context import JobContext


REMEDY = "hostname -I"
PRIVILEGED = 1024
"""The kernel's default of net.ipv4.ip_unprivileged_port_start (ip(7))."""
FEWEST = 4
"""GPUs of the smallest nodes on which collectives are trained (HGX boards have 4 or 8)."""
MAX_SOCKETS = 16 << 20
"""Maximum bytes of `/proc/net/tcp`: about 100,000 sockets."""


def _address(context: JobContext, address: str) -> Iterator[Result]:
    meeting, nodes = context.rendezvous, context.layout.nodes
    where = f"{address[:255]} ({meeting.source})"
    several = nodes is not None and nodes > 1
    if is_loopback(address):
        if several:
            missing = meeting.source.removeprefix("the default of ")
            why = " (only the static rendezvous reads --master-addr)" * ("rdzv" in missing)
            default = f" {missing} is missing{why};" if meeting.is_default else ""
            yield critical(
                f"{where} is each node's own loopback, but the job has {nodes} nodes:{default} only"
                " ranks on the same node would meet",
                REMEDY,
                component="MASTER_ADDR",
            )
        elif nodes is None and not meeting.is_default:
            known = "works for a single-node job, but the job's number of nodes is unknown"
            yield unknown(f"{where} {known}", component="MASTER_ADDR")
        return
    resolved = rendezvous.resolve([address])[address]
    if not resolved.addresses:
        make = unknown if resolved.is_unknown or context.runs_elsewhere else critical
        text = f"{where} does not resolve: {resolved.problem}"
        yield make(text, paste("getent", "hosts", address), component="MASTER_ADDR")
        return
    if resolved.is_loopback and (several or nodes is None):
        make = critical if several else warning
        yield make(
            f"{where} resolves to {resolved.addresses[0]} here, which only this machine can reach:"
            " /etc/hosts or DNS gives the host name a loopback address",
            f"grep -n 127 /etc/hosts; {REMEDY}",
            component="MASTER_ADDR",
        )
        return
    hosts = context.hosts
    others = rendezvous.resolve(hosts) if hosts and address not in hosts else {}
    known_addresses = {one for host in others.values() for one in host.addresses}
    is_known = others and all(host.addresses for host in others.values())
    if is_known and known_addresses.isdisjoint(resolved.addresses):
        yield warning(
            f"{where} is {resolved.addresses[0]}, which is not the address of any node of the job",
            f"getent hosts {hosts[0]}",
            component="MASTER_ADDR",
        )


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
        return  # the kernel chooses a free port
    remedy = "dshealthd free-port"
    if port is None or not 0 < port <= rendezvous.MAX_PORT:
        text = f"{written[:40]!r} is not a port of the rendezvous, 1 to {rendezvous.MAX_PORT}"
        yield critical(text, remedy, component="MASTER_PORT")
        return
    if _is_shared(context):
        yield warning(
            f"tasks of the array that run on one node at once want the same port {port}",
            "dshealthd free-port",
            source="sbatch(1), --array",
            component="MASTER_PORT",
        )
        return
    if context.runs_elsewhere or not _is_here(context):
        yield ok(f"{port} is a port; whether it is free is seen where the job's script runs")
        return
    states = set()
    try:
        states = {found.state for found in parse_tcp(_sockets(context)) if found.port == port}
    except (OSError, ValueError, ArithmeticError) as error:  # hidden, or cut off
        yield unknown(f"whether port {port} is free is unknown: {error}", component="MASTER_PORT")
    if TcpState.LISTEN in states:
        taken = f"port {port} is taken on this node: something listens on it"
        yield critical(taken, f"ss -Hltnp 'sport = :{port}'", component="MASTER_PORT")
    elif states:
        kind = "in TIME_WAIT" if states == {TcpState.TIME_WAIT} else "in use"
        who = "from an earlier run or another program"
        text = f"port {port} has connections {kind} on this node, {who}"
        yield warning(text, remedy, component="MASTER_PORT")
    if port < PRIVILEGED:
        text = f"port {port} is privileged: only root may open it"
        yield warning(text, remedy, source="ip(7)", component="MASTER_PORT")
        return
    try:
        is_ephemeral = port in local_ports(context.host)
    except (OSError, ValueError, ArithmeticError) as error:
        text = f"whether the kernel assigns port {port} to connections is unknown: {error}"
        yield unknown(text, component="MASTER_PORT")
        return
    if is_ephemeral:
        yield warning(
            f"port {port} is in the ephemeral range, so any connection may take it before the job",
            remedy,
            source="net.ipv4.ip_local_port_range and ip_local_reserved_ports",
            component="MASTER_PORT",
        )


def _is_shared(context: JobContext) -> bool:
    """Return whether jobs of one array may share a node, as one takes less than a node has."""
    options, gpus = context.slurm_options, context.gpus_per_node
    inner = context.launcher.find("torchrun") if context.launcher else None
    alone = "exclusive" in options or options.get("array", "%1").endswith("%1")
    standalone = inner is not None and "standalone" in inner.options
    return not (alone or standalone) and context.layout.nodes == 1 and (gpus or FEWEST) < FEWEST


def _is_here(context: JobContext) -> bool:
    """Return whether this node opens the port, as far as known."""
    address = context.rendezvous.address or "".join(context.hosts[:1])
    if not address:
        return True
    resolved = rendezvous.resolve([address])[address]
    return resolved.is_loopback or any(map(is_local, resolved.addresses))


def _sockets(context: JobContext) -> str:
    text = read(context.host.proc("net/tcp"), MAX_SOCKETS)
    with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
        text += read(context.host.proc("net/tcp6"), MAX_SOCKETS)
    return text


PORT = check_of(
    lambda job: job.rendezvous.port_text,
    "no rendezvous port is given (MASTER_PORT)",
    "address-in-use",
    "master-port",
    "The rendezvous port is free",
    _port,
    deadline=rendezvous.RESOLVE_DEADLINE + 4,
)
