"""The rows of the dashboard *Node* about its GPUs and their links."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana.board import Row, Source
from grafana.panels import BLUE, GREEN, ORANGE, RED, UP, YELLOW, graph, timeline
from grafana.queries import ROWS, grown_or_new, most
from grafana.tables import Column, rows

if TYPE_CHECKING:
    from grafana_foundation_sdk.models import dashboard

    from grafana.panels import States, Steps

GPU = "GPU {{gpu}}"
CLEAN: Steps = ((None, GREEN), (1, ORANGE))
BROKEN: Steps = ((None, GREEN), (1, RED))
ACTIONS: States = {
    0: ("none", GREEN),
    1: ("GPU reset", ORANGE),
    2: ("reboot", RED),
    3: ("drain peers", ORANGE),
    4: ("drain and reset", ORANGE),
    5: ("IMEX recovery", ORANGE),
    6: ("bus reset", RED),
    7: ("system reboot", RED),
}
HELD: States = {0: ("free", GREEN), 1: ("throttled", RED)}
SLOWED = (
    'reason!~"gpu_idle|applications_clocks_setting|sync_boost|display_clock_setting|sw_power_cap"'
)
"""Leaves out harmless reasons: idle clocks, limits that somebody set, and the power limit, at which
a GPU runs under full load.
"""
XIDS = most("max", "gpu, pci, xid", "dshealthd_xid_last_timestamp_seconds{@node}")
NVLINK_READ = 'dshealthd_collector_up{@node,collector="nvlink"}'
LINK_ERRORS = f"""sum by (gpu, link)
({grown_or_new("dshealthd_nvlink_errors_total{@gpus}", NVLINK_READ)})"""
BAD_LINKS = f"""(topk({ROWS}, {LINK_ERRORS} > 0) or max by (gpu, link) (dshealthd_nvlink_up{{@gpus}}
== 0 and max_over_time(dshealthd_nvlink_up{{@gpus}}[$__range]) == 1))"""


def board_rows(source: Source) -> list[Row]:
    """Return the rows about a node's GPUs and their links."""
    return [
        Row(title="GPUs", panels=[_table(), *_vital(source)]),
        Row(title="GPU memory errors and Xids", panels=_errors(source)),
        Row(title="NVLink and PCIe", panels=_links(source), closed=True),
    ]


def _each(expression: str) -> str:
    return f"max by (gpu) ({expression})"


def _table() -> dashboard.Panel:
    ecc = 'dshealthd_gpu_ecc_errors_total{@gpus,type="uncorrected",counter="volatile"}'
    return rows(
        "GPUs",
        """One line per GPU. “unknown”: the GPU does not report the value, or it could not be read.
        "Throttles" is the number of active reasons for throttling, as in the panel *Throttling*;
        ECC counts uncorrected errors since the driver was loaded.""",
        [
            Column("GPU", "gpu", width=55),
            Column("Readable", expr=_each("dshealthd_gpu_up{@gpus}"), states=UP, width=80),
            Column(
                "Core",
                expr=_each('dshealthd_gpu_temperature_celsius{@gpus,sensor="core"}'),
                unit="celsius",
            ),
            Column(
                "Power", expr=_each("dshealthd_gpu_power_watts{@gpus}"), unit="watt", decimals=0
            ),
            Column(
                "Busy",
                expr=_each("dshealthd_gpu_utilization_ratio{@gpus}"),
                unit="percentunit",
                decimals=0,
            ),
            Column(
                "Memory used",
                expr=_each(
                    """dshealthd_gpu_memory_used_bytes{@gpus} /
                    dshealthd_gpu_memory_total_bytes{@gpus}"""
                ),
                unit="percentunit",
                decimals=0,
            ),
            Column("Processes", expr=_each("dshealthd_gpu_compute_processes{@gpus}")),
            Column(
                "Throttles",
                expr=f"sum by (gpu) (dshealthd_gpu_throttle_active{{@gpus,{SLOWED}}})",
                steps=((None, GREEN), (1, YELLOW)),
            ),
            Column("ECC", expr=_each(ecc), steps=BROKEN),
            Column(
                "Remap pending",
                expr=_each("dshealthd_gpu_remapped_rows_pending{@gpus}"),
                steps=CLEAN,
            ),
            Column(
                "Remap failed",
                expr=_each("dshealthd_gpu_remapped_rows_failed{@gpus}"),
                steps=BROKEN,
            ),
            Column("NVLinks up", expr=_each("dshealthd_nvlinks_up{@gpus}")),
            Column("PCIe lanes", expr=_each("dshealthd_pcie_link_width{@gpus}")),
            Column("Recovery", expr=_each("dshealthd_gpu_recovery_action{@gpus}"), states=ACTIONS),
        ],
        sort=("GPU", False),
        unknown="unknown",
        size=(24, 9),
    )


