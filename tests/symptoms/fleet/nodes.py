"""A node of the fleet: what its agent exports in a healthy life with reboots, upgrades and jobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from tests.symptoms.fleet.series import Series, Value

GPUS = range(2)
TRAINS = 2
"""Minutes after a boot in which ports and links still train."""


@dataclass
class Node:
    """One node, and when what happens to it, in minutes."""

    cluster: str
    name: str
    address: str
    model: str
    partition: int
    members: int
    reboots: list[tuple[int, int]] = field(default_factory=list)
    """When it goes down, and for how long."""
    misses: list[int] = field(default_factory=list)
    """Scrapes that fail: an agent that is upgraded, or the network."""
    flaps: list[int] = field(default_factory=list)
    """Minutes in which a port of the fabric goes down and comes back."""
    jobs: list[tuple[int, int, str]] = field(default_factory=list)
    """From, to, and name of the training that uses all its GPUs."""
    checkpoints: list[int] = field(default_factory=list)
    """When rank 0 of a job without heartbeats writes for ten minutes, and the others wait."""
    joins: int = 0
    leaves: int = 10**9

    @property
    def target(self) -> dict[str, str]:
        """Return the labels of its target."""
        return {
            "cluster": self.cluster,
            "exporter": "dshealthd",
            "job": "dshealthd",
            "instance": self.address,
            "node": self.name,
        }


def chance(random: Random, minutes: int, rate: float) -> list[int]:
    """Return minutes at which something with this rate a minute happens."""
    return [minute for minute in range(minutes) if random.random() < rate]


@dataclass(frozen=True)
class Life:
    """What a node's life is like in each minute."""

    booted: list[float]
    """When it was booted last, in minutes."""
    busy: list[bool]
    waits: list[bool]
    """Whether ranks wait for a checkpoint of rank 0."""
    trains: list[bool]
    flapped: list[int]
    """How often a port has flapped before."""


class Put(Protocol):
    """Puts a series of a node, where it is up; one that changes, by the minute."""

    def __call__(
        self,
        name: str,
        value: float | Callable[[int], Value],
        labels: dict[str, str] | None = None,
    ) -> None:
        """Put it."""


def export(node: Node, series: Series) -> None:
    """Put all series of a node."""
    minutes = range(series.minutes)
    boots = [-100_000.0]
    up: list[Value] = []
    booted: list[float] = []
    for minute in minutes:
        down = any(start <= minute < start + length for start, length in node.reboots)
        boots += [
            float(start + length) for start, length in node.reboots if start + length == minute
        ]
        booted.append(boots[-1])
        there = node.joins <= minute < node.leaves
        up.append(float(not down and minute not in node.misses) if there else None)
    life = Life(
        booted=booted,
        busy=[any(start <= minute < end for start, end, _ in node.jobs) for minute in minutes],
        waits=[any(at <= minute < at + 10 for at in node.checkpoints) for minute in minutes],
        trains=[minute - booted[minute] < TRAINS for minute in minutes],
        flapped=[sum(at < minute for at in node.flaps) for minute in minutes],
    )
    series.put("up", node.target, up)

    def put(
        name: str, value: float | Callable[[int], Value], labels: dict[str, str] | None = None
    ) -> None:
        told: Callable[[int], Value] = value if callable(value) else lambda _: value
        row = [told(minute) if up[minute] == 1 else None for minute in minutes]
        series.put(f"dshealthd_{name}", (labels or {}) | node.target, row)

    _host(put, node, life)
    _disk(put, life)
    _ports(put, node, life)
    _gpus(put, node, life)
    _jobs(put, node, life)


