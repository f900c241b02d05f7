"""The rows of the dashboard *Fleet* about the fleet over time and the differences between nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana.panels import BLUE, ORANGE, RED, graph, number
from grafana.queries import ROWS, least
from grafana.tables import NODE_COLUMN, Column, rows

if TYPE_CHECKING:
    from grafana_foundation_sdk.models import dashboard

    from grafana.board import Source


def panels(source: Source) -> list[dashboard.Panel]:
    """Return the panels that show the fleet over time."""
    hottest = "dshealthd_node_gpu_temperature_celsius{@fleet}"
    busy = "dshealthd_node_gpu_utilization_ratio{@fleet}"
    limits = source.limits
    return [
        graph(
            "Alerts",
            "Firing alerts by severity.",
            (
                """count by (severity)
                (ALERTS{@alerts,alertstate="firing",severity=~"critical|warning"})""",
                "{{severity}}",
            ),
        ),
        graph(
            "Nodes answering",
            "Nodes whose agent answers, against all that are scraped.",
            ("sum(max by (cluster, instance) (up{@fleet}))", "answering"),
            ("count(max by (cluster, instance) (up{@fleet}))", "targets"),
            limits=["targets"],
        ),
        graph(
            "GPUs readable",
            "GPUs that can be read through the driver, against those on the PCI bus.",
            ("sum(dshealthd_node_gpus_up{@fleet})", "readable"),
            ("sum(dshealthd_gpus_expected{@fleet})", "on the bus"),
            limits=["on the bus"],
        ),
        graph(
            "Hottest GPU of each node",
            """Core temperature of each node's hottest GPU: the highest of all nodes, the 95th
            percentile, and the median. Dashed: thresholds of the alerts for GPUs that report no
            limits of their own.""",
            (f"max({hottest})", "highest"),
            (f"quantile(0.95, {hottest})", "p95"),
            (f"quantile(0.5, {hottest})", "median"),
            unit="celsius",
            steps=(
                (limits["gpu_temperature_celsius"], ORANGE),
                (limits["gpu_temperature_critical_celsius"], RED),
            ),
            minimum=None,
        ),
        graph(
            "GPU utilization of the nodes",
            """Share of time in which a kernel ran, mean of a node's GPUs: the 10th percentile, the
            median and the 90th percentile of the nodes. It does not show how efficient the kernels
            are.""",
            (f"quantile(0.1, {busy})", "p10"),
            (f"quantile(0.5, {busy})", "median"),
            (f"quantile(0.9, {busy})", "p90"),
            unit="percentunit",
            maximum=1,
        ),
        graph(
            "GPU power",
            "Power drawn by all GPU boards together.",
            ("sum(dshealthd_node_gpu_power_watts{@fleet})", "all GPUs"),
            unit="watt",
        ),
    ]


def reliability() -> list[dashboard.Panel]:
    """Return the panels that show how often nodes fail, and what costs time."""
    failures = "dshealthd_record_hardware_incidents{@fleet}"
    counted = """A failure is a finding that a part of the node itself causes (not a cable, a
    switch, heat, software or a job), at least a day after its last failure, outside maintenance,
    since the node's last repair; each node counts its own over 30 days. It is too long while the
    nodes' records are younger. Without any failure: the time that it exceeds."""
    critical = 'dshealthd_finding{@fleet,severity="critical"}'
    having = f"count by (finding) (group by (cluster, node, finding) ({critical}))"
    silent = "label_replace(count(up{@fleet} == 0), 'finding', 'agent not answering', '', '')"
    return [
        number(
            "MTBF of a node",
            f"""Mean time between failures of a node: the 30 days of all nodes, divided by their
            failures. {counted}""",
            f"30 * 86400 * count({failures}) / clamp_min(sum({failures}), 1)",
            unit="s",
        ),
        number(
            "MTBF of the fleet",
            f"""Mean time between failures of any node: 30 days, divided by the failures of all. A
            job that runs on a tenth of the nodes is hit a tenth as often. {counted}""",
            f"30 * 86400 / clamp_min(sum({failures}), 1)",
            unit="s",
        ),
        rows(
            "Share of node time by cause",
            f"""Share of the time shown in which a node had each critical finding, or its agent did
            not answer, in a sample every five minutes; of all nodes together. A node with two
            findings counts for both. At most {ROWS}. What the time of trainings went to, and so
            their goodput, is on the dashboard *Jobs*.""",
            [
                Column("Cause", "finding"),
                Column(
                    "Share",
                    expr=f"""topk({ROWS}, sum_over_time(({having} or {silent})[$__range:5m]) / on ()
                    group_left () sum_over_time((count(up{{@fleet}}))[$__range:5m]))""",
                    unit="percentunit",
                    decimals=2,
                    width=90,
                ),
            ],
            sort=("Share", True),
        ),
    ]


def differences() -> list[dashboard.Panel]:
    """Return the panels that show differences between nodes."""
    return [
        rows(
            "Nodes that differ",
            f"""Nodes whose versions or settings differ from those of more than half of the nodes
            with the same GPUs: at most {ROWS}.""",
            [
                NODE_COLUMN,
                Column("What", "software"),
                Column("Environment", "environment"),
                Column(
                    expr=f"""topk({ROWS}, max by (cluster, node, software, environment)
                    (dshealthd:node:drift{{@rules}}) == 1)"""
                ),
            ],
        ),
        rows(
            "Versions in use",
            f"""Number of nodes with each version of a component; check the rare ones. At most
            {ROWS}.""",
            [
                Column("Component", "component"),
                Column("Version", "version"),
                Column(
                    "Nodes",
                    expr=least(
                        "count",
                        "component, version",
                        """count by (cluster, node, component, version)
                        (dshealthd_software_info{@fleet,environment="",training_job=""})""",
                    ),
                    width=80,
                ),
            ],
            sort=("Nodes", False),
        ),
        rows(
            "GPU models and drivers",
            f"""Number of nodes with each model of GPU, and with each driver; at most {ROWS} of
            each.""",
            [
                Column("GPU", "model"),
                Column("Driver", "driver"),
                Column(
                    "Nodes",
                    expr=f"""topk({ROWS}, count by (model)
                    (dshealthd_node_class_info{{@fleet,model!="none"}})) or topk({ROWS}, count by
                    (driver) (dshealthd_gpu_driver_info{{@fleet}}))""",
                    width=90,
                    steps=((None, BLUE),),
                ),
            ],
            sort=("Nodes", True),
        ),
    ]
