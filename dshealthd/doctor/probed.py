"""What probes have covered, for the checks that rely on their suspects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.check import Outcome, Result
from dshealthd.plural import plural
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


def unless_probed(context: NodeContext) -> Iterator[Result]:
    """Yield an unknown result where probes run but no round says anything yet."""
    if context.series.value("probe_up") is not None and not _telling(context):
        yield Result(
            Outcome.UNKNOWN,
            "probes are configured, but no round with another node has had a result yet",
            remedy="dshealthd metrics | grep dshealthd_probe_rounds_total",
        )


def looked(context: NodeContext, none: str) -> str:
    """Return what probes covered; `none` completes "none that ..."."""
    if context.series.value("probe_up") is None:
        return "no probes are configured"
    return f"{plural(_telling(context), 'round')} with other nodes; none {none}"
