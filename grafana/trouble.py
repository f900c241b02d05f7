"""The row of the dashboard *Fleet* about GPUs in trouble: hot, throttled, or in need of a reset or
replacement.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana.board import Source, node_link
from grafana.panels import GREEN, ORANGE, RED, YELLOW
from grafana.queries import ROWS, SERIES
from grafana.tables import Column, rows

if TYPE_CHECKING:
    from grafana_foundation_sdk.models import dashboard

    from grafana.panels import Steps

THROTTLES = 'reason=~"hw_.+|sw_thermal_slowdown"'
OFTEN = 0.1
"""Share of the time: gpud names a GPU that one check in ten finds throttled."""


def panels(source: Source) -> list[dashboard.Panel]:
    """Return the panels."""
    gpu = "cluster, node, gpu"
    core = f'max by ({gpu}) (dshealthd_gpu_temperature_celsius{{@fleet,sensor="core"}})'
    slowdown = f'max by ({gpu}) (dshealthd_gpu_temperature_limit_celsius{{@fleet,limit="slowdown"}}) - {core}'
    margin = f"max by ({gpu}) (dshealthd_gpu_temperature_margin_celsius{{@fleet}})"
    shown = f"and on ({gpu}) (bottomk({SERIES}, {margin} or {slowdown}) or topk({SERIES}, {core}))"
    limits = source.limits
    heat: Steps = (
        (None, GREEN),
        (limits["gpu_temperature_celsius"], ORANGE),
        (limits["gpu_temperature_critical_celsius"], RED),
    )
    cold: Steps = ((None, RED), (0.001, ORANGE), (5, GREEN))
    return [
        rows(
            "Hottest GPUs",
            f"""The {SERIES} GPUs nearest to their own limit, and the {SERIES} with the hottest cores. "Margin" is the distance to the
            highest operating temperature as the GPU reports it, "To slowdown" the distance of the core to its slowdown temperature.""",
            [
                Column(title="Node", label="node", link=node_link()),
                Column(title="GPU", label="gpu", width=60),
                Column(title="Core", expr=f"{core} {shown}", unit="celsius", steps=heat),
                Column(title="Margin", expr=f"{margin} {shown}", unit="celsius", steps=cold),
                Column(
                    title="To slowdown", expr=f"({slowdown}) {shown}", unit="celsius", steps=cold
                ),
            ],
            sort=("Margin", False),
            unknown="unknown",
            size=(8, 9),
        ),
        rows(
            "GPUs needing action",
            f"""GPUs that cannot be read, that need a reset or replacement because of their memory, or for which the driver requests a
            recovery: at most {ROWS}.""",
            [
                Column(title="Node", label="node", link=node_link()),
                Column(title="GPU", label="gpu", width=60),
                Column(title="What", label="what"),
                Column(title="", expr=f"topk({ROWS}, {_asking()})"),
            ],
            size=(6, 9),
        ),
        rows(
            "GPUs throttled",
            f"""GPUs throttled by the hardware, heat or power in the last ten minutes, and the share of that time: at most {SERIES}. Idle
            clocks and limits that somebody set are left out.""",
            [
                Column(title="Node", label="node", link=node_link()),
                Column(title="GPU", label="gpu", width=60),
                Column(title="Reason", label="reason"),
                Column(
                    title="Share of 10 min",
                    expr=f"""topk({SERIES}, max by ({gpu}, reason)
                    (avg_over_time(dshealthd_gpu_throttle_active{{@fleet,{THROTTLES}}}[10m])) > 0)""",
                    unit="percentunit",
                    steps=((None, YELLOW), (OFTEN, RED)),
                ),
            ],
            sort=("Share of 10 min", True),
            size=(6, 9),
        ),
        rows(
            "GPUs possibly stuck",
            f"""Nodes with GPUs that look as if in a collective that waits for ever: kernels run all the time, memory and bus are idle,
            power is low. A sign of a hang, not a proof. At most {SERIES}.""",
            [
                Column(title="Node", label="node", link=node_link()),
                Column(
                    title="GPUs",
                    expr=(
                        f"topk({SERIES}, max by (cluster, node) "
                        f"(dshealthd:node:gpus_waiting:count{{@rules}}))"
                    ),
                    steps=((1, ORANGE),),
                ),
            ],
            sort=("GPUs", True),
            size=(4, 9),
        ),
    ]


def _asking() -> str:
    wanted = {
        "dshealthd_gpu_up": ("== 0", "not readable"),
        "dshealthd_gpu_remapped_rows_failed": ("== 1", "row remap failed: replace"),
        "dshealthd_gpu_remapped_rows_pending": ("== 1", "row remap pending: reset"),
        "dshealthd_gpu_retired_pages_pending": ("== 1", "page retirement pending: reset"),
        "dshealthd_gpu_sram_threshold_exceeded": ("== 1", "too many SRAM errors: replace"),
        "dshealthd_gpu_memory_unrepairable": ("== 1", "memory beyond repair: replace"),
        "dshealthd_gpu_repair_pending": ("== 1", "repair pending: reset"),
        "dshealthd_gpu_recovery_action": ("> 0", "the driver asks for a recovery"),
        "dshealthd_gpu_fabric_healthy": ("== 0", "NVLink fabric unhealthy"),
    }
    found = (
        (
            f'label_replace(max by (cluster, node, gpu) ({metric}{{@fleet}}) {is_bad}, "what", '
            f'"{what}", "", "")'
        )
        for metric, (is_bad, what) in wanted.items()
    )
    return f"({' or '.join(found)}) * 0 + 1"
