"""All nodes can reach the address where ranks meet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.check import Check, Outcome, Result
from dshealthd.doctor.job_sources import rendezvous
from dshealthd.doctor.job_sources.remedies import paste
from dshealthd.jobs.environment import is_loopback
from dshealthd.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.job_context import JobContext

REMEDY = "hostname -I"


def applies(context: JobContext) -> bool:
    """Whether the master address is given anywhere."""
    return bool(context.rendezvous.address)


def run(context: JobContext) -> Iterator[Result]:
    """Yield whatever prevents other nodes from reaching the master address."""
    meeting, nodes = context.rendezvous, context.layout.nodes
    address = meeting.address
    if not address:
        yield Result(Outcome.UNKNOWN, "no rendezvous address is given (MASTER_ADDR, --launch)")
        return
    shown = printable(address[:255])
    where = f"{shown} ({meeting.source})"
    several = nodes is not None and nodes > 1
    if is_loopback(address):
        yield _loopback(context, where, several=several)
        return
    resolved = rendezvous.resolve([address])[address]
    if not resolved.addresses:
        yield Result(
            Outcome.UNKNOWN if resolved.is_unknown else Outcome.CRITICAL,
            f"{where} does not resolve: {resolved.problem}",
            remedy=paste("getent", "hosts", address),
            component="MASTER_ADDR",
        )
        return
    if resolved.is_loopback and (several or nodes is None):
        yield Result(
            Outcome.CRITICAL if several else Outcome.WARNING,
            f"{where} resolves to {resolved.addresses[0]} here, which only this machine can reach:"
            " /etc/hosts or DNS gives the host name a loopback address",
            remedy=f"grep -n 127 /etc/hosts; {REMEDY}",
            value=resolved.addresses[0],
            component="MASTER_ADDR",
        )
        return
    hosts = [name for name, _ in context.layout.hosts]
    if hosts and address not in hosts:
        others = rendezvous.resolve(hosts)
        known = {one for host in others.values() for one in host.addresses}
        if all(host.addresses for host in others.values()) and known.isdisjoint(resolved.addresses):
            yield Result(
                Outcome.WARNING,
                f"{where} is {resolved.addresses[0]}, which is not the address of any host in the"
                " hostfile",
                remedy=f"getent hosts {hosts[0]}",
                value=resolved.addresses[0],
                component="MASTER_ADDR",
            )
            return
    yield Result(Outcome.OK, f"{where} is {', '.join(resolved.addresses[:3])}")


def _loopback(context: JobContext, where: str, *, several: bool) -> Result:
    nodes = context.layout.nodes
    if several:
        default = context.rendezvous.is_default
        option = " --master-addr is missing;" if default else ""
        return Result(
            Outcome.CRITICAL,
            f"{where} is each node's own loopback, but the job has {nodes} nodes:{option} only"
            " ranks on the same node would meet",
            remedy=REMEDY,
            value=context.rendezvous.address,
            limit="an address that all nodes can reach",
            component="MASTER_ADDR",
        )
    if nodes is None and not context.rendezvous.is_default:
        return Result(
            Outcome.UNKNOWN,
            f"{where} works for a single-node job, but the job's number of nodes is unknown",
            component="MASTER_ADDR",
        )
    return Result(Outcome.OK, f"{where} works for a single-node job")


CHECK: Check[JobContext] = Check(
    "rendezvous-unreachable",
    "master-address",
    "Other nodes can reach the rendezvous address",
    run,
    deadline=2 * rendezvous.RESOLVE_DEADLINE + 4,
)