def _vital(source: Source) -> list[dashboard.Panel]:
    limits = source.limits
    return [
        graph(
            "Core temperature",
            """Core temperature. Red dashed lines: the GPU's own limits, if it reports them; the
            thresholds are those of the alerts for GPUs that report none.""",
            (_each('dshealthd_gpu_temperature_celsius{@gpus,sensor="core"}'), GPU),
            (
                """min by (limit)
                (dshealthd_gpu_temperature_limit_celsius{@gpus,limit=~"slowdown|max_operating"})""",
                "limit: {{limit}}",
            ),
            unit="celsius",
            steps=(
                (limits["gpu_temperature_celsius"], ORANGE),
                (limits["gpu_temperature_critical_celsius"], RED),
            ),
            limits=["limit"],
            minimum=None,
        ),
        graph(
            "Memory temperature and margin",
            """Memory temperature, and the margin of the core to its highest operating temperature;
            only for GPUs with these sensors.""",
            (_each('dshealthd_gpu_temperature_celsius{@gpus,sensor="memory"}'), f"{GPU} memory"),
            (_each("dshealthd_gpu_temperature_margin_celsius{@gpus}"), f"{GPU} margin"),
            unit="celsius",
            minimum=None,
        ),
        graph(
            "Power",
            "Power drawn by the board, and the enforced limit.",
            (_each("dshealthd_gpu_power_watts{@gpus}"), GPU),
            ('max(dshealthd_gpu_power_limit_watts{@gpus,limit="enforced"})', "limit"),
            unit="watt",
            limits=["limit"],
        ),
        graph(
            "Utilization",
            """Share of time in which a kernel ran. 100% with low power and idle memory means a
            collective that waits.""",
            (_each("dshealthd_gpu_utilization_ratio{@gpus}"), GPU),
            unit="percentunit",
            maximum=1,
        ),
        graph(
            "Memory in use",
            "Share of the memory in use. PyTorch keeps what it has freed: a training fills it.",
            (
                _each(
                    """dshealthd_gpu_memory_used_bytes{@gpus} /
                    dshealthd_gpu_memory_total_bytes{@gpus}"""
                ),
                GPU,
            ),
            unit="percentunit",
            maximum=1,
        ),
        graph(
            "SM clock",
            "Clock of the multiprocessors, and the GPU's maximum.",
            (_each('dshealthd_gpu_clock_hertz{@gpus,domain="sm"}'), GPU),
            ('max(dshealthd_gpu_clock_max_hertz{@gpus,domain="sm"})', "limit"),
            unit="hertz",
            limits=["limit"],
        ),
        timeline(
            "Throttling",
            """GPUs throttled in the time shown, by reason; idle clocks, limits that somebody set,
            and the power limit, which is reached under full load, are left out.""",
            f"""max by (gpu, reason) (dshealthd_gpu_throttle_active{{@gpus,{SLOWED}}}) and on
            (gpu, reason) topk({ROWS}, max by (gpu, reason)
            (max_over_time(dshealthd_gpu_throttle_active{{@gpus,{SLOWED}}}[$__range] @ end())) >
            0)""",
            f"{GPU} {{{{reason}}}}",
            HELD,
            size=(16, 8),
        ),
        rows(
            "GPU faults",
            "Why a GPU, or a call that reads it, fails now.",
            [
                Column("GPU", "gpu", width=60),
                Column("Reason", "reason"),
                Column(expr="max by (gpu, reason) (dshealthd_gpu_fault{@gpus}) == 1"),
            ],
        ),
    ]


