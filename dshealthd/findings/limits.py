"""The limits that findings compare with, each with its source or its derivation.

Those that depend on a site are options, the table `[findings.limits]` of the configuration. The
others come from a specification, from a vendor or from arithmetic, and are the same everywhere.

Sources in comments: [R] read in the named source, [S] second-hand, [D] derived as stated, [O] our
own judgment. An option's help names its source or derivation; without one it is our own judgment.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from dshealthd.core.options import Bytes, Duration, option

SECTION = "findings.limits"


def _ratio(default: float, doc: str) -> Any:
    """Declare a limit that is a share, from 0 to 1."""
    return option(default, doc, minimum=0, maximum=1)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Thresholds of findings. A reload applies them at once."""

    limit_used_ratio: float = _ratio(
        0.9,
        "Share of a kernel limit in use: open files, threads, locked memory, asynchronous I/O "
        "requests, ephemeral ports, TIME_WAIT, tracked connections. The default is that of "
        "node_exporter's rules for open files.",
    )
    filesystem_used_ratio: float = _ratio(
        0.9,
        "Share of space or inodes in use that opens a ticket. For space, only if the rest would "
        "last less than three days at the last day's rate, or is below filesystem_free_bytes. "
        "The kubelet evicts pods at this share.",
    )
    filesystem_free_bytes: Bytes = option(
        Bytes(92 << 30),
        "Free space above which a file system is not full, whatever its share: a checkpoint of a "
        "model with 7 billion parameters takes 98 GB, 14 bytes each.",
        minimum=0,
    )
    clock_offset_seconds: Duration = option(
        "1s",
        "Offset from the peers' clocks; the default is a tenth of the 10 s for which peer "
        "credentials are valid.",
        minimum="1ms",
    )
    gpus: float = option(
        0.0,
        "GPUs that the node must have on its PCI bus; 0: the most it has ever had. Set it after "
        "removing GPUs on purpose.",
        minimum=0,
    )
    ecc_corrected_per_minute: float = option(
        100.0,
        "Corrected ECC errors per minute; the default is that of Azure's health checks.",
        minimum=1,
    )
    hang_moved_bytes_per_second: Bytes = option(
        Bytes(10**5),
        "Rate of file or network traffic above which a silent job counts as at work (saving, "
        "uploading or loading): a tenth of the slowest useful upload, and ten times what stores "
        "and loggers of a hung job cause.",
        minimum=1,
    )
    followed_ratio: float = _ratio(
        0.0,
        "Share of each job's ranks on this node that must send heartbeats, not counting users "
        "who opted out; 1 if every job must be followed, 0 turns the rule off.",
    )
    # Staging a data set, compiling and saving a large model take up to 20 minutes at a site's
    # slowest; sites that end such jobs wait for one or two hours. [O]
    unused_seconds: Duration = option(
        "30m",
        "Time for which a job may hold GPUs without using any of them; 0 turns the rule off.",
        minimum="0s",
    )
    unused_interactive_seconds: Duration = option(
        "0s",
        "The same for interactive sessions: jobs with a terminal, and jobs that serve clients, "
        "such as notebooks; 0 turns the rule off.",
        minimum="0s",
    )
    gpu_utilization_training_ratio: float = _ratio(
        0.5,
        "GPU utilization below which a training job counts as slow; the default is a common "
        "guideline.",
    )
    input_ratio: float = _ratio(0.3, "Share of a step that a rank may wait for its input.")
    job_slowed_ratio: float = option(
        1.3,
        "A job's step time relative to its usual step time; at 1.3, a quarter of its throughput "
        "is lost.",
        minimum=1,
    )
    communication_ratio: float = _ratio(
        0.5,
        "Share of time that a job may spend in collectives; the default is a common guideline.",
    )
    # Spikes of a few steps are normal: PaLM's largest run had about twenty, and went back to a
    # checkpoint for each; in OLMo 2 they preceded loss spikes. They reach a thousand times the
    # typical value (SPAM, arXiv:2501.06842); warm-up, learning rate restarts and a resumed job
    # change the norm by a small factor.
    gradient_norm_ratio: float = option(
        10.0,
        "Lowest gradient norm of a job within 15 minutes, relative to its usual norm.",
        minimum=1,
    )
    link_downed_in_3h: float = option(
        3.0,
        "Times that a fabric port's link, or an interface's carrier, may go down in three "
        "hours; the default is that of NVSentinel and GPUd.",
        minimum=0,
    )
    infiniband_flaps_in_12h: float = option(
        3.0,
        "Times that a fabric port may leave ACTIVE in twelve hours; the default is that of "
        "NVSentinel and GPUd.",
        minimum=1,
    )
    network_errors_per_second: float = option(
        10.0,
        "Bad packets per second of an interface; the default is NVSentinel's limit for fabric "
        "ports.",
        minimum=0,
    )

    # Share of time in which all tasks wait for memory. systemd-oomd kills at 0.6: a sixth of that
    # leaves time to act. [D]
    memory_pressure_ratio: ClassVar[float] = 0.1
    # Available memory below which the host is short of it, if tasks also wait for it or it shrinks
    # by a tenth a minute: earlyoom kills here. [R]
    memory_available_ratio: ClassVar[float] = 0.05
    # A GPU waits in a collective where all of these hold: NCCL's kernel runs all the time, and
    # neither memory nor the bus is in use. sichek's event rules [R]
    hang_utilization_ratio: ClassVar[float] = 0.95
    hang_memory_activity_ratio: ClassVar[float] = 0.05
    hang_power_ratio: ClassVar[float] = 0.5
    hang_pcie_bytes_per_second: ClassVar[float] = 300e6
    # Consecutive answers without progress of a job with a dead or failed rank: one minute. [D]
    ras_idle_answers: ClassVar[float] = 4.0
    # Replays or recoveries per minute, with NVLink 5 also receive errors; CRC errors per second up
    # to NVLink 4. DCGM 4.6 [R]
    nvlink_errors_per_minute: ClassVar[float] = 1.0
    nvlink_crc_per_second: ClassVar[float] = 1.0
    # Replays, or corrected errors, up to generation 4: the bit errors that the specification allows
    # (1e-12) on 16 lanes. DCGM, Azure [R]
    pcie_replays_per_minute: ClassVar[float] = 16.0
    # Packets that a fabric port discards. NVSentinel [R]
    infiniband_discards_per_second: ClassVar[float] = 100.0
    # Most: whoever picks one of the rendezvous ports fails more often than not. [D]
    rendezvous_ports_ratio: ClassVar[float] = 0.5
    # A listener on a rendezvous port without its launcher: torchrun and Slurm end what is left of a
    # job 30 s after they asked it to, and this is twice that. [D]
    orphan_listener_seconds: ClassVar[float] = 60.0
    # The fastest of a minute's connects to 127.0.0.1 takes tens of microseconds, and a turn at a
    # busy CPU some milliseconds. [O]
    loopback_connect_seconds: ClassVar[float] = 0.02
    # node_exporter's rules: 3 % left, or full within four hours, are critical. [R]
    filesystem_used_critical_ratio: ClassVar[float] = 0.97
    filesystem_full_seconds: ClassVar[float] = 4 * 3600.0
    # A request of a disk that does not rotate takes less than 1 ms, tens of ms with deep queues: a
    # hundred times as long, five times what it took at best in a day, and not for the queue of a
    # busy disk, which moves more than a rotating one could. [O]
    disk_request_seconds: ClassVar[float] = 0.1
    disk_request_ratio: ClassVar[float] = 5.0
    disk_busy_bytes_per_second: ClassVar[float] = 1e8
    # To write and sync 4 KiB: a fifth of the time after which a path counts as one that hangs. [D]
    path_write_seconds: ClassVar[float] = 1.0
    # /dev/shm: NVIDIA's containers start with `--shm-size=1g`; Docker's default is 64 MiB. [S]
    shared_memory_bytes: ClassVar[float] = 1e9
    # GPUs that report no limits of their own. NVSentinel, Azure [R]
    gpu_temperature_celsius: ClassVar[float] = 83.0
    gpu_temperature_critical_celsius: ClassVar[float] = 90.0
    # As long as NCCL's time-out: a job that an Xid has broken ends within it. [D]
    xid_recent_seconds: ClassVar[float] = 600.0
    # Over the life of the part. NVML, ml-engineering [R]
    sram_uncorrected_aggregate: ClassVar[float] = 4.0
    # Tasks that wait for a CPU, where GPUs are idle too: with less than a third of the time lost
    # GPUs at half of their utilization are idle for other reasons. [O]
    cpu_pressure_ratio: ClassVar[float] = 0.3
    # A GPU that is full, and idle all the same. Guides [S]
    gpu_memory_held_ratio: ClassVar[float] = 0.9
    gpu_utilization_held_ratio: ClassVar[float] = 0.3
    # Values count that an idle GPU lowers to save power, from this utilization on: most of the
    # time. [D]
    gpu_busy_ratio: ClassVar[float] = 0.5
    # A healthy loss scale overflows when it grows, every 1,000 (DeepSpeed) or 2,000 steps (torch):
    # a hundred times that. [D]
    skipped_steps_ratio: ClassVar[float] = 0.1
    # Links may train for so long after a boot or a reset: 214 nodes were reported elsewhere at once
    # because theirs did. [O]
    nvlink_settle_seconds: ClassVar[float] = 600.0
    port_settle_seconds: ClassVar[float] = 300.0
    # Bit errors per bit after correction, NVLink 5. DCGM [R]
    nvlink_bit_error_ratio: ClassVar[float] = 1e-12
    # The same rate of bit errors on 16 lanes of twice the rate. DCGM, Azure [R]
    pcie_replays_gen5_per_minute: ClassVar[float] = 31.0
    # A driver that looks for devices causes one or two. [O]
    pcie_nonfatal_errors_in_15m: ClassVar[float] = 2.0
    # A port or an interface is in use once it has moved one step's gradients of a small model; what
    # manages a node needs years for it. [O]
    roce_fabric_bytes: ClassVar[float] = 1e9
    network_used_bytes: ClassVar[float] = 1e9
    # Symbol errors: at NDR (400 Gb/s) and above bit errors of 1e-14 and of 1e-15, below of the
    # InfiniBand specification. UFM README [R]
    infiniband_symbol_errors_in_12m: ClassVar[float] = 2.88
    infiniband_symbol_errors_in_125m: ClassVar[float] = 3.0
    infiniband_symbol_errors_in_1h: ClassVar[float] = 120.0
    # Per minute, and per second: NVSentinel [R]
    infiniband_recovery_per_minute: ClassVar[float] = 5.0
    infiniband_receive_errors_per_second: ClassVar[float] = 10.0
    roce_slow_restarts_per_second: ClassVar[float] = 10.0
    # Thirty of the probes' epochs. [D]
    probe_silent_seconds: ClassVar[float] = 300.0


OPTIONS = frozenset(field.name for field in fields(Limits))
"""The limits that the configuration has."""


def source(name: str) -> str:
    """Return the configuration key of a limit, as findings name it; empty if it is fixed."""
    return f"{SECTION}.{name}" if name in OPTIONS else ""


def all_limits() -> dict[str, float]:
    """Return all limits by name, options with their default."""
    names = [name for name in Limits.__annotations__ if not name.startswith("_")]
    return {name: float(getattr(Limits(), name)) for name in names}
