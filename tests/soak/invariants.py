"""What must hold at each look at the agent, and what may not grow over the hours."""

from __future__ import annotations

import math
import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

from dshealthd.config import registry
from tests.agents import RunningAgent, Scrape
from tests.processes import children, state
from tests.soak.node import GPUS

MAX_SCRAPE = 1.0
"""Seconds."""
STALE = 90.0
"""Seconds after which no collector may show samples that were not renewed: three of the longest
interval, and a deadline.
"""
MAX_SERIES_GROWTH = 0.25
"""Share by which series may be more than after the first minutes: reasons and Xids that were
new."""
MAX_MEMORY_SLOPE = 0.25
"""MiB an hour over all moments; judged after `JUDGED` hours, as what is met for the first time is
learnt before.
"""
WARM = 0.5
"""Hours until memory has settled, 3 MiB higher: the slope from then on is printed beside the judged
one, of which two hours of soak make half a MiB an hour of the warm-up alone.
"""
MAX_MEMORY_GROWTH = 8.0
"""MiB from the first quiet moment to the last, warming up included."""
JUDGED = 2.0
DEVICE_COLLECTORS = frozenset(
    name
    for name, kind in registry.all_collectors().items()
    if kind.worker == "device" and kind.Options().enabled
)
"""Those that run as shipped; a simulated GPU has the source of each of them."""


def is_quiet(scrape: Scrape, since: float = 0.0) -> bool:
    """Return whether every GPU is up with samples, and every collector is up.

    Only such moments are compared: after the driver was away, `gpu` is up some 10 s before the
    collectors with longer intervals, and without their series any later moment looks like growth.

    The GPUs must have been read from Unix time `since` on, the end of the last fault: what a
    collection meets that began before may bring a GPU down later.
    """
    read = scrape.value("dshealthd_collector_last_success_timestamp_seconds", collector="gpu")
    took = scrape.value("dshealthd_collector_duration_seconds", collector="gpu")
    if read is None or took is None or read - took < since:
        return False
    collectors = scrape.series.get("dshealthd_collector_up", {})
    up = {dict(labels)["collector"] for labels, value in collectors.items() if value == 1}
    return (
        scrape.all("dshealthd_gpu_up") == [1.0] * GPUS
        and len(scrape.all("dshealthd_gpu_power_watts")) == GPUS
        and len(up) == len(collectors)
        and up >= DEVICE_COLLECTORS
        and not scrape.value("dshealthd_worker_stuck", worker="device")
    )


@dataclass
class Quiet:
    """The agent's own state at a moment for which `is_quiet` holds."""

    hours: float
    memory: float
    """MiB."""
    descriptors: int
    threads: int
    children: int
    series: int


@dataclass
class Record:
    """What was seen; `broken` is what should not have been."""

    started: float = field(default_factory=time.monotonic)
    scrapes: int = 0
    slowest: float = 0.0
    broken: list[str] = field(default_factory=list)
    quiet: list[Quiet] = field(default_factory=list)

    def breach(self, what: str) -> None:
        """Note that something did not hold."""
        self.broken.append(f"{time.monotonic() - self.started:.0f} s: {what}")

    def look(self, agent: RunningAgent, well: set[int]) -> Scrape | None:
        """Scrape, and check what holds at any moment; `well` are GPUs that nothing is done to."""
        try:
            scrape = agent.scrape(5.0)
        except OSError as error:
            self.breach(f"/metrics: {error!r}")
            return None
        self.scrapes += 1
        self.slowest = max(self.slowest, scrape.seconds)
        if scrape.seconds >= MAX_SCRAPE:
            self.breach(f"/metrics took {scrape.seconds:.2f} s")
        for gpu in range(GPUS):
            label = str(gpu)
            power = scrape.all("dshealthd_gpu_power_watts", gpu=label)
            memory = scrape.all("dshealthd_gpu_memory_total_bytes", gpu=label)
            up = scrape.value("dshealthd_gpu_up", gpu=label) if power or memory else None
            if 0 in (*power, *memory):
                self.breach(f"GPU {gpu}: 0 for what is not known")
            if up == 0:
                self.breach(f"GPU {gpu} is down and has samples")
            if gpu in well and scrape.all("dshealthd_gpu_up", gpu=label) == [0.0]:
                self.breach(f"GPU {gpu} is called down and nothing is done to it")
        for name, series in scrape.series.items():
            if any(math.isnan(value) for value in series.values()):
                self.breach(f"{name} is NaN")
        self._fresh(scrape)
        return scrape

    def _fresh(self, scrape: Scrape) -> None:
        """Check that what a collector shows as read is not old."""
        name = "dshealthd_collector_last_success_timestamp_seconds"
        for labels, at in scrape.series.get(name, {}).items():
            collector = dict(labels)["collector"]
            up = scrape.value("dshealthd_collector_up", collector=collector)
            if up == 1 and time.time() - at > STALE:
                self.breach(f"{collector} is up, and was read {time.time() - at:.0f} s ago")

    def rest(self, agent: RunningAgent, scrape: Scrape) -> None:
        """Note the agent's own state; there is no fault now, and `is_quiet` holds."""
        status = Path(f"/proc/{agent.pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        started = children(agent.pid)
        zombies = [pid for pid in started if state(pid) == "Z"]
        if zombies:
            self.breach(f"zombies: {zombies}")
        self.quiet.append(
            Quiet(
                (time.monotonic() - self.started) / 3600,
                int(fields["VmRSS"].split()[0]) / 1024,
                len(os.listdir(f"/proc/{agent.pid}/fd")),
                int(fields["Threads"]),
                len(started),
                sum(map(len, scrape.series.values())),
            )
        )

    def growth(self) -> list[str]:
        """Return the table of what may not grow, and note what did."""
        if len(self.quiet) < 4:
            self.breach(f"{len(self.quiet)} quiet moments are too few to judge growth")
            return []
        first, last = self.quiet[1], self.quiet[-1]
        long = last.hours >= JUDGED
        slope = memory_slope(self.quiet)
        warm = [moment for moment in self.quiet if moment.hours >= WARM]
        if long and slope > MAX_MEMORY_SLOPE:
            self.breach(f"memory grows by {slope:.2f} MiB/h")
        if last.memory - first.memory > MAX_MEMORY_GROWTH:
            self.breach(f"memory grew by {last.memory - first.memory:.1f} MiB")
        for name in ("descriptors", "threads", "children"):
            least = min(getattr(moment, name) for moment in self.quiet[len(self.quiet) // 2 :])
            if least > max(getattr(moment, name) for moment in self.quiet[:2]):
                self.breach(f"{name} grew from {getattr(first, name)} to {least} and stay so")
        if last.series > first.series * (1 + MAX_SERIES_GROWTH):
            self.breach(f"series grew from {first.series} to {last.series}")
        judged = "" if long else f" (judged from {JUDGED:g} h)"
        settled = [f"  from {WARM:g} h {memory_slope(warm):+.2f} MiB/h"] if len(warm) > 1 else []
        return [
            f"memory       {first.memory:.1f} → {last.memory:.1f} MiB, {slope:+.2f} MiB/h{judged}",
            *settled,
            *(
                f"{name:12} {getattr(first, name)} → {getattr(last, name)}"
                for name in ("descriptors", "threads", "children", "series")
            ),
        ]


def memory_slope(moments: list[Quiet]) -> float:
    """Return by how many MiB an hour memory grows, as the line through all moments has it."""
    slope, _ = statistics.linear_regression(
        [moment.hours for moment in moments], [moment.memory for moment in moments]
    )
    return slope
