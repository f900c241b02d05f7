"""Each limit from both sides: what is just within it is no finding, and what is just beyond is."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from dshealthd.findings.limits import OPTIONS, all_limits
from tests.findings.player import found, scene, seconds

JOB = 'dshealthd_job_ranks{training_job="j", run="j"} 8x400'
GPU = 'dshealthd_job_gpu_info{training_job="j", rank="0", gpu="0", uuid="G"} 1x400'
PORT = 'device="mlx5_0", port="1"'
IN_USE = (
    'dshealthd_network_receive_bytes_total{device="eth0"} 5e9x400',
    "dshealthd_uptime_seconds 1e6x400",
)


class Sides(NamedTuple):
    """What an agent reads, with `@` in place of the values on either side of a limit."""

    finding: str
    within: str
    beyond: str
    samples: tuple[str, ...]
    every: str = "15s"
    at: str = "20m"


def share(finding: str, part: str, whole: str) -> Sides:
    """Return the two sides of nine tenths of a limit that is 1,000."""
    return Sides(
        finding, "900x400", "901x400", (f"dshealthd_{part} @", f"dshealthd_{whole} 1000x400")
    )


def rate(finding: str, within: str, beyond: str, *samples: str, **more: str) -> Sides:
    """Return the two sides of a counter that grows by so much in 15 s."""
    return Sides(finding, f"0+{within}x400", f"0+{beyond}x400", samples, **more)


def port_errors(type_: str, rate_: str) -> tuple[str, ...]:
    """Return a port of the fabric that is up, at this rate, with errors of a type."""
    return (
        f'dshealthd_infiniband_port_errors_total{{{PORT}, type="{type_}"}} @',
        f"dshealthd_infiniband_port_up{{{PORT}}} 1x400",
        f"dshealthd_infiniband_port_rate_bytes_per_second{{{PORT}}} {rate_}x400",
        'dshealthd_infiniband_port_info{device="mlx5_0", port="1", link_layer="InfiniBand"} 1x400',
        "dshealthd_uptime_seconds 1e6x400",
    )


HALF_FULL = 'dshealthd_filesystem_size_bytes{path="/d"} 1e13x400'
DISK = (
    'dshealthd_disk_info{disk="sda", rotational="0"} 1x400',
    'dshealthd_disk_requests_total{disk="sda", operation="read"} 0+150x400',
)
LINK = 'dshealthd_gpu_nvlink_errors_total{gpu="0", uuid="G", type="%s"} @'
REPLAYS = 'dshealthd_pcie_replays_total{gpu="0", uuid="G"} @'
GENERATION = 'dshealthd_pcie_link_generation_max{gpu="0", uuid="G"} %dx400'
COUNTER = 'type="uncorrected", counter="aggregate"'
TEMPERATURE = 'dshealthd_gpu_temperature_celsius{gpu="0", uuid="G", sensor="core"} @'
ORPHAN = 'dshealthd_rendezvous_orphan_age_seconds{port="29500"} @'
SIDES = {
    "limit_used_ratio": (
        share("HostLimitNear", 'open_files{scope="system"}', 'open_files_limit{scope="system"}'),
        share("HostLimitNear", "threads", "threads_limit"),
        share("HostLimitNear", "aio_requests", "aio_requests_limit"),
        share("HostLimitNear", "tcp_ephemeral_ports_used", "tcp_ephemeral_ports"),
        share("HostLimitNear", 'tcp_sockets{state="time_wait"}', "tcp_time_wait_limit"),
        share("HostLimitNear", "conntrack_entries", "conntrack_entries_limit"),
        share(
            "HostLimitNear",
            'job_locked_memory_bytes{training_job="j", type="locked"}',
            'job_locked_memory_limit_bytes{training_job="j"}',
        ),
    ),
    "rendezvous_ports_ratio": Sides(
        "RendezvousPortsBusy",
        "50x400",
        "51x400",
        ("dshealthd_rendezvous_ports_used @", "dshealthd_rendezvous_ports 100x400"),
    ),
    "orphan_listener_seconds": Sides("RendezvousPortsBusy", "60x400", "61x400", (ORPHAN,)),
    "loopback_connect_seconds": Sides(
        "LoopbackRefused", "0.02x400", "0.021x400", ("dshealthd_loopback_connect_seconds @",)
    ),
    "memory_pressure_ratio": Sides(
        "HostMemoryPressure",
        "0.1x400",
        "0.11x400",
        ('dshealthd_pressure_stalled_ratio{resource="memory", tasks="full"} @',),
    ),
    "memory_available_ratio": Sides(
        "HostMemoryPressure",
        "5e9x400",
        "4.9e9x400",
        (
            "dshealthd_memory_available_bytes @",
            "dshealthd_memory_total_bytes 1e11x400",
            'dshealthd_pressure_stalled_ratio{resource="memory", tasks="some"} 0.2x400',
        ),
    ),
    "filesystem_used_ratio": Sides(
        "FilesystemFull",
        "1e11x400",
        "9.9e10x400",
        (
            'dshealthd_filesystem_free_bytes{path="/d"} @',
            'dshealthd_filesystem_size_bytes{path="/d"} 1e12x400',
        ),
    ),
    "filesystem_free_bytes": Sides(
        "FilesystemFull",
        "1e11x400",
        "9.9e10x400",
        ('dshealthd_filesystem_free_bytes{path="/d"} @', HALF_FULL),
    ),
    "filesystem_full_seconds": Sides(
        "FilesystemFull",
        "3.2e12-1e11x12",
        "2.9e12-1e11x12",
        ('dshealthd_filesystem_free_bytes{path="/d"} @', HALF_FULL),
        every="10m",
        at="70m",
    ),
    "disk_request_seconds": rate(
        "StorageTrouble",
        "0.15x80 12.15+14.9",
        "0.15x80 12.15+15.2",
        'dshealthd_disk_request_seconds_total{disk="sda", operation="read"} @',
        *DISK,
        at="1h40m",
    ),
    "path_write_seconds": Sides(
        "StorageTrouble", "1x400", "1.1x400", ('dshealthd_path_write_seconds{path="/d"} @',)
    ),
    "shared_memory_bytes": Sides(
        "SharedMemoryLow",
        "1e9x400",
        "0.9e9x400",
        (
            'dshealthd_filesystem_size_bytes{path="/dev/shm"} @',
            "dshealthd_gpus_expected 8x400",
        ),
    ),
    "clock_offset_seconds": (
        Sides(
            "ClockWrong",
            "1x400",
            "1.1x400",
            ('dshealthd_probe_clock_offset_seconds{statistic="median"} @',),
        ),
        Sides(
            "ClockWrong",
            "-1x400",
            "-1.1x400",
            ('dshealthd_probe_clock_offset_seconds{statistic="median"} @',),
        ),
    ),
    "gpu_temperature_celsius": Sides("GpuThrottled", "82x400", "83x400", (TEMPERATURE,)),
    "ecc_corrected_per_minute": rate(
        "GpuRepairDue",
        "24",
        "26",
        'dshealthd_gpu_ecc_errors_total{gpu="0", uuid="G", type="corrected", counter="volatile"} @',
    ),
    "sram_uncorrected_aggregate": Sides(
        "GpuSramWornOut",
        "4x400",
        "5x400",
        (
            (
                f'dshealthd_gpu_ecc_location_errors_total{{gpu="0", uuid="G", location="sram", '
                f"{COUNTER}}} @"
            ),
        ),
    ),
    "gpu_utilization_training_ratio": Sides(
        "GpusStarved",
        "0.5x400",
        "0.49x400",
        (
            'dshealthd_gpu_utilization_ratio{gpu="0", uuid="G"} @',
            'dshealthd_gpu_compute_processes{gpu="0", uuid="G"} 1x400',
            'dshealthd_pressure_stalled_ratio{resource="cpu", tasks="some"} 0.5x400',
        ),
        at="40m",
    ),
    "cpu_pressure_ratio": Sides(
        "GpusStarved",
        "0.3x400",
        "0.31x400",
        (
            'dshealthd_gpu_utilization_ratio{gpu="0", uuid="G"} 0.2x400',
            'dshealthd_gpu_compute_processes{gpu="0", uuid="G"} 1x400',
            'dshealthd_pressure_stalled_ratio{resource="cpu", tasks="some"} @',
        ),
        at="40m",
    ),
    "gpu_memory_held_ratio": Sides(
        "GpusStarved",
        "9e10x400",
        "9.1e10x400",
        (
            GPU,
            'dshealthd_gpu_utilization_ratio{gpu="0", uuid="G"} 0.1x400',
            'dshealthd_gpu_memory_used_bytes{gpu="0", uuid="G"} @',
            'dshealthd_gpu_memory_total_bytes{gpu="0", uuid="G"} 1e11x400',
        ),
        at="80m",
    ),
    "gpu_utilization_held_ratio": Sides(
        "GpusStarved",
        "0.3x400",
        "0.29x400",
        (
            GPU,
            'dshealthd_gpu_utilization_ratio{gpu="0", uuid="G"} @',
            'dshealthd_gpu_memory_used_bytes{gpu="0", uuid="G"} 9.5e10x400',
            'dshealthd_gpu_memory_total_bytes{gpu="0", uuid="G"} 1e11x400',
        ),
        at="80m",
    ),
    "input_ratio": Sides(
        "InputSlow",
        "0.3x400",
        "0.31x400",
        (
            'dshealthd_job_step{training_job="j", rank="0"} 0+15x400',
            'dshealthd_job_step_seconds{training_job="j", rank="0"} 1x400',
            'dshealthd_job_input_seconds{training_job="j", rank="0"} @',
        ),
        at="40m",
    ),
    "job_slowed_ratio": Sides(
        "JobSlow",
        "1x280 1.3x120",
        "1x280 1.32x120",
        ('dshealthd_job_step_seconds{training_job="j", rank="0"} @',),
        at="95m",
    ),
    "communication_ratio": rate(
        "JobSlow",
        "7.1",
        "7.6",
        'dshealthd_job_communication_seconds_total{training_job="j", rank="0"} @',
        at="40m",
    ),
    "gradient_norm_ratio": Sides(
        "GradientNormHigh",
        "1x280 10x120",
        "1x280 10.1x120",
        ('dshealthd_job_gradient_norm{training_job="j", rank="0"} @',),
        at="95m",
    ),
    "skipped_steps_ratio": rate(
        "StepsSkipped",
        "3",
        "3.1",
        'dshealthd_job_skipped_steps_total{training_job="j", rank="0"} @',
        'dshealthd_job_step{training_job="j", rank="0"} 0+30x400',
    ),
    "nvlink_errors_per_minute": rate("NvlinkDegraded", "0.24", "0.26", LINK % "replay"),
    "nvlink_crc_per_second": rate("NvlinkDegraded", "14.5", "15.1", LINK % "crc"),
    "nvlink_bit_error_ratio": Sides(
        "NvlinkDegraded",
        "1e-12x400",
        "1.1e-12x400",
        ('dshealthd_nvlink_effective_bit_error_ratio{gpu="0", uuid="G", link="0"} @',),
    ),
    "pcie_replays_per_minute": (
        rate("PcieDegraded", "3.9", "4.1", REPLAYS, GENERATION % 4),
        rate(
            "PcieDegraded",
            "3.9",
            "4.1",
            'dshealthd_pcie_errors_total{gpu="0", uuid="G", type="correctable"} @',
        ),
        Sides(
            "PcieDegraded",
            "0 160x400",
            "0 161x400",
            ('dshealthd_kernel_events_total{event="pcie_error_corrected"} @',),
            at="9m",
        ),
    ),
    "pcie_replays_gen5_per_minute": rate("PcieDegraded", "7.5", "7.7", REPLAYS, GENERATION % 5),
    "pcie_nonfatal_errors_in_15m": Sides(
        "PcieDegraded",
        "0 2x400",
        "0 3x400",
        ('dshealthd_pcie_errors_total{gpu="0", uuid="G", type="nonfatal"} @',),
        at="10m",
    ),
    "link_downed_in_3h": Sides(
        "NetworkPortDegraded",
        "0 6x400",
        "0 8x400",
        ('dshealthd_network_carrier_changes_total{device="eth0"} @', *IN_USE),
    ),
    "infiniband_flaps_in_12h": Sides(
        "NetworkPortDegraded",
        "0 2x400",
        "0 3x400",
        (f"dshealthd_infiniband_port_flaps_total{{{PORT}}} @",),
    ),
    "infiniband_symbol_errors_in_12m": rate(
        "NetworkPortDegraded", "0.0001", "0.0625", *port_errors("symbol_error", "5e10"), at="30m"
    ),
    "infiniband_symbol_errors_in_1h": rate(
        "NetworkPortDegraded", "0.49", "0.51", *port_errors("symbol_error", "2.5e10"), at="90m"
    ),
    "infiniband_recovery_per_minute": rate(
        "NetworkPortDegraded", "1.2", "1.26", *port_errors("link_error_recovery", "5e10")
    ),
    "infiniband_receive_errors_per_second": rate(
        "NetworkPortDegraded", "145", "151", *port_errors("port_rcv_errors", "5e10")
    ),
    "infiniband_discards_per_second": rate(
        "NetworkPortDegraded", "1450", "1510", *port_errors("port_xmit_discards", "5e10")
    ),
    "roce_slow_restarts_per_second": rate(
        "NetworkPortDegraded", "145", "151", *port_errors("roce_slow_restart", "5e10")
    ),
    "network_errors_per_second": rate(
        "NetworkPortDegraded",
        "145",
        "151",
        'dshealthd_network_receive_errors_total{device="eth0"} @',
        *IN_USE,
    ),
    "network_used_bytes": Sides(
        "NetworkPortDegraded",
        "1e9x400",
        "1.1e9x400",
        (
            'dshealthd_network_receive_bytes_total{device="eth0"} @',
            'dshealthd_network_up{device="eth0"} 0x400',
            "dshealthd_uptime_seconds 1e6x400",
        ),
    ),
    "port_settle_seconds": Sides(
        "FabricPortDown",
        "300x400",
        "301x400",
        (
            "dshealthd_uptime_seconds @",
            f"dshealthd_infiniband_port_up{{{PORT}}} 1x8 0x400",
            f"dshealthd_infiniband_port_flaps_total{{{PORT}}} 1x400",
        ),
    ),
    "probe_silent_seconds": Sides(
        "ProbesTrouble",
        "0x4 785x400",
        "0x4 650x400",
        (
            "dshealthd_probe_last_round_timestamp_seconds @",
            "dshealthd_probe_up 1x400",
            "dshealthd_members 4x400",
        ),
        at="18m",
    ),
}
EVENT = 'dshealthd_kernel_events_total{event="%s"} @'
TROUBLE = 'dshealthd_job_rank_trouble_seconds{training_job="j", rank="0", what="%s"} '
CRASHED = 'dshealthd_agent_crashed{at="%d"} '


def lines(finding: str, event: str, least: int) -> Sides:
    """Return the two sides of how many lines of the kernel's log are a fault."""
    return Sides(finding, f"0 {least - 1}x40", f"0 {least}x40", (EVENT % event,), "1m", "9m")