def _errors(source: Source) -> list[dashboard.Panel]:
    return [
        graph(
            "ECC errors",
            """Uncorrected and corrected ECC errors per minute. The threshold is for corrected
            errors; any uncorrected one raises an alert.""",
            (
                """sum by (gpu, type) (60 * rate(
                dshealthd_gpu_ecc_errors_total{@gpus,counter="volatile"}[$__rate_interval]))""",
                f"{GPU} {{{{type}}}}",
            ),
            steps=((source.limits["ecc_corrected_per_minute"], ORANGE),),
        ),
        rows(
            "Remapped rows and retired pages",
            "Memory taken out of use for good, by type of error.",
            [
                Column("GPU", "gpu", width=60),
                Column("Errors", "type"),
                Column(
                    "Rows or pages",
                    expr="""max by (gpu, type) (dshealthd_gpu_remapped_rows{@gpus} or
                    dshealthd_gpu_retired_pages{@gpus})""",
                    steps=((None, GREEN), (1, YELLOW)),
                ),
            ],
            sort=("Rows or pages", True),
        ),
        rows(
            "Xids",
            f"""Errors that the GPU driver has logged to the kernel log since boot, with the time of
            the last: at most the latest {ROWS}. NVIDIA's catalogue explains the numbers; 13, 31,
            43, 45, 68 and 69 are the application's own.""",
            [
                Column("GPU", "gpu", width=60),
                Column("PCI", "pci"),
                Column("Xid", "xid", width=60),
                Column(
                    "Lines",
                    expr=f"""max by (gpu, pci, xid) (dshealthd_xid_errors_total{{@node}}) and on
                    (gpu, pci, xid) {XIDS}""",
                    width=70,
                ),
                Column("Last", expr=f"1000 * {XIDS}", unit="dateTimeFromNow"),
            ],
            sort=("Last", True),
        ),
    ]


def _links(source: Source) -> list[dashboard.Panel]:
    limits = source.limits
    return [
        graph(
            "NVLinks up",
            """Links that are active or asleep. A link that is not wired counts as not up, so
            compare a GPU with its peers and its past.""",
            (_each("dshealthd_nvlinks_up{@gpus}"), GPU),
        ),
        graph(
            "NVLink errors",
            """Errors per minute on all links of a GPU together, by kind. The threshold is for
            replays, recoveries, receive errors and retransmissions; the alert for CRC errors counts
            per second.""",
            (
                """sum by (gpu, type) (60 *
                rate(dshealthd_gpu_nvlink_errors_total{@gpus}[$__rate_interval]))""",
                f"{GPU} {{{{type}}}}",
            ),
            steps=((limits["nvlink_errors_per_minute"], RED),),
        ),
        rows(
            "Links that are down or have errors",
            f"NVLinks that went down or had errors in the time shown: at most {ROWS} of each.",
            [
                Column("GPU", "gpu", width=60),
                Column("Link", "link", width=60),
                Column(
                    "Up",
                    expr=f"""max by (gpu, link) (dshealthd_nvlink_up{{@gpus}}) and on (gpu, link)
                    {BAD_LINKS}""",
                    states=UP,
                ),
                Column(
                    "Errors",
                    expr=f"{LINK_ERRORS} and on (gpu, link) {BAD_LINKS}",
                    decimals=0,
                    steps=((None, BLUE), (1, ORANGE)),
                ),
            ],
            sort=("Errors", True),
        ),
        graph(
            "NVLink traffic",
            "Data sent by each GPU over all its links.",
            (_each("rate(dshealthd_nvlink_transmit_bytes_total{@gpus}[$__rate_interval])"), GPU),
            unit="Bps",
        ),
        graph(
            "PCIe link",
            "Lanes of each GPU's PCIe link, and the most that the GPU and its slot allow.",
            (_each("dshealthd_pcie_link_width{@gpus}"), GPU),
            ("max(dshealthd_pcie_link_width_max{@gpus})", "limit"),
            limits=["limit"],
        ),
        graph(
            "PCIe replays",
            "Packets resent per minute after an error.",
            (_each("60 * rate(dshealthd_pcie_replays_total{@gpus}[$__rate_interval])"), GPU),
            steps=(
                (limits["pcie_replays_per_minute"], ORANGE),
                (limits["pcie_replays_gen5_per_minute"], RED),
            ),
        ),
    ]
