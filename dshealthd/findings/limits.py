"""The limits that findings compare with: the table `[findings.limits]` of the configuration.

Sources: [R] read in the named source, [S] second-hand, [O] our own judgement.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dshealthd.core.options import Bytes, Duration, option

SECTION = "findings.limits"


def _ratio(default: float, doc: str) -> Any:
    """Declare a limit that is a share, from 0 to 1."""
    return option(default, doc, minimum=0, maximum=1)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a reading becomes a finding. A reload applies them to the next judgement."""

    rendezvous_time_wait_sockets: float = option(
        100.0,
        "Sockets of rendezvous ports in TIME_WAIT; each job that ends leaves some for a minute. [O]",
        minimum=1,
    )
    rendezvous_ports_ratio: float = _ratio(0.5, "Share of the rendezvous ports in use. [O]")
    time_wait_ratio: float = _ratio(0.8, "Share of tcp_max_tw_buckets in use. [O]")
    ephemeral_ports_ratio: float = _ratio(0.8, "Share of the ephemeral ports in use. [O]")
    conntrack_ratio: float = _ratio(
        0.9, "Share of the kernel's connection tracking table in use. [O]"
    )
    orphan_listener_seconds: Duration = option(
        "60s",
        "Age from which a listener on a rendezvous port whose launcher is gone counts as left "
        "over. [O]",
        minimum="1s",
    )
    loopback_connect_seconds: Duration = option(
        "20ms",
        "Time to connect to 127.0.0.1, which takes tens of microseconds; the agent gives up after "
        "0.1 s. [O]",
        minimum="1ms",
    )
    memory_pressure_ratio: float = _ratio(
        0.1, "Share of time in which all tasks wait for memory. [O]"
    )
    memory_available_ratio: float = _ratio(
        0.05,
        "Share of the host's memory that must be available, where tasks wait for it or it shrinks by a "
        "tenth a minute. [O]",
    )
    open_files_ratio: float = _ratio(0.8, "Share of a limit on open files in use. [O]")
    threads_ratio: float = _ratio(0.9, "Share of the system's or a job's threads in use. [O]")
    locked_memory_ratio: float = _ratio(0.9, "Share of the limit on locked memory in use. [O]")
    filesystem_used_ratio: float = _ratio(
        0.9,
        "Share of space or inodes in use: ticket. Of space, if what is left would not last for three "
        "days like the last one, or is no more than filesystem_free_bytes. [O]",
    )
    filesystem_used_critical_ratio: float = _ratio(
        0.97, "The same: full, if no more than filesystem_free_bytes are left. [O]"
    )
    filesystem_free_bytes: Bytes = option(
        Bytes(100 * 10**9),
        "Space with which a file system is not full, whatever its share: a checkpoint of a model of "
        "7 billion parameters takes 98 GB. [O]",
        minimum=0,
    )
    filesystem_full_seconds: Duration = option(
        "4h", "Time in which a file system will be full at the rate of the last hour. [O]"
    )
    disk_request_seconds: Duration = option(
        "100ms",
        "Mean time of a request of a disk that does not rotate: a healthy one takes less than 1 ms, "
        "or tens of ms with deep queues. [O]",
        minimum="1ms",
    )
    disk_request_ratio: float = option(
        5.0, "The same, relative to the disk's own best of the last day. [O]", minimum=1
    )
    disk_busy_bytes_per_second: Bytes = option(
        Bytes(10**8),
        "Rate from which requests queue because a disk is busy, not because it is faulty. [O]",
        minimum=0,
    )
    path_write_seconds: Duration = option(
        "1s", "Time to write and sync 4 KiB; the agent gives up after 5 s. [O]", minimum="1ms"
    )
    shared_memory_bytes: Bytes = option(
        Bytes(10**9), "Size of /dev/shm; Docker's default is 64 MiB. [O]", minimum=0
    )
    aio_requests_ratio: float = _ratio(0.9, "Share of fs.aio-max-nr in use. [O]")
    clock_offset_seconds: Duration = option(
        "1s",
        "Offset of the clock from its peers' clocks; credentials of the peer API are valid for "
        "10 s. [O]",
        minimum="1ms",
    )
    gpu_temperature_celsius: float = option(
        83.0,
        "Core temperature of a GPU that reports no limits: ticket. NVSentinel, Azure [R]",
        minimum=40,
        maximum=120,
    )
    gpu_temperature_critical_celsius: float = option(
        90.0, "The same, critical. NVSentinel, Azure [R]", minimum=40, maximum=120
    )
    gpus: float = option(
        0.0,
        "GPUs that the node must have on its PCI bus; 0: as many as it has ever had. Set it after "
        "GPUs were removed on purpose. [O]",
        minimum=0,
    )
    xid_recent_seconds: Duration = option(
        "10m",
        "Time for which an Xid counts as recent; those that only a reset clears count until then. "
        "[O]",
        minimum="1m",
    )
    ecc_corrected_per_minute: float = option(
        100.0, "Corrected ECC errors per minute. Azure's health checks [R]", minimum=1
    )
    sram_uncorrected_aggregate: float = option(
        4.0,
        "Uncorrected SRAM errors over the life of the part. NVML, ml-engineering [R]",
        minimum=0,
    )
    hang_memory_activity_ratio: float = _ratio(
        0.05,
        "Memory activity up to which a GPU waits in a collective; beyond, it computes, and its job "
        "does not hang. sichek's event rules [R]",
    )
    hang_moved_bytes_per_second: Bytes = option(
        Bytes(10**5),
        "Rate from which a silent job that reads and writes files, or sends and receives over the "
        "network, is at work: it saves, uploads or loads. A tenth of what the slowest upload "
        "worth waiting for moves, and ten times what stores and loggers of a hung job do. [O]",
        minimum=1,
    )
    hang_utilization_ratio: float = _ratio(
        0.95, "Utilization of such a GPU, whose kernel runs all the time. sichek's event rules [R]"
    )
    hang_power_ratio: float = _ratio(
        0.5, "Power of such a GPU as a share of its limit. sichek's event rules [R]"
    )
    hang_pcie_bytes_per_second: Bytes = option(
        Bytes(300 * 10**6),
        "Traffic of such a GPU over PCIe per second. sichek's event rules [R]",
        minimum=0,
    )
    ras_idle_answers: float = option(
        4.0,
        "Consecutive answers of NCCL RAS without progress, four a minute, with a dead or failed "
        "rank as evidence. [O]",
        minimum=2,
    )
    cpu_pressure_ratio: float = _ratio(
        0.3, "Share of the time in which tasks wait for a CPU, so that it delays the GPUs. [O]"
    )
    gpu_utilization_training_ratio: float = _ratio(
        0.5, "Utilization of the GPUs of a training below which it is slow. Guides [S]"
    )
    gpu_memory_held_ratio: float = _ratio(
        0.9, "Share of a GPU's memory in use from which it counts as full. Guides [S]"
    )
    gpu_utilization_held_ratio: float = _ratio(
        0.3, "Utilization below which a GPU with full memory is idle. Guides [S]"
    )
    input_ratio: float = _ratio(0.3, "Share of a step that a rank may wait for its input. [O]")
    job_slowed_ratio: float = option(
        1.3, "A job's step time relative to its own usual one. [O]", minimum=1
    )
    communication_ratio: float = _ratio(
        0.5, "Share of time in collectives above which it is too much. Guides [S]"
    )
    failover_bytes_per_second: Bytes = option(
        Bytes(10**6),
        "Bytes per second on a node's other ports that show that a job's traffic has moved to them: "
        "more than the fabric's own management traffic. [O]",
        minimum=0,
    )
    # Spikes of a few steps are normal: PaLM's largest run had about twenty, and went back to a
    # checkpoint for each; in OLMo 2 they preceded loss spikes. They reach a thousand times the
    # typical value (SPAM, arXiv:2501.06842); warm-up, learning rate restarts and a resumed job
    # change the norm by a small factor.
    gradient_norm_ratio: float = option(
        10.0,
        "A job's gradient norm, at its lowest for a quarter of an hour, relative to its usual one. "
        "[O]",
        minimum=1,
    )
    skipped_steps_ratio: float = _ratio(
        0.1, "Share of a job's last steps that are skipped because of an overflow. [O]"
    )
    nvlink_settle_seconds: Duration = option(
        "10m", "Time after a boot or a GPU reset in which NVLinks may still train. [O]"
    )
    nvlink_errors_per_minute: float = option(
        1.0,
        "Replays or recoveries of a GPU's NVLinks per minute; with NVLink 5 also receive errors or "
        "retransmissions. DCGM 4.6 [R]",
        minimum=0,
    )
    nvlink_crc_per_second: float = option(
        1.0, "CRC errors of a GPU's NVLinks per second, up to NVLink 4. DCGM 4.6 [R]", minimum=0
    )
    nvlink_bit_error_ratio: float = _ratio(
        1e-12, "NVLink 5: bit errors per bit after correction. DCGM [R]"
    )
    pcie_replays_per_minute: float = option(
        16.0,
        "Packets that a GPU's PCIe link retransmits per minute, up to generation 4. DCGM, Azure [R]",
        minimum=1,
    )
    pcie_replays_gen5_per_minute: float = option(
        31.0, "The same from generation 5 on. DCGM, Azure [R]", minimum=1
    )
    pcie_nonfatal_errors_in_15m: float = option(
        2.0,
        "Non-fatal errors that a GPU counts on its PCIe link; a driver that looks for devices causes "
        "one or two. [O]",
        minimum=0,
    )
    pcie_corrected_errors_per_hour: float = option(
        60.0,
        "Corrected errors of a PCIe link, as its GPU counts them, and as the kernel logs them, which "
        "limits their rate. [O]",
        minimum=0,
    )
    gpu_busy_ratio: float = _ratio(
        0.5, "Utilization from which values count that an idle GPU lowers to save power. [O]"
    )
    roce_fabric_bytes: Bytes = option(
        Bytes(10**9),
        "RDMA bytes that an Ethernet port must have moved to count as part of the fabric. [O]",
        minimum=0,
    )
    port_settle_seconds: Duration = option(
        "5m", "Time after a boot in which fabric ports may still train. [O]"
    )
    link_downed_in_3h: float = option(
        3.0,
        "How often a fabric port's link, or an interface's carrier, went down in three hours. "
        "NVSentinel, gpud [R]",
        minimum=0,
    )
    infiniband_flaps_in_12h: float = option(
        3.0, "How often a fabric port left ACTIVE in twelve hours. NVSentinel, gpud [R]", minimum=1
    )
    infiniband_symbol_errors_in_12m: float = option(
        2.88, "Symbol errors at NDR (400 Gb/s) and above: 1e-14. UFM README [R]", minimum=0
    )
    infiniband_symbol_errors_in_125m: float = option(
        3.0, "The same at 1e-15. UFM README [R]", minimum=0
    )
    infiniband_symbol_errors_in_1h: float = option(
        120.0, "Symbol errors below NDR. IBTA, UFM README [R]", minimum=0
    )
    infiniband_recovery_per_minute: float = option(
        5.0, "Link error recoveries per minute. NVSentinel [R]", minimum=0
    )
    infiniband_receive_errors_per_second: float = option(
        10.0, "Receive errors per second. NVSentinel [R]", minimum=0
    )
    infiniband_discards_per_second: float = option(
        100.0, "Discarded packets per second. NVSentinel [R]", minimum=0
    )
    roce_slow_restarts_per_second: float = option(
        10.0, "Slow restarts of RoCE flows per second. NVSentinel [R]", minimum=0
    )
    network_used_bytes: Bytes = option(
        Bytes(10**9),
        "Bytes that a network interface must have received to count as in use. [O]",
        minimum=0,
    )
    network_errors_per_second: float = option(
        10.0, "Bad packets per second of an interface; NVSentinel uses 10 for ports. [O]", minimum=0
    )
    probe_silent_seconds: Duration = option(
        "5m", "Time without a round while probes run. [O]", minimum="30s"
    )
    certificate_seconds: Duration = option(
        "336h", "Time before the peer certificate expires. [O]", minimum="1m"
    )


def source(name: str) -> str:
    """Return the configuration key of a limit, as findings name it."""
    return f"{SECTION}.{name}"
