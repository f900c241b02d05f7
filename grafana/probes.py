"""The dashboard *Probes and fabric*.

It shows bandwidth against the baseline, rounds and their outcomes, InfiniBand and NVLink errors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana import fabric, membership
from grafana.board import NO_PROBES, Board, Row, Source, choice, cluster, data_source
from grafana.panels import GREEN, ORANGE, RED, graph, timeline
from grafana.queries import ROWS, SERIES, worst, worst_line
from grafana.tables import NODE_COLUMN, Column, rows

if TYPE_CHECKING:
    from grafana_foundation_sdk.models import dashboard

BUCKETS = "rate(dshealthd_probe_duration_seconds_bucket{@nodes}[$__rate_interval])"
FAILED = '@nodes,outcome!~"ok|declined"'
CLASS = "cluster, model, kind, backend, op, size"
"""Labels within which bandwidths are comparable."""
BANDWIDTH = """dshealthd_probe_bus_bandwidth_bytes_per_second{@nodes} * on (cluster, instance)
group_left (model) dshealthd:node:class{@rules}"""
MEDIAN = "dshealthd:fleet:probe_bus_bandwidth_bytes_per_second:median{@rules}"
RATIO = 'dshealthd:node:probe_bus_bandwidth:ratio{@rules,node=~"$node"}'


def board(source: Source) -> Board:
    """Return the dashboard *Probes and fabric*."""
    return Board(
        uid="dshealthd-probes",
        title="dshealthd / Probes and fabric",
        description="""What nodes find when they probe each other, and the errors on links between
        GPUs and between nodes.""",
        variables=[
            data_source(),
            cluster(),
            choice("node", "Node", "label_values(up{@fleet}, node)", several=True, everything=".+"),
        ],
        rows=[
            Row(title="Bandwidth against the baseline", panels=_bandwidth(source)),
            Row(title="Rounds", panels=_rounds(source)),
            Row(
                title="Which nodes can probe each other",
                panels=membership.panels(source),
                closed=True,
            ),
            *fabric.board_rows(source),
        ],
    )


def _bandwidth(source: Source) -> list[dashboard.Panel]:
    limits = source.limits
    shares = f"max by (node, {CLASS}) ({BANDWIDTH} / on ({CLASS}) group_left () {MEDIAN})"
    lowest = f"bottomk({ROWS}, {shares})"
    return [
        graph(
            "Scores",
            f"""The {SERIES} slowest nodes at the end of the time shown, by their own scores: the
            median ratio of their timings to a baseline of days for the same pairs of nodes. 1 is
            usual. Dashed: where an alert fires if the fleet's median reaches it.""",
            worst_line("max", "cluster, node", "dshealthd_probe_score_ratio{@nodes}"),
            ("quantile(0.5, dshealthd_probe_score_ratio{@fleet})", "median of all"),
            steps=((limits["fleet_score_ratio"], ORANGE),),
            limits=["median of all"],
            minimum=None,
            size=(12, 9),
        ),
        rows(
            "Bus bandwidth against the fleet",
            f"""Bus bandwidth of each node's last round with an operation, and its share of the
            median of all nodes with the same operation, size, backend and GPU model: the {ROWS}
            lowest shares.""",
            [
                NODE_COLUMN,
                Column("Model", "model"),
                Column("Kind", "kind", width=80),
                Column("Operation", "op"),
                Column("Backend", "backend", width=80),
                Column("Payload, bytes", "size"),
                Column(
                    "Bus bandwidth",
                    expr=f"max by (node, {CLASS}) ({BANDWIDTH}) and on (node, {CLASS}) {lowest}",
                    unit="Bps",
                ),
                Column(
                    "Of the median",
                    expr=lowest,
                    unit="percentunit",
                    decimals=0,
                    steps=((None, RED), (limits["bus_bandwidth_ratio"], GREEN)),
                ),
            ],
            sort=("Of the median", False),
            unknown=NO_PROBES,
            size=(12, 9),
        ),
        graph(
            "Bus bandwidth: median of the nodes",
            f"""The median of all nodes by operation, payload size, backend and GPU model: at most
            {SERIES} classes.""",
            (worst("max", CLASS, MEDIAN), "{{kind}} {{op}} {{size}} {{backend}} {{model}}"),
            unit="Bps",
        ),
        graph(
            "Bus bandwidth: slowest nodes",
            f"""Each node's bandwidth as a share of that median, in its worst class: the {SERIES}
            lowest. The dashed line is the alert's threshold.""",
            worst_line("min", "cluster, node", RATIO, lowest=True),
            unit="percentunit",
            steps=((None, RED), (limits["bus_bandwidth_ratio"], GREEN)),
        ),
        graph(
            "Time of an operation",
            f"""Median over all nodes of an operation's median time: the {SERIES} slowest classes.
            Small payloads show latency.""",
            (
                worst(
                    "quantile",
                    "cluster, kind, backend, op, size",
                    "0.5, dshealthd_probe_operation_seconds{@nodes}",
                ),
                "{{kind}} {{op}} {{size}} {{backend}}",
            ),
            unit="s",
        ),
    ]


