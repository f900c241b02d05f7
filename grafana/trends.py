"""The rows of the dashboard *Fleet* about the fleet as a whole: over time, and in what its nodes differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana.panels import BLUE, ORANGE, RED, graph
from grafana.queries import ROWS
from grafana.tables import Column, rows

if TYPE_CHECKING:
    from grafana_foundation_sdk.models import dashboard

    from grafana.board import Source


def panels(source: Source) -> list[dashboard.Panel]:
    """Return the panels that show the fleet over time."""
    core = 'dshealthd_gpu_temperature_celsius{@fleet,sensor="core"}'
    limits = source.limits
    return [
        graph(
            "Alerts",
            "Alerts that fire, by severity.",
            ('count by (severity) (ALERTS{@alerts,alertstate="firing",severity=~"critical|warning"})', "{{severity}}"),
            unit="none",
        ),
        graph(
            "Nodes that answer",
            "Nodes whose agent answers, of those that are to be scraped.",
            ("sum(up{@fleet})", "answer"),
            ("count(up{@fleet})", "targets"),
            unit="none",
            limits=["targets"],
        ),
        graph(
            "GPUs readable",
            "GPUs that the driver can be asked about, of those on the PCI bus.",
            ("sum(dshealthd_gpu_up{@fleet})", "readable"),
            ("sum(dshealthd_gpus_expected{@fleet})", "on the bus"),
            unit="none",
            limits=["on the bus"],
        ),
        graph(
            "Core temperature",
            """The hottest GPU, the 95th percentile, and the median of all; dashed, where parts that tell no limits of their own are
            reported.""",
            (f"max({core})", "hottest"),
            (f"quantile(0.95, {core})", "p95"),
            (f"quantile(0.5, {core})", "median"),
            unit="celsius",
            steps=((limits["gpu_temperature_celsius"], ORANGE), (limits["gpu_temperature_critical_celsius"], RED)),
            minimum=None,
        ),
        graph(
            "GPU utilisation",
            """Share of time in which a kernel ran: median of all GPUs, and the lowest and highest tenth. It says nothing of how well it
            ran.""",
            ("quantile(0.1, dshealthd_gpu_utilization_ratio{@fleet})", "p10"),
            ("quantile(0.5, dshealthd_gpu_utilization_ratio{@fleet})", "median"),
            ("quantile(0.9, dshealthd_gpu_utilization_ratio{@fleet})", "p90"),
            unit="percentunit",
            maximum=1,
        ),
        graph("GPU power", "Power drawn by all GPU boards together.", ("sum(dshealthd_gpu_power_watts{@fleet})", "all GPUs"), unit="watt"),
    ]


def differences() -> list[dashboard.Panel]:
    """Return the panels that show in what nodes differ."""
    return [
        rows(
            "Versions in use",
            f"""How many nodes have each version of a component that is there in more than one: the rare ones are worth a look. At most
            {ROWS}.""",
            [
                Column(title="Component", label="component"),
                Column(title="Version", label="version"),
                Column(
                    title="Nodes",
                    expr=f"""bottomk({ROWS}, count by (component, version) (count by (cluster, node, component, version)
                        (dshealthd_software_info{{@fleet,environment="",exported_job=""}})))""",
                    width=80,
                ),
            ],
            sort=("Nodes", False),
        ),
        rows(
            "GPU models and drivers",
            f"How many GPUs there are of each model, and nodes with each driver; at most {ROWS} of each.",
            [
                Column(title="GPU", label="name"),
                Column(title="Driver", label="driver"),
                Column(
                    title="Number",
                    expr=f"""topk({ROWS}, count by (name) (dshealthd_gpu_info{{@fleet}}))
                        or topk({ROWS}, count by (driver) (dshealthd_gpu_driver_info{{@fleet}}))""",
                    width=90,
                    steps=((None, BLUE),),
                ),
            ],
            sort=("Number", True),
        ),
    ]
