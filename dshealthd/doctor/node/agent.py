"""The agent of this node, its files and its probes, and the agents of other members."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from dshealthd.core.sockets import listen_address
from dshealthd.core.text import plural
from dshealthd.doctor.check import Check, Result, ok, unknown
from dshealthd.doctor.connection import ConnectionOutcome, connect
from dshealthd.doctor.job.sources.rendezvous import in_threads
from dshealthd.doctor.remedies import paste
from dshealthd.doctor.snapshot_check import snapshot_check
from dshealthd.findings.agent import FILES
from dshealthd.findings.finding import State
from dshealthd.probe.cli.pairs import own_place
from dshealthd.probe.members.hostlist import MembershipError
from dshealthd.probe.observation import Outcome as Ended
from dshealthd.probe.options import ProbeOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dshealthd.doctor.node_context import NodeContext

_TELL_NOTHING = frozenset({Ended.DECLINED, Ended.INCONCLUSIVE})
MOST_MEMBERS = 16
"""Members that one node tries."""
TIMEOUT = 2.0
"""Seconds for a connection: the first packet is sent again after one."""
DEADLINE = 6.0
"""Seconds for all of them: a name server that is down costs 5 to 10."""
_MEANINGS: Mapping[str, str] = {
    ConnectionOutcome.REFUSED: "refuses: its agent is not running, or a firewall rejects",
    ConnectionOutcome.TIMED_OUT: f"does not answer within {TIMEOUT:g} s: a firewall or a dead "
    "route drops packets, or the node is down",
    ConnectionOutcome.UNREACHABLE: "is unreachable: no route, or a firewall rejects",
    ConnectionOutcome.NAME_UNKNOWN: "does not resolve here",
}


def _agent(context: NodeContext) -> str:
    stuck = sum(point.value for point in context.series("worker_stuck"))
    failed = [file for name, file in FILES.items() if context.series.value(name) == 0]
    files = f"reloaded, but not: {', '.join(failed)}" if failed else "every file was reloaded"
    return f"{plural(stuck, 'worker')} cannot be killed; {files}"


AGENT = snapshot_check(
    "collector-failing",
    "agent",
    "No worker of the agent is stuck, and it runs with its current files",
    (),
    _agent,
)


MAINTENANCE = snapshot_check(
    "maintenance",
    "maintenance",
    "This node is not in maintenance",
    (),
    "this node is not in maintenance",
)


def _telling(context: NodeContext) -> float:
    """Return how many probe rounds say something about their members."""
    return sum(
        point.value
        for point in context.series("probe_rounds_total")
        if point.labels["outcome"] not in _TELL_NOTHING
    )


def _unless_probed(context: NodeContext) -> Iterator[Result]:
    """Yield an unknown result where probes run but no round says anything yet."""
    if context.series.value("probe_up") is not None and not _telling(context):
        yield unknown(
            "probes are configured, but no round with another node has had a result yet",
            remedy="dshealthd metrics | grep dshealthd_probe_rounds_total",
        )


def _coverage(none: str) -> Callable[[NodeContext], str]:
    """Return a summary of what probes covered; `none` completes "none that ..."."""

    def summary(context: NodeContext) -> str:
        if context.series.value("probe_up") is None:
            return "no probes are configured"
        return f"{plural(_telling(context), 'round')} with other nodes; none {none}"

    return summary


LINK_SUSPECTS = snapshot_check(
    "bad-link",
    "link-suspects",
    "No probe suspects a link of this node",
    (),
    _coverage("suspects a link of this node"),
    _unless_probed,
    alerts="DshealthdLink",
)


PROBE_FAILURES = snapshot_check(
    "nccl-remote-error",
    "probe-failures",
    "Probes reach the other nodes",
    (),
    _coverage("suspects this node of failing"),
    _unless_probed,
)


def _probe_rounds(context: NodeContext) -> str:
    up = context.series.value("probe_up")
    if up is None:
        return "no probes are configured"
    return "probes run" if up else "probes do not run at present"


PROBE_ROUNDS = snapshot_check("probes-missing", "probe-rounds", "Probes run", (), _probe_rounds)


STRAGGLER = snapshot_check(
    "straggler",
    "straggler",
    "This node is as fast as its peers in probes",
    (),
    _coverage("suspects this node of being slow"),
    _unless_probed,
)


def _connect(name: str, port: int) -> ConnectionOutcome | str:
    """Return the outcome of a connection to a member, or why there is none."""
    try:
        return connect(name, port, TIMEOUT)
    except OSError as error:
        return str(error)


def _run(context: NodeContext) -> Iterator[Result]:
    options = context.config.section(ProbeOptions)
    if not options.wanted:
        yield ok("not applicable: no other members are configured (probe.members)")
        return
    try:
        me, names = own_place(context.config, options.members)
    except MembershipError as error:
        yield unknown(f"the members are unknown: {'; '.join(error.errors)}")
        return
    at = names.index(me)
    others = [*names[at + 1 :], *names[:at]][:MOST_MEMBERS]
    _, port = listen_address(options.peer.listen_address)
    late = f"no answer within {DEADLINE:g} s"
    found = in_threads(others, functools.partial(_connect, port=port), DEADLINE, late)
    for name, outcome in found.items():
        if outcome == ConnectionOutcome.OK:
            continue
        meaning = _MEANINGS.get(outcome)
        yield Result(
            State.WARNING if meaning else State.UNKNOWN,
            f"{name}, port {port}: {meaning or outcome}",
            remedy=paste("ssh", name, "systemctl status dshealthd")
            if outcome == ConnectionOutcome.REFUSED
            else f"getent ahosts {name}; nc -zv -w 3 {name} {port}",
            source="probe.members and probe.peer.listen_address",
            component=name,
        )
    reached = sum(outcome == ConnectionOutcome.OK for outcome in found.values())
    if reached == len(others):
        yield ok(f"the agents of {plural(reached, 'member')} accept connections to port {port}")


CONNECTIONS: Check[NodeContext] = Check(
    "rendezvous-unreachable",
    "member-connections",
    "Other members accept connections from this node",
    _run,
    deadline=DEADLINE + 3,
)
