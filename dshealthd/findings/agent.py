"""Findings about the agent, its probes' suspects on this node, and maintenance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from dshealthd.core.collector import gauge
from dshealthd.findings.finding import Sign
from dshealthd.findings.past import MINUTES_15
from dshealthd.findings.series import Series, each, flagged, over, short_name

TROUBLE, PROBES = "DshealthdAgentTrouble", "DshealthdProbesTrouble"
CRASHED = gauge(
    "dshealthd_agent_crashed",
    "1 if the previous agent on this node ended without a signal.",
    "at",
)
"""Derived by the judge, for their past; not exported."""
HALF_AN_HOUR, CRASHES = 1800.0, 2
"""So many crashes within this time may be by hand: `kill -9`."""
FILES = {
    "config_last_reload_successful": "configuration",
    "web_config_last_reload_successful": "web configuration",
    "members_last_reload_successful": "list of members",
    "probe_peer_credentials_last_reload_successful": "keys of the peer API",
}
"""Files that are reloaded when they change, as findings name them."""
REJECTED = (
    "it cannot use the new file; the previous one is still in force, and a restart would fail"
)
OF_LINKS = {
    "slow": "it is slower than before, while what it joins is healthy otherwise",
    "ambiguous": "no third node can tell whether one of its ends or the path is the culprit",
}
"""Why a link or an adapter is a suspect, in words."""
FAILED = frozenset(("hung", "failed", "unreachable", "refused", "intermittent"))
"""Reasons of a suspect that mean probes do not get through."""


def agent_troubles(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about what keeps the agent from working."""
    waiting = series.has("path_failing", reason=("timeout", "stuck"))
    for labels, value in series("worker_stuck"):
        if labels["worker"] != "device" and value > 0 and not waiting:
            reason = "a worker hangs in the kernel, as whatever reads the same would"
            yield Sign(TROUBLE, reason, labels, value=value, source="worker_stuck", hold=120.0)
    name = "kernel_log_records_lost_total"
    for _, lost in series.rise(name, MINUTES_15):
        if lost > 0:
            reason = "records were lost before they were read; an Xid may be among them"
            yield Sign(TROUBLE, reason, part="kernel log", value=lost, source=name)
    crashes = len(list(series.highest(short_name(CRASHED), HALF_AN_HOUR)))
    if crashes > CRASHES:
        name, reason = "process_start_time_seconds", "it is crash-looping"
        yield Sign(TROUBLE, reason, part="agent", value=crashes, limit=CRASHES, source=name)
    for name, file in FILES.items():
        yield from flagged(series, TROUBLE, name, REJECTED, at=0.0, part=file, hold=60.0)


def probes(series: Series, wall: float) -> Iterator[Sign]:
    """Yield findings about what keeps this node from probes."""
    reason = "probes cannot run, as members, key or address are unusable"
    yield from flagged(series, PROBES, "probe_up", reason, at=0.0)
    name = "probe_last_round_timestamp_seconds"
    # With no round since the agent started, the silence counts from that start.
    started = series.value("process_start_time_seconds")
    last = max((value for _, value in series(name)), default=started)
    members = series.value("members")
    alone = members is None or members <= 1
    if series.value("probe_up") == 1 and not alone and last is not None:
        reason = "no round with any peer has taken place for a long time"
        silent = over(series, PROBES, wall - last, "probe_silent_seconds", name, reason)
        yield from each(silent, apart="round", hold=120.0, since=last)
    name = "probe_peer_disagrees"
    for what, peers in Counter(labels["reason"] for labels, _ in series(name)).items():
        reason = f"it differs from peers ({what}), and has no rounds with them"
        yield Sign(PROBES, reason, part=what, value=float(peers), source=name)


def suspects_here(series: Series, _wall: float, *, name: str) -> Iterator[Sign]:
    """Yield the probes' suspects that are the node `name`, its parts or its links.

    A suspect elsewhere is not a finding about this node.
    """
    for labels, value in series("suspect"):
        kind, component, reason = labels["kind"], labels["component"], labels["reason"]
        ends = component.split("--") if kind == "link" else [component.partition("/")[0]]
        if not value or not name or name not in ends or kind == "leaf":
            continue
        if reason == "corrupted":
            alert, reason = "DshealthdComputesWrong", "a collective completed with a wrong result"
        elif reason in FAILED:
            alert = "DshealthdProbeFails"
        elif kind in {"link", "nic"}:
            alert, reason = "DshealthdLinkSuspect", OF_LINKS.get(reason, reason)
        elif reason == "slow":
            alert = "DshealthdNodeSlow"
        else:
            continue  # ambiguous: it may not be this node at all
        # Extra rounds have confirmed a hang; a node that is just starting fails, too.
        hold = 0.0 if reason == "hung" else None
        yield Sign(alert, reason, part=component, hold=hold, source="suspect")


def maintenance(series: Series, wall: float) -> Iterator[Sign]:
    """Yield the finding that the node is in maintenance, with the seconds left."""
    name = "maintenance_end_timestamp_seconds"
    end = series.value(name)
    if end is not None and end > wall:
        sources = (
            f"{labels['source']}: {labels['reason'] or 'no reason given'}"
            for labels, _ in series("maintenance_info")
        )
        yield Sign(
            "DshealthdMaintenance",
            "; ".join(sources),
            value=end - wall,
            source=name,
            since=series.value("maintenance_begin_timestamp_seconds"),
        )


RULES = (agent_troubles, probes, maintenance)
