"""The row of the dashboard *Fleet* about what the nodes find: by kind, by leaf, and how hot they
are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana.board import Source, node_link
from grafana.panels import GREEN, ORANGE, RED
from grafana.queries import ROWS, SERIES
from grafana.tables import Column, rows

if TYPE_CHECKING:
    from grafana_foundation_sdk.models import dashboard


def panels(source: Source) -> list[dashboard.Panel]:
    """Return the panels."""
    found = "dshealthd_finding{@fleet}"
    of_leaves = 'dshealthd_finding{@fleet,leaf!=""}'
    limits = source.limits
    return [
        rows(
            "Findings by kind",
            f"""How many nodes have each finding now: at most {ROWS} kinds. What many have at once
            has one cause, such as a storage server, a driver release or the room.""",
            [
                Column(title="Finding", label="finding"),
                Column(title="Severity", label="severity", width=90),
                Column(
                    title="Nodes",
                    expr=f"""topk({ROWS}, count by (finding, severity)
                        (group by (cluster, node, finding, severity) ({found})))""",
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
                Column(title="Leaf", label="leaf"),
                Column(
                    title="Nodes",
                    expr=(
                        f"topk({SERIES}, count by (cluster, leaf) (group by (cluster, leaf, "
                        f"node) ({of_leaves})))"
                    ),
                    width=80,
                    steps=((1, ORANGE),),
                ),
                Column(
                    title="Share",
                    expr=f"""topk({SERIES}, count by (cluster, leaf) (group by (cluster, leaf, node)
                        ({of_leaves})) / count by (cluster, leaf) (up{{@fleet,leaf!=""}}))""",
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
                Column(title="Node", label="node", link=node_link()),
                Column(
                    title="Core",
                    expr=(
                        f"topk({SERIES}, max by (cluster, node) "
                        f"(dshealthd_node_gpu_temperature_celsius{{@fleet}}))"
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
