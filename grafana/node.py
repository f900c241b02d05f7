"""The dashboard *Node*: everything about one node, GPU by GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana import alerts, gpus, host
from grafana.board import Board, Row, Source, choice, cluster, data_source
from grafana.panels import GREEN, ORANGE, RED, number
from grafana.queries import ROWS, most
from grafana.tables import Column, rows

if TYPE_CHECKING:
    from grafana_foundation_sdk.models import dashboard


def board(source: Source) -> Board:
    """Return the dashboard *Node*."""
    return Board(
        uid="dshealthd-node",
        title="dshealthd / Node",
        description="Everything that is known about one node, GPU by GPU.",
        variables=[
            data_source(),
            cluster(),
            choice("node", "Node", "label_values(up{@fleet}, node)"),
            choice(
                "gpu",
                "GPU",
                "label_values(dshealthd_gpu_up{@node}, gpu)",
                several=True,
                everything=".+",
            ),
        ],
        rows=[
            Row(title="$node", panels=_overview(source)),
            *gpus.board_rows(source),
            *host.board_rows(source),
        ],
        alerts=('@alerts,node="$node"',),
    )


def _overview(source: Source) -> list[dashboard.Panel]:
    return [
        number(
            "Agent",
            "Whether the agent answered the last scrape.",
            "max(up{@node})",
            states={1: ("up", GREEN), 0: ("down", RED)},
        ),
        number(
            "Uptime",
            "Time since the node booted.",
            "max(dshealthd_uptime_seconds{@node})",
            unit="s",
        ),
        number(
            "GPUs not readable",
            """GPUs on the PCI bus that cannot be read through the driver. “unknown”: there is none,
            or the agent does not answer.""",
            "sum(dshealthd_gpus_expected{@node}) - (sum(dshealthd_gpu_up{@node}) or vector(0))",
            steps=((None, GREEN), (1, RED)),
        ),
        number(
            "Ports not up",
            """InfiniBand and RoCE ports that are not active, including uncabled ones. “unknown”:
            there is none, or the agent does not answer.""",
            "count(dshealthd_infiniband_port_up{@node}) - sum(dshealthd_infiniband_port_up{@node})",
        ),
        number(
            "Score",
            """The node's own score: median ratio of its timings to the baseline, over its last
            peers. 1 is usual, 1.2 a fifth slower.""",
            "max(dshealthd_probe_score_ratio{@node})",
            steps=((None, GREEN), (source.limits["fleet_score_ratio"], ORANGE)),
        ),
        number(
            "Failing collectors",
            "Collectors whose source exists on this machine but could not be read.",
            "count(dshealthd_collector_up{@node}) - sum(dshealthd_collector_up{@node})",
            steps=((None, GREEN), (1, ORANGE)),
        ),
        alerts.firing(source, '@alerts,node="$node"', size=(12, 8)),
        rows(
            "Suspects",
            f"""What the probes suspect on this node or on a link to it, and the number of agents
            that report it: at most {ROWS}.""",
            [
                Column("Kind", "kind", width=70),
                Column("Suspect", "part"),
                Column("Reason", "reason"),
                Column(
                    "Agents",
                    expr=most(
                        "max",
                        "kind, part, reason",
                        """dshealthd:suspect:accusers{@rules,node="$node"} or
                        dshealthd:suspect:accusers{@rules,peer="$node"}""",
                    ),
                    steps=((1, ORANGE), (3, RED)),
                    width=90,
                ),
            ],
            size=(6, 8),
        ),
        rows(
            "Failing sources",
            "Collectors whose source, or a part of it, cannot be read, and why.",
            [
                Column("Collector", "collector"),
                Column("Reason", "reason"),
                Column(expr="max by (collector, reason) (dshealthd_collector_failing{@node}) == 1"),
            ],
            size=(6, 8),
        ),
    ]
