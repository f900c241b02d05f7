"""Panels of firing alerts, shared by several dashboards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana.panels import BLUE, ORANGE, RED, YELLOW
from grafana.queries import ROWS, parts
from grafana.tables import JOB_COLUMN, NODE_COLUMN, Column, rows

if TYPE_CHECKING:
    from grafana_foundation_sdk.models import dashboard

    from grafana.board import Source
    from grafana.panels import States

SEVERITIES: States = {
    "critical": ("page", RED),
    "warning": ("ticket", ORANGE),
    "info": ("info", BLUE),
}
PARTS = ("rank", "class", "gpu", "part", "peer", "leaf", "reason")
"""Labels with which an alert names the part of its node."""
KEPT = "severity, alertname, symptom, cluster, node, training_job, which"
RULES_LOADED = 'sum(ALERTS{cluster=~"$cluster|",alertname="DshealthdWatchdog",alertstate="firing"})'
"""Empty if Prometheus evaluates no rules: then the absence of alerts means nothing. The Watchdog is
of the server, and has a label `cluster` only where that is an external label.
"""


def firing(
    source: Source,
    *matchers: str,
    title: str = "Firing alerts",
    limit: int = ROWS,
    size: tuple[int, int],
) -> dashboard.Panel:
    """Return a table of firing alerts, the latest `limit` of each severity, pages first.

    An alert is in it if it has the labels of any of `matchers`.
    """

    def fired(labels: str) -> str:
        # The value of ALERTS_FOR_STATE is the time at which the alert's condition became true.
        return f"""ALERTS_FOR_STATE{{{labels}}} and ignoring (alertstate)
        ALERTS{{{labels},alertstate="firing"}}"""

    def since(severity: str) -> str:
        found = " or ".join(fired(f'{labels},severity="{severity}"') for labels in matchers)
        return f"topk({limit}, 1000 * min by ({KEPT}) ({parts(found, *PARTS)}))"

    return rows(
        title,
        f"""Firing alerts, pages first: at most the latest {limit} of each severity. "Since" is when
        the condition became true. The runbook says how to confirm and fix it.""",
        [
            Column("Severity", "severity", states=SEVERITIES, width=90),
            Column("Alert", "alertname", link=source.runbook()),
            NODE_COLUMN,
            JOB_COLUMN,
            Column("Part", "which"),
            Column(
                "Since",
                expr=f"{since('critical')} or {since('warning')}",
                unit="dateTimeFromNow",
                width=150,
            ),
            Column("Symptom", "symptom", link=source.runbook()),
        ],
        sort=("Severity", False),
        size=size,
    )


def by_rule(source: Source, *, size: tuple[int, int]) -> dashboard.Panel:
    """Return a table of firing rules with the number of alerts of each.

    It shows a fault that affects many nodes.
    """
    firing = 'alertstate="firing",severity=~"critical|warning|info"'
    return rows(
        "Firing alerts by rule",
        "Number of firing alerts of each rule: a leaf that takes down forty nodes is one line.",
        [
            Column("Severity", "severity", states=SEVERITIES, width=90),
            Column("Alert", "alertname", link=source.runbook()),
            Column(
                "Alerts",
                expr=f"""count by (severity, alertname, symptom)
                (ALERTS{{@alerts,{firing}}} or ALERTS{{@server,{firing}}})""",
                steps=((1, YELLOW), (10, ORANGE), (100, RED)),
                width=80,
            ),
            Column("Symptom", "symptom", link=source.runbook()),
        ],
        sort=("Alerts", True),
        size=size,
    )
