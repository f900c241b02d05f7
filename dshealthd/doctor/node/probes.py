"""What probes with other nodes have found of this one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.core.text import plural
from dshealthd.doctor.check import Outcome, Result
from dshealthd.doctor.snapshot_check import snapshot_check
from dshealthd.probe.observation import Outcome as Ended

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.node_context import NodeContext


_TELL_NOTHING = frozenset({Ended.DECLINED, Ended.INCONCLUSIVE})


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
        yield Result(
            Outcome.UNKNOWN,
            "probes are configured, but no round with another node has had a result yet",
            remedy="dshealthd metrics | grep dshealthd_probe_rounds_total",
        )


def _coverage(context: NodeContext, none: str) -> str:
    """Return what probes covered; `none` completes "none that ..."."""
    if context.series.value("probe_up") is None:
        return "no probes are configured"
    return f"{plural(_telling(context), 'round')} with other nodes; none {none}"


def _link_suspects(context: NodeContext) -> str:
    return _coverage(context, "suspects a link of this node")


LINK_SUSPECTS = snapshot_check(
    "bad-link",
    "link-suspects",
    "No probe suspects a link of this node",
    (),
    _link_suspects,
    _unless_probed,
    alerts="DshealthdLink",
)


def _members(context: NodeContext) -> str:
    members = context.series.value("members")
    if context.series.value("probe_up") is None or members is None:
        return "no probes are configured"
    return f"none of the {members:g} members of the probes disagrees with this node"


MEMBERS = snapshot_check(
    "members-disagree",
    "members",
    "Members of the probes have the same list and settings",
    (),
    _members,
)


def _probe_failures(context: NodeContext) -> str:
    return _coverage(context, "suspects this node of failing")


PROBE_FAILURES = snapshot_check(
    "nccl-remote-error",
    "probe-failures",
    "Probes reach the other nodes",
    (),
    _probe_failures,
    _unless_probed,
)


def _probe_rounds(context: NodeContext) -> str:
    up = context.series.value("probe_up")
    if up is None:
        return "no probes are configured"
    return "probes run" if up else "probes do not run at present"


PROBE_ROUNDS = snapshot_check(
    "probes-missing",
    "probe-rounds",
    "Probes run",
    (),
    _probe_rounds,
)


def _straggler(context: NodeContext) -> str:
    return _coverage(context, "suspects this node of being slow")


STRAGGLER = snapshot_check(
    "straggler",
    "straggler",
    "This node is as fast as its peers in probes",
    (),
    _straggler,
    _unless_probed,
)
