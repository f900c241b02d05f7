"""The dashboard *Fleet*: which nodes need me now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana import alerts, trends, trouble
from grafana.board import NO_PROBES, Board, Row, Source, cluster, data_source
from grafana.panels import GRAY, GREEN, ORANGE, PURPLE, RED, number, squares, timeline
from grafana.queries import NODES, ROWS, SERIES, increase, most, worst_of
from grafana.tables import NODE_COLUMN, Column, rows

if TYPE_CHECKING:
    from grafana_foundation_sdk.models import dashboard

    from grafana.panels import States, Steps

NO_RULES = "no rules"
STATES: States = {
    0: ("no alerts", GREEN),
    1: ("ticket", ORANGE),
    2: ("page", RED),
    3: ("agent down", PURPLE),
}
STEPS: Steps = ((None, GRAY), (0, GREEN), (1, ORANGE), (2, RED), (3, PURPLE))
ANY: Steps = ((None, GREEN), (1, RED))
ANSWERING = "max by (cluster, instance) (up{@fleet})"
"""1 for each node whose agent answers, 0 for others; also where two scrape jobs have it."""
SEVERITY = "max by (cluster, node) (dshealthd:node:severity{@rules} or 3 + 0 * (up{@fleet} == 0))"
"""A node's state, a key of STATES."""


def board(source: Source) -> Board:
    """Return the dashboard *Fleet*."""
    return Board(
        uid="dshealthd-fleet",
        title="dshealthd / Fleet",
        description="Which nodes need me now, and why.",
        variables=[data_source(), cluster()],
        rows=[
            Row(title="Which nodes need me now", panels=_now(source)),
            Row(title="Suspects and probes", panels=_probes(source)),
            Row(title="What the nodes find", panels=trouble.panels(source)),
            Row(title="Over time", panels=trends.panels(source), closed=True),
            Row(title="Failures, and what costs time", panels=trends.reliability(), closed=True),
            Row(title="Differences between nodes", panels=trends.differences(), closed=True),
        ],
    )


def _now(source: Source) -> list[dashboard.Panel]:
    def nodes_with(severity: str) -> str:
        of = f'ALERTS{{@alerts,alertstate="firing",severity="{severity}",node!=""}}'
        return f"count(count by (cluster, node) ({of})) or 0 * {alerts.RULES_LOADED}"

    return [
        number(
            "Nodes",
            "Nodes whose agent Prometheus scrapes, whether or not it answers.",
            f"count({ANSWERING})",
        ),
        number(
            "Not answering",
            "Nodes whose agent did not answer the last scrape. Nothing else is known about them.",
            f"count({ANSWERING}) - sum({ANSWERING})",
            steps=((None, GREEN), (1, PURPLE)),
        ),
        number(
            "Nodes with a page",
            f"""Nodes with a critical alert. “{NO_RULES}”: Prometheus evaluates no rules, so no
            alert can fire.""",
            nodes_with("critical"),
            steps=ANY,
            unknown=NO_RULES,
        ),
        number(
            "Nodes with a ticket",
            "Nodes with an alert of severity warning, including those that also have a page.",
            nodes_with("warning"),
            steps=((None, GREEN), (1, ORANGE)),
            unknown=NO_RULES,
        ),
        number(
            "Jobs hung",
            f"""Training jobs in which every rank has been silent for longer than usual.
            “{NO_RULES}”: Prometheus evaluates no rules.""",
            f"count(dshealthd:job:hang{{@rules}}) or 0 * {alerts.RULES_LOADED}",
            steps=ANY,
            unknown=NO_RULES,
        ),
        number(
            "Suspects",
            """Nodes, GPUs, links and leaves that the probes suspect. “unknown”: no agent takes part
            in probes, or Prometheus evaluates no rules.""",
            f"""count(dshealthd:suspect:accusers{{@rules}}) or
            0 * sum(dshealthd_probe_up{{@fleet}} == 1) * {alerts.RULES_LOADED}""",
            steps=((None, GREEN), (1, ORANGE)),
        ),
        number(
            "GPUs not readable",
            """GPUs on the PCI bus that cannot be read through the driver: lost, hung, access
            denied, or without a driver.""",
            """sum(dshealthd_gpus_expected{@fleet}) - (sum(dshealthd_node_gpus_up{@fleet}) or
            vector(0))""",
            steps=ANY,
        ),
        alerts.firing(source, "@alerts", "@server", size=(16, 10)),
        alerts.by_rule(source, size=(8, 10)),
        squares(
            "Nodes by severity",
            f"""Every node, worst first, at most {NODES}: green no alerts, orange a ticket, red a
            page, purple the agent does not answer. If there are no squares,
            `deploy/prometheus/recording.yml` is not loaded.""",
            f"sort_desc(topk({NODES}, {SEVERITY}))",
            name="{{node}}",
            steps=STEPS,
            states=STATES,
            size=(24, 9),
        ),
    ]


def _probes(source: Source) -> list[dashboard.Panel]:
    probing = "dshealthd_probe_up{@fleet}"
    ended = increase("dshealthd_probe_rounds_total{@fleet}", probing)
    bad = increase('dshealthd_probe_rounds_total{@fleet,outcome!~"ok|declined"}', probing)
    worst_nodes = f"""topk({ROWS}, sum by (cluster, node) ({bad}) or
    0 * sum by (cluster, node) ({ended}))"""
    matrix = rows(
        "Rounds by outcome",
        f"""Probe rounds in the time shown, by node and outcome: the {ROWS} nodes with the most
        rounds that failed. A node with many failures whose peers have few is the bad one; a column
        that is full points to the fabric.""",
        [
            Column("Node", "node"),
            Column("Outcome", "outcome"),
            Column(
                "Rounds",
                expr=f"""round(sum by (cluster, node, outcome) ({ended})) and on (cluster, node)
                {worst_nodes}""",
                decimals=0,
            ),
        ],
        matrix=("node", "outcome"),
        unknown=NO_PROBES,
        size=(12, 9),
    )
    return [
        rows(
            "Suspects reported by probes",
            f"""Current suspects and the number of agents that report each: at most {ROWS}, those
            with the most agents. A link is named by its two nodes, a part as NODE/PART.""",
            [
                Column("Kind", "kind", width=70),
                Column("Suspect", "part"),
                Column("Reason", "reason"),
                Column(
                    "Agents",
                    expr=most(
                        "max",
                        "cluster, kind, part, node, reason",
                        "dshealthd:suspect:accusers{@rules}",
                    ),
                    steps=((1, ORANGE), (3, RED)),
                    width=90,
                ),
                NODE_COLUMN,
            ],
            sort=("Agents", True),
            size=(12, 9),
        ),
        matrix,
        rows(
            "Slowest nodes",
            f"""Each node's own score: the median ratio of its timings to the baseline of the same
            pairs of nodes; 1 is usual, 1.2 a fifth slower. At most {SERIES}.""",
            [
                NODE_COLUMN,
                Column(
                    "Score",
                    expr=most(
                        "max", "cluster, node", "dshealthd_probe_score_ratio{@fleet}", limit=SERIES
                    ),
                    decimals=2,
                    steps=((None, GREEN), (source.limits["fleet_score_ratio"], ORANGE)),
                ),
            ],
            sort=("Score", True),
            unknown=NO_PROBES,
        ),
        timeline(
            "Nodes that need attention, over time",
            f"""The {SERIES} worst nodes at the end of the time shown, including those whose agent
            does not answer.""",
            worst_of(SEVERITY, "cluster, node"),
            "{{node}}",
            STATES,
            size=(16, 8),
        ),
    ]