def _rounds(source: Source) -> list[dashboard.Panel]:
    late = "time() - max by (cluster, node) (dshealthd_probe_last_round_timestamp_seconds{@nodes})"
    return [
        graph(
            "Rounds by outcome",
            """Rounds per minute, counted by every node that takes part. Declined rounds are normal:
            a GPU was busy, or a node was being drained.""",
            (
                """sum by (outcome) (60 *
                rate(dshealthd_probe_rounds_total{@nodes}[$__rate_interval]))""",
                "{{outcome}}",
            ),
            stacked=True,
        ),
        graph(
            "Rounds by kind",
            """Rounds per minute by kind. Light rounds are echoes between agents, run if GPUs are
            busy or there is no torch.""",
            (
                "sum by (kind) (60 * rate(dshealthd_probe_rounds_total{@nodes}[$__rate_interval]))",
                "{{kind}}",
            ),
            stacked=True,
        ),
        graph(
            "Why rounds did not use GPUs",
            f"""Rounds per minute that should have used the GPUs and did not, by reason: the
            {SERIES} most frequent.""",
            worst_line(
                "sum", "reason", "60 * rate(dshealthd_probe_skips_total{@nodes}[$__rate_interval])"
            ),
            stacked=True,
        ),
        graph(
            "Failed rounds",
            f"""Rounds per minute that neither succeeded nor were declined: the {SERIES} nodes with
            most.""",
            worst_line(
                "sum",
                "cluster, node",
                f"60 * rate(dshealthd_probe_rounds_total{{{FAILED}}}[$__rate_interval])",
            ),
        ),
        graph(
            "Duration of a round",
            "Time from the invitation to the conclusion: median and 95th percentile, by kind.",
            *(
                (
                    f"histogram_quantile({quantile}, sum by (le, kind) ({BUCKETS}))",
                    f"{{{{kind}}}} {name}",
                )
                for quantile, name in ((0.5, "median"), (0.95, "p95"))
            ),
            unit="s",
        ),
        graph(
            "Cost",
            """Share of one GPU's time that the probes' collectives keep it busy: the mean of all
            nodes, and the node with most.""",
            ("avg(rate(dshealthd_probe_gpu_seconds_total{@nodes}[$__rate_interval]))", "mean"),
            ("max(rate(dshealthd_probe_gpu_seconds_total{@nodes}[$__rate_interval]))", "most"),
            unit="percentunit",
        ),
        rows(
            "Longest without a round",
            f"The {SERIES} nodes with the longest time since their last round of any kind.",
            [
                NODE_COLUMN,
                Column(
                    "Ago",
                    expr=f"topk({SERIES}, {late})",
                    unit="s",
                    steps=((None, GREEN), (source.limits["probe_silent_seconds"], ORANGE)),
                ),
            ],
            sort=("Ago", True),
            unknown=NO_PROBES,
            size=(12, 8),
        ),
        timeline(
            "Suspects",
            f"The {SERIES} suspects that the most agents report at the end of the time shown.",
            worst(
                "max", "cluster, kind, part, reason", "dshealthd:suspect:accusers{@rules} > bool 0"
            ),
            "{{part}} {{reason}}",
            {1: ("suspect", ORANGE)},
            size=(12, 8),
        ),
    ]
