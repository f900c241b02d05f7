"""The rows of the dashboard *Fleet* about the fleet over time and the differences between nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana.board import node_link
from grafana.panels import BLUE, ORANGE, RED, graph
from grafana.queries import ROWS
from grafana.tables import Column, rows

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
                (
                    "count by (severity) "
                    '(ALERTS{@alerts,alertstate="firing",severity=~"critical|warning"})'
                ),
                "{{severity}}",
            ),
            unit="none",
        ),
        graph(
            "Nodes answering",
            "Nodes whose agent answers, against all targets of the scrape job.",
            ("sum(up{@fleet})", "answering"),
            ("count(up{@fleet})", "targets"),
            unit="none",
            limits=["targets"],
        ),
        graph(
            "GPUs readable",
            "GPUs that can be read through the driver, against those on the PCI bus.",
            ("sum(dshealthd_node_gpus_up{@fleet})", "readable"),
            ("sum(dshealthd_gpus_expected{@fleet})", "on the bus"),
            unit="none",
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


def differences() -> list[dashboard.Panel]:
    """Return the panels that show differences between nodes."""
    return [
        rows(
            "Nodes that differ",
            f"""Nodes whose versions or settings differ from those of more than half of the nodes
            with the same GPUs: at most {ROWS}.""",
            [
                Column(title="Node", label="node", link=node_link()),
                Column(title="What", label="software"),
                Column(title="Environment", label="environment"),
                Column(
                    title="",
                    expr=(
                        f"topk({ROWS}, max by (cluster, node, software, environment) "
                        f"(dshealthd:node:drift{{@rules}}) == 1)"
                    ),
                ),
            ],
            size=(8, 8),
        ),
        rows(
            "Versions in use",
            f"""Number of nodes with each version of a component; check the rare ones. At most
            {ROWS}.""",
            [
                Column(title="Component", label="component"),
                Column(title="Version", label="version"),
                Column(
                    title="Nodes",
                    expr=f"""bottomk({ROWS}, count by (component, version) (count by (cluster, node,
                        component, version)
                        (dshealthd_software_info{{@fleet,environment="",training_job=""}})))""",
                    width=80,
                ),
            ],
            sort=("Nodes", False),
            size=(8, 8),
        ),
        rows(
            "GPU models and drivers",
            (
                f"Number of nodes with each model of GPU, and with each driver; at most {ROWS} of "
                "each."
            ),
            [
                Column(title="GPU", label="model"),
                Column(title="Driver", label="driver"),
                Column(
                    title="Nodes",
                    expr=f"""topk({ROWS}, count by (model)
                        (dshealthd_node_class_info{{@fleet,model!="none"}})) or topk({ROWS}, count
                        by (driver) (dshealthd_gpu_driver_info{{@fleet}}))""",
                    width=90,
                    steps=((None, BLUE),),
                ),
            ],
            sort=("Nodes", True),
            size=(8, 8),
        ),
    ]