def _host(put: Put, node: Node, life: Life) -> None:
    put("build_info", 1.0, {"version": "1", "pythonversion": "3.11"})
    put("uptime_seconds", lambda minute: 60.0 * (minute - life.booted[minute]) + 30)
    put("members", float(node.members))
    put("members_hash", 1000.0 + node.partition)
    put("probe_up", 1.0)
    put("probe_last_round_timestamp_seconds", lambda minute: 60.0 * minute, {"kind": "light"})
    put("gpus_expected", float(len(GPUS)))
    put("gpus_visible", float(len(GPUS)))
    for collector in ("gpu", "infiniband", "ecc", "nvlink", "kernel_log", "filesystem"):
        put("collector_up", 1.0, {"collector": collector})
        put("collector_available", 1.0, {"collector": collector})
    put("loopback_up", 1.0)
    put("clock_synchronized", lambda minute: float(not life.trains[minute]))
    put("memory_total_bytes", 2e12)
    put("memory_available_bytes", 1.5e12)
    put("open_files", 40_000.0, {"scope": "system"})
    put("open_files_limit", 9e6, {"scope": "system"})
    put("filesystem_size_bytes", 1e13, {"path": "/data"})
    put("filesystem_free_bytes", lambda minute: 6e12 - 1e8 * minute, {"path": "/data"})
    put("network_up", lambda minute: float(not life.trains[minute]), {"device": "eth0"})
    put("network_receive_bytes_total", 5e12, {"device": "eth0"})
    # Half of the older model has slower adapters, which is no fault of theirs.
    slower = node.model == "A100" and int(node.name[1:]) % 4 == 1
    put("network_speed_bytes_per_second", 1.25e9 if slower else 3.125e9, {"device": "eth0"})
    put("threads", lambda minute: 9_000.0 if life.busy[minute] else 2_000.0)
    put("threads_limit", 4e6)
    put("software_fingerprint", 77.0 + node.partition, {"component": "topology"})
    # Who writes a checkpoint waits for its file system.
    put("processes_stuck", lambda minute: float(life.waits[minute]))


def _disk(put: Put, life: Life) -> None:
    """Put a disk: little to do, shards to read while a job runs, and checkpoints, when its queue is
    full and each request takes two hundred times as long.
    """
    disk = {"disk": "nvme0n1"}
    requests, seconds, moved = [0.0], [0.0], [0.0]
    for minute, busy in enumerate(life.busy):
        rate, each, size = (100.0, 4e-4, 2e5) if busy else (2.0, 1e-3, 4e3)
        if life.waits[minute]:
            rate, each, size = 4_000.0, 0.15, 5e5
        for total, more in ((requests, rate), (seconds, rate * each), (moved, rate * size)):
            # A boot begins to count anew.
            total.append(60 * more + (0.0 if life.booted[minute] == minute else total[-1]))
    operation = disk | {"operation": "write"}
    put("disk_requests_total", lambda minute: requests[minute + 1], operation)
    put("disk_request_seconds_total", lambda minute: seconds[minute + 1], operation)
    put("disk_bytes_total", lambda minute: moved[minute + 1], operation)
    put(
        "disk_requests_in_flight",
        lambda minute: 600.0 if life.waits[minute] else float(life.busy[minute]),
        disk,
    )
    put("disk_info", 1.0, disk | {"disk_model": "MZQL2", "rotational": "0"})


def _ports(put: Put, node: Node, life: Life) -> None:
    for port in ("mlx5_0", "mlx5_1"):
        where = {"device": port, "port": "1"}
        second = port == "mlx5_1"
        wired = not (second and node.model == "A100")
        flap = node.flaps if second else []
        put("infiniband_port_up", _port(life, flap, wired=wired), where)
        put("infiniband_port_flaps_total", _flaps(life, 0, counts=second and wired), where)
        if wired:
            put("infiniband_port_rate_bytes_per_second", 5e10, where)
        count = where | {"type": "link_downed"}
        put("infiniband_port_errors_total", _flaps(life, 3, counts=second and wired), count)
        put(
            "infiniband_port_errors_total",
            lambda m: 700.0 * (life.booted[m] > 0),
            where | {"type": "symbol_error"},
        )


