"""The row of the dashboard *Fleet* about what the nodes find: by kind, by leaf, and how hot they
are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana.panels import GREEN, ORANGE, RED
from grafana.queries import ROWS, SERIES, most
from grafana.tables import NODE_COLUMN, Column, rows

if TYPE_CHECKING:
    from grafana_foundation_sdk.models import dashboard

    from grafana.board import Source


def panels(source: Source) -> list[dashboard.Panel]:
    """Return the panels about what the nodes of the fleet find."""
    found = "dshealthd_finding{@fleet}"
    of_leaves = 'dshealthd_finding{@fleet,leaf!=""}'
    limits = source.limits
    return [
        rows(
            "Findings by kind",
            f"""How many nodes have each finding now: at most {ROWS} kinds. What many have at once
            has one cause, such as a storage server, a driver release or the room.""",
            [
                Column("Finding", "finding"),
                Column("Severity", "severity", width=90),
                Column(
                    "Nodes",
                    expr=most(
                        "count",
                        "finding, severity",
                        f"group by (cluster, node, finding, severity) ({found})",
                    ),
                    width=80,
                    steps=((1, ORANGE),),
                ),
            ],
            sort=("Nodes", True),
            size=(8, 9),
        ),
        rows(
            "Leaves with findings",
            f"""Leaf switches by the number of their nodes that have a finding, and the share of
            their nodes: at most {SERIES}, if targets have the label `leaf`.""",
            [
                Column("Leaf", "leaf"),
                Column(
                    "Nodes",
                    expr=most(
                        "count",
                        "cluster, leaf",
                        f"group by (cluster, leaf, node) ({of_leaves})",
                        limit=SERIES,
                    ),
                    width=80,
                    steps=((1, ORANGE),),
                ),
                Column(
                    "Share",
                    expr=f"""topk({SERIES}, count by (cluster, leaf) (group by (cluster, leaf, node)
                    ({of_leaves})) / count by (cluster, leaf) (group by (cluster, leaf, node)
                    (up{{@fleet,leaf!=""}})))""",
                    unit="percentunit",
                    steps=((None, GREEN), (0.5, RED)),
                ),
            ],
            sort=("Nodes", True),
            size=(8, 9),
        ),
        rows(
            "Hottest nodes",
            f"""The {SERIES} nodes with the hottest GPU cores. Colors are the limits for GPUs that
            report none of their own; the dashboard of the node has each GPU with its own.""",
            [
                NODE_COLUMN,
                Column(
                    "Core",
                    expr=most(
                        "max",
                        "cluster, node",
                        "dshealthd_node_gpu_temperature_celsius{@fleet}",
                        limit=SERIES,
                    ),
                    unit="celsius",
                    steps=(
                        (None, GREEN),
                        (limits["gpu_temperature_celsius"], ORANGE),
                        (limits["gpu_temperature_critical_celsius"], RED),
                    ),
                ),
            ],
            sort=("Core", True),
            unknown="unknown",
            size=(8, 9),
        ),
    ]
