"""The agents of other members accept a TCP connection from this node.

A connection is what tells whether packets pass: it goes through this node's rules, the network's
and the other node's, whatever writes them. Nothing is sent. Of many members, each node tries the
next few, so that each is tried by as many others.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from dshealthd.collectors.job_master import ConnectionOutcome, connect
from dshealthd.core import background
from dshealthd.core.address import listen_address
from dshealthd.core.text import plural
from dshealthd.doctor.check import Check, Outcome, Result
from dshealthd.doctor.job.sources.remedies import paste
from dshealthd.probe.members.membership import MembershipError
from dshealthd.probe.options import ProbeOptions
from dshealthd.probe.pairs import own_place

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dshealthd.doctor.node_context import NodeContext

MEMBERS = 16
"""Members that one node tries."""
TIMEOUT = 2.0
"""Seconds for a connection: the first packet is sent again after one."""
DEADLINE = 6.0
"""Seconds for all of them: a name server that is down costs 5 to 10."""
_MEANINGS = {
    ConnectionOutcome.REFUSED: "refuses: its agent is not running, or a firewall rejects",
    ConnectionOutcome.TIMED_OUT: f"does not answer within {TIMEOUT:g} s: a firewall or a dead "
    "route drops packets, or the node is down",
    ConnectionOutcome.UNREACHABLE: "is unreachable: no route, or a firewall rejects",
    ConnectionOutcome.NAME_UNKNOWN: "does not resolve here",
}


def _attempts(names: Sequence[str], port: int) -> dict[str, ConnectionOutcome | str]:
    """Return the outcome of a connection to each member, or why there is none. StartError."""
    found: dict[str, ConnectionOutcome | str] = {}
    changed = threading.Condition()

    def attempt(name: str) -> None:
        answer: ConnectionOutcome | str
        try:
            answer = connect(name, port, TIMEOUT)
        except OSError as error:
            answer = str(error)
        with changed:
            found[name] = answer
            changed.notify_all()

    for name in names:
        background.start(lambda name=name: attempt(name), "connect")  # type: ignore[misc] # bound here
    with changed:
        changed.wait_for(lambda: len(found) == len(names), DEADLINE)
        return {name: found.get(name, f"no answer within {DEADLINE:g} s") for name in names}


def _run(context: NodeContext) -> Iterator[Result]:
    options = context.config.section(ProbeOptions)
    if not options.wanted:
        yield Result(Outcome.OK, "not applicable: no other members are configured (probe.members)")
        return
    try:
        me, names = own_place(context.config, options.members)
    except MembershipError as error:
        yield Result(Outcome.UNKNOWN, f"the members are unknown: {'; '.join(error.errors)}")
        return
    at = names.index(me)
    others = [*names[at + 1 :], *names[:at]][:MEMBERS]
    _, port = listen_address(options.peer.listen_address)
    found = _attempts(others, port)
    for name, outcome in found.items():
        if outcome == ConnectionOutcome.OK:
            continue
        is_known = isinstance(outcome, ConnectionOutcome) and outcome in _MEANINGS
        yield Result(
            Outcome.WARNING if is_known else Outcome.UNKNOWN,
            f"{name}, port {port}: {_MEANINGS[outcome]}"
            if isinstance(outcome, ConnectionOutcome) and is_known
            else f"{name}, port {port}: {outcome}",
            remedy=paste("ssh", name, "systemctl status dshealthd")
            if outcome == ConnectionOutcome.REFUSED
            else f"getent ahosts {name}; nc -zv -w 3 {name} {port}",
            source="probe.members and probe.peer.listen_address",
            component=name,
        )
    reached = sum(outcome == ConnectionOutcome.OK for outcome in found.values())
    if reached == len(others):
        yield Result(
            Outcome.OK,
            f"the agents of {plural(reached, 'member')} accept connections to port {port}",
        )


CHECK: Check[NodeContext] = Check(
    "rendezvous-unreachable",
    "member-connections",
    "Other members accept connections from this node",
    _run,
    deadline=DEADLINE + 3,
)