def _gpus(put: Put, node: Node, life: Life) -> None:
    put("node_class_info", 1.0, {"model": node.model})
    for gpu in GPUS:
        which = {"gpu": str(gpu), "uuid": f"{node.cluster}-{node.name}-{gpu}"}
        put("gpu_up", 1.0, which)
        put("gpu_info", 1.0, which | {"name": node.model, "pci": f"0000:{gpu}1:00.0"})
        put("gpu_energy_joules_total", lambda m: 30_000.0 * (m - life.booted[m]), which)
        put(
            "gpu_temperature_celsius",
            lambda m: 68.0 if life.busy[m] else 40.0,
            which | {"sensor": "core"},
        )
        put("gpu_temperature_limit_celsius", 89.0, which | {"limit": "slowdown"})
        put("gpu_temperature_limit_celsius", 87.0, which | {"limit": "max_operating"})
        put("gpu_utilization_ratio", lambda m: float(life.busy[m]), which)
        put("gpu_memory_activity_ratio", lambda m: 0.5 * life.busy[m] * (not life.waits[m]), which)
        put(
            "gpu_power_watts",
            lambda m: 650.0 if life.busy[m] and not life.waits[m] else 180.0,
            which,
        )
        put("gpu_power_limit_watts", 700.0, which | {"limit": "enforced"})
        put("gpu_memory_used_bytes", lambda m: 7e10 * life.busy[m], which)
        put("gpu_memory_total_bytes", 8e10, which)
        put("gpu_compute_processes", lambda m: float(life.busy[m]), which)
        put("gpu_throttle_active", 0.0, which | {"reason": "hw_thermal_slowdown"})
        put("gpu_throttle_active", 0.0, which | {"reason": "hw_slowdown"})
        put("gpu_recovery_action", 0.0, which)
        put("gpu_remapped_rows_pending", 0.0, which)
        put("gpu_remapped_rows_failed", 0.0, which)
        volatile = which | {"type": "uncorrected", "counter": "volatile"}
        put("gpu_ecc_errors_total", 0.0, volatile)
        put("nvlink_speed_bytes_per_second", 5e10 if node.model == "H100" else 2.5e10, which)
        put("nvlinks_up", lambda m: 4.0 if life.trains[m] else 18.0, which)
        put("pcie_replays_total", lambda m: float(m // 10), which)
        put("pcie_link_width", 16.0, which)
        put("pcie_link_width_max", 16.0, which)


def _jobs(put: Put, node: Node, life: Life) -> None:
    for start, end, job in node.jobs:
        which = {"training_job": job}

        def during(value: float, start: int = start, end: int = end) -> Callable[[int], Value]:
            return lambda minute: value if start <= minute < end else None

        put("job_threads", during(7_000.0), which)
        put("job_threads_limit", during(32_000.0), which)
        put("job_gradient_norm", _norm(start, end), which | {"rank": "0"})
        put("job_info", during(1.0), which | {"launcher": "torchrun", "world_size": "2"})
        for gpu in GPUS:
            rank = which | {"rank": str(gpu)}
            uuid = f"{node.cluster}-{node.name}-{gpu}"
            put("job_gpu_info", during(1.0), rank | {"gpu": str(gpu), "uuid": uuid})
        put("job_nccl_answers_without_progress", _answers(node, life, start, end), which)
        behind = {"rank": "0", "host": node.name, "gpu": "0", "operation": "AllReduce"}
        put("job_nccl_rank_operations_behind", _behind(life, start, end), which | behind)


def _norm(start: int, end: int) -> Callable[[int], Value]:
    """Return the gradient norm of a job: it falls while the learning rate warms up, spikes for some
    steps now and then, and is higher for a while after each restart of the learning rate.
    """

    def told(minute: int) -> Value:
        if not start <= minute < end:
            return None
        age = minute - start
        norm = 0.3 + 8.0 * 0.9**age
        if age % 47 < 2:
            norm *= 200
        return norm * (4.0 if age % 90 > 60 else 1.0)

    return told


def _port(life: Life, flap: list[int], *, wired: bool) -> Callable[[int], Value]:
    return lambda minute: float(wired and not life.trains[minute] and minute not in flap)


def _flaps(life: Life, first: int, *, counts: bool) -> Callable[[int], Value]:
    return lambda minute: float(first + life.flapped[minute] * counts)


def _behind(life: Life, start: int, end: int) -> Callable[[int], Value]:
    return lambda minute: 1.0 if start <= minute < end and life.waits[minute] else None


def _answers(node: Node, life: Life, start: int, end: int) -> Callable[[int], Value]:
    """Return how many answers of RAS in a row, four a minute, were without progress."""

    def told(minute: int) -> Value:
        if not start <= minute < end:
            return None
        if not life.waits[minute]:
            return 0.0
        return 4.0 * (1 + minute - max(at for at in node.checkpoints if at <= minute))

    return told
