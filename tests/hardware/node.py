"""What this node's collectors say, and whether its GPUs are idle.

All collectors run once, as for `dshealthd metrics`, but for NCCL's RAS: a job has one asker on a
node, and that is its agent.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from dshealthd.collection.scheduler import Scheduler
from dshealthd.collectors import gpu, gpu_bus
from dshealthd.config import config
from dshealthd.config.config import Config
from dshealthd.core.collector import Context, Metric, Sample
from dshealthd.core.result import CollectionOutcome, CollectionResult
from dshealthd.core.snapshot import Snapshot
from dshealthd.jobs.processes import ProcessTable
from dshealthd.probe.options import ProbeOptions
from dshealthd.probe.policy import GpuOccupancy, Policy

ON_GPUS = ("gpu", "ecc", "nvlink", "nvlink_domain", "pcie", "gpu_processes", "mig")
"""Collectors that call NVML."""
NO_RAS = {"collectors": {"nccl_ras": {"enabled": False}}}


@dataclass(frozen=True, slots=True)
class Node:
    """One look at this node."""

    loaded: Config
    snapshot: Snapshot

    @property
    def on_bus(self) -> int | None:
        """GPUs on the PCI bus; None where that is not known."""
        result = self.result(gpu_bus.GpuBus.name)
        if result is None or result.outcome is CollectionOutcome.ERROR:
            return None
        return int(next((one.value for one in self.samples(gpu_bus.EXPECTED)), 0))

    @property
    def up(self) -> list[bool]:
        """Whether each GPU of NVML answers."""
        return [one.value == 1 for one in self.samples(gpu.UP)]

    @property
    def driver(self) -> str:
        """The driver's version as NVML tells it; empty where it does not."""
        return next((one.labels[0] for one in self.samples(gpu.DRIVER)), "")

    def samples(self, metric: Metric) -> list[Sample]:
        """Return the samples of one metric."""
        return [
            sample
            for latest in self.snapshot
            for sample in latest.result.samples
            if sample.metric is metric
        ]

    def faults(self, *names: str) -> list[str]:
        """Return why these collectors, or parts of them, could not read their source."""
        found = []
        for latest in self.snapshot:
            name, result = latest.name, latest.result
            if name in names:
                if result.outcome is CollectionOutcome.ERROR:
                    found.append(f"{name}: {result.reason} {result.detail}")
                found += [f"{name} {one.part}: {one.reason} {one.detail}" for one in result.faults]
        return found

    def available(self, name: str) -> bool:
        """Tell whether a collector runs, and this machine has what it reads."""
        result = self.result(name)
        return result is not None and result.outcome is not CollectionOutcome.NOT_AVAILABLE

    def result(self, name: str) -> CollectionResult | None:
        """Return a collector's result; None where the configuration turns it off."""
        return next((one.result for one in self.snapshot if one.name == name), None)


def look(file: Path | None) -> Node:
    """Collect once and return what was found; ConfigError."""
    loaded = config.load(file, NO_RAS)
    snapshot = Snapshot(time.monotonic, time.time)
    asyncio.run(Scheduler(snapshot, time.monotonic, time.time).once(loaded))
    return Node(loaded, snapshot)


def objection(node: Node) -> str:
    """Return why no collective may use the GPUs now; empty if one may.

    The agent's own policy, and stricter: whatever the configuration permits, GPUs must be idle, and
    no training may run here, not even one that has yet to open a GPU.
    """
    occupancy = GpuOccupancy(node.snapshot, time.monotonic)
    options = node.loaded.section(ProbeOptions).policy
    policy = Policy(options, occupancy, time.monotonic)
    if reason := occupancy.objection() or policy.objection(scheduled=False):
        return f"the agent would not run a probe now either: {reason}"
    if busy := [one.labels[0] for one in node.samples(gpu.UTILIZATION) if one.value > 0]:
        return f"GPU {', '.join(busy)} is at work, though NVML names no process"
    context = Context(host=node.loaded.path.host)
    try:
        table = ProcessTable(context)
        trainings = table.refresh()
    except OSError as error:
        return f"whether a training runs here is unknown: {error}"
    if trainings:
        return f"a training runs here: job {trainings[0].job}, pid {trainings[0].pid}"
    if table.hidden:
        return "whether a training runs here is unknown: /proc hides other users' processes"
    return ""