def stalled(what: str, within: str, beyond: str) -> Sides:
    """Return the two sides of for how long a rank must be in trouble, or its job idle."""
    rows = (
        TROUBLE % what + ("@" if what == "stopped" else "900x40"),
        'dshealthd_job_watchdog_seconds{training_job="j"} 600x40',
        'dshealthd_job_idle_seconds{training_job="j"} @',
    )
    return Sides("JobStalled", within, beyond, rows, at="8m")


FIXED = {
    "lines": (
        lines("HostErrors", "soft_lockup", 3),
        lines("HostErrors", "allocation_failure", 10),
        lines("HostErrors", "cpu_throttled", 10),
        lines("HostErrors", "peermem_error", 10),
        lines("HostErrors", "memory_error_corrected", 101),
        lines("AdapterTrouble", "adapter_command_failed", 10),
        lines("AdapterTrouble", "link_down", 3),
        lines("PcieDegraded", "iommu_fault", 10),
    ),
    # The last lines come at the same time; the first ones just before the window, or in it.
    "ten minutes": Sides(
        "HostErrors", "0x2 1x11 3x40", "0x6 1x7 3x40", (EVENT % "soft_lockup",), "1m", "16m"
    ),
    "an hour": Sides(
        "HostErrors", "0x10 1x62 10x40", "0x25 1x47 10x40", (EVENT % "cpu_throttled",), "1m", "80m"
    ),
    "a day": Sides(
        "HostErrors",
        "0x6 1x146 101x40",
        "0x12 1x140 101x40",
        (EVENT % "memory_error_corrected",),
        "10m",
        "25h40m",
    ),
    "memory runs out": rate(
        "HostMemoryPressure",
        "",
        "",
        "dshealthd_memory_total_bytes 1e11x400",
        "dshealthd_memory_available_bytes @",
    )._replace(within="4.9e9-7.5e7x40", beyond="4.9e9-1.125e8x40", at="4m"),
    # Eleven steps in five minutes are enough to speak of, and a hundred to have settled.
    "steps": rate(
        "StepsSkipped",
        "0.4",
        "0.6",
        'dshealthd_job_step{training_job="j", rank="0"} @',
        'dshealthd_job_skipped_steps_total{training_job="j", rank="0"} @',
        at="60m",
    ),
    "settled steps": Sides(
        "StepsSkipped",
        "0+10x10 100x100",
        "1+10x10 101x100",
        (
            'dshealthd_job_step{training_job="j", rank="0"} @',
            'dshealthd_job_skipped_steps_total{training_job="j", rank="0"} @',
        ),
        at="5m",
    ),
    "trouble": (stalled("stopped", "29x40", "30x40"), stalled("ended", "59x40", "60x40")),
    "crashes": Sides(
        "AgentTrouble",
        "_x400",
        "1x400",
        (CRASHED % 1 + "1x400", CRASHED % 2 + "1x400", CRASHED % 3 + "@"),
    ),
    "crashes in half an hour": Sides(
        "AgentTrouble",
        "1x9 stale",
        "1x12 stale",
        (CRASHED % 1 + "_x38 1x40", CRASHED % 2 + "_x38 1x40", CRASHED % 3 + "@"),
        "1m",
        "40m",
    ),
    "throttled again": Sides(
        "GpuThrottled",
        "1 0x5 " * 30,
        "1 0x3 " * 30,
        ('dshealthd_gpu_throttle_active{gpu="0", uuid="G", reason="hw_thermal_slowdown"} @',),
    ),
}
"""Counts and times that are the same everywhere, and no limits of a value."""
ROWS = [
    pytest.param(side, id=f"{name}-{place}")
    for name, sides in (SIDES | FIXED).items()
    for place, side in enumerate((sides,) if isinstance(sides, Sides) else sides)
]
ELSEWHERE = {
    "disk_request_ratio": "disks.yml",
    "disk_busy_bytes_per_second": "disks.yml",
    "failover_bytes_per_second": "slow-communication.yml",
    "filesystem_used_critical_ratio": "disk-full.yml",
    "followed_ratio": "job-not-followed.yml",
    "gpu_busy_ratio": "cpu-offload-slow.yml",
    "gpu_temperature_critical_celsius": "gpu-throttled.yml",
    "gpus": "gpu-lost.yml",
    "hang_memory_activity_ratio": "test_work.py",
    "hang_moved_bytes_per_second": "test_work.py",
    "hang_pcie_bytes_per_second": "nccl-timeout.yml",
    "hang_power_ratio": "nccl-timeout.yml",
    "hang_utilization_ratio": "nccl-timeout.yml",
    "infiniband_symbol_errors_in_125m": "bad-link-slow.yml",
    "nvlink_settle_seconds": "bad-link.yml",
    "ras_idle_answers": "nccl-timeout.yml",
    "roce_fabric_bytes": "bad-link.yml",
    "unused_interactive_seconds": "gpus-unused.yml",
    "unused_seconds": "gpus-unused.yml",
    "xid_recent_seconds": "gpu-lost.yml",
}
"""Limits whose two sides are in scenes that show more than the limit."""


@pytest.mark.parametrize("sides", ROWS)
def test_sides(sides: Sides) -> None:
    """A finding begins with what is beyond its limit, and not with what is within."""

    def named(value: str) -> set[str]:
        samples = [row.replace("@", value) for row in sides.samples]
        at = seconds(sides.at)
        (names,) = found(scene({"every": sides.every, "samples": samples}), [at]).values()
        return {name.split()[0] for name in names}

    assert sides.finding not in named(sides.within)
    assert sides.finding in named(sides.beyond)


def test_every_limit_has_two_sides() -> None:
    """A new limit has its cases, too; one that is gone has none."""
    assert SIDES.keys() | ELSEWHERE.keys() == all_limits().keys()
    assert SIDES.keys() & ELSEWHERE.keys() == set()
    assert all_limits().keys() >= OPTIONS
