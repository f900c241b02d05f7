"""The policy of rounds: they may use GPUs, or the CPUs and the network of a node without GPUs,
depending on occupancy and share of time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from dshealthd.collectors import gpu, gpu_bus, gpu_processes, job_environment, training
from dshealthd.core.result import CollectionOutcome
from dshealthd.core.timing import holds

if TYPE_CHECKING:
    from dshealthd.core.collector import Metric, Sample
    from dshealthd.core.snapshot import Latest, Snapshot
    from dshealthd.probe.options import PolicyOptions

NEVER = "policy_never"
BUSY = "busy_gpu"
"""Processes compute on a GPU, or ranks of a training job are about to."""
TRAINING = "busy_cpu"
"""Ranks of a training job run on a node without GPUs."""
EXCLUSIVE = "compute_mode"
"""A GPU takes one process or none: a worker would keep a job that starts off it, or fail itself."""
UNKNOWN = "gpu_unknown"
RELEASED = "draining"
"""An operator has released the driver: `linux.pci.RELEASE` has turned the GPU collectors off."""
DUTY = "duty"
SAVED = 120.0
"""Seconds over which unused GPU time accumulates: at most their share can be spent at once."""
ASKED_RATIO = 0.1
"""Share of time for which rounds outside the schedule, and those of other nodes that hang or fail,
may occupy the GPUs; once it is used up, this node refuses other nodes' rounds.
"""
ASKED_SAVED = 600.0
"""Seconds over which that share accumulates: a hung node takes several rounds of 5 to 12 s until it
is confirmed.
"""
REFRESH = 1.0
"""Seconds for the collectors to look before a round: half of what an invitation waits for its
answer (`client.ANSWER`).
"""
LONGEST = 30.0
"""Seconds that one round can cost at most: an agent that was stopped meanwhile counts as long."""


class GpuOccupancy:
    """The node's GPUs and who uses them, as last seen by collectors."""

    def __init__(
        self,
        snapshot: Snapshot,
        monotonic: Callable[[], float],
        collect: Callable[[Iterable[str]], None] | None = None,
    ) -> None:
        """`collect` has collectors look at once, by name; without it, what they saw last counts."""
        self._snapshot = snapshot
        self._monotonic = monotonic
        self._collect = collect
        self._asked = float("-inf")

    async def refresh(self) -> None:
        """Have the collectors look for processes now, and wait for it: between two of their looks
        a job may have started. In vain where ranks are known to run, or a driver hangs.
        """
        if self._collect is None or self._ranks() == TRAINING:
            return
        self._asked = self._monotonic()
        names = gpu_processes.GpuProcesses.name, job_environment.JobEnvironment.name
        self._collect(names)
        await holds(lambda: all(map(self._is_current, names)), REFRESH)

    async def taken(self) -> bool:
        """Return whether a job has started beside this node's own workers, one on each GPU."""
        await self.refresh()
        return self._ranks() == TRAINING or any(n > 1 for n in self._processes().values())

    def count(self) -> int:
        """Return the number of GPUs that NVML reported; 0 if unknown."""
        return len(self._processes())

    def objection(self) -> str:
        """Return why the GPUs count as busy, as a slug, or empty. Unknown counts as busy. A node
        without GPUs is busy while ranks of a job run on it: a round would take their CPUs and their
        network.
        """
        latest = self._fresh(gpu_processes.GpuProcesses.name)
        if latest is None or not self._is_current(latest.name):
            return UNKNOWN
        expected = self._expected()
        if latest.result.outcome is CollectionOutcome.NOT_AVAILABLE:
            return self._ranks() if expected == 0 else RELEASED if expected else UNKNOWN
        processes = self._processes()
        if (
            latest.result.outcome is not CollectionOutcome.OK
            or not processes
            or expected not in {0, len(processes)}
        ):
            return UNKNOWN
        # Ranks that have just started have no context on a GPU yet.
        if any(processes.values()) or self._ranks() == TRAINING:
            return BUSY
        return "" if self._modes() <= {"", "default"} else EXCLUSIVE

    def _ranks(self) -> str:
        """Return why the ranks of jobs, or what is not known of them, keep rounds off a node. They
        are found by their launcher's environment, and by their heartbeats. Where the first is
        turned off, the second alone has to do.
        """
        found = self._latest(job_environment.JobEnvironment.name)
        beats = self._latest(training.Training.name)
        for latest, metric in ((found, job_environment.RANKS), (beats, training.STEP)):
            if latest is not None and any(
                sample.metric is metric for sample in latest.result.samples
            ):
                return TRAINING
        if found is None:
            return ""
        fresh = self._fresh(job_environment.JobEnvironment.name)
        known = fresh is not None and fresh.result.outcome is not CollectionOutcome.ERROR
        return "" if known and self._is_current(found.name) else UNKNOWN

    def _expected(self) -> int | None:
        """Return the number of GPUs on the bus, which occupancy must cover; None if unknown."""
        latest = self._fresh(gpu_bus.GpuBus.name)
        if latest is not None and latest.result.outcome is CollectionOutcome.NOT_AVAILABLE:
            return 0
        found = self._samples(gpu_bus.GpuBus.name, gpu_bus.EXPECTED)
        return int(found[0].value) if found else None

    def _processes(self) -> dict[str, float]:
        found = self._samples(gpu_processes.GpuProcesses.name, gpu_processes.PROCESSES)
        return {sample.labels[0]: sample.value for sample in found}

    def _modes(self) -> set[str]:
        """Return the compute modes of the GPUs, as far as they are known."""
        place = gpu.MODE.dimensions.index("compute")
        found = self._samples(gpu.GpuTelemetry.name, gpu.MODE)
        return {sample.labels[place] for sample in found}

    def _samples(self, name: str, metric: Metric) -> list[Sample]:
        """Return what a collector found last of a metric; nothing if that is not known."""
        latest = self._fresh(name)
        samples = () if latest is None else latest.result.samples
        return [sample for sample in samples if sample.metric is metric]

    def _is_current(self, name: str) -> bool:
        """Return whether a collector that runs has looked since it was last asked to."""
        latest = self._latest(name)
        return latest is None or (latest.sampled or float("-inf")) >= self._asked

    def _fresh(self, name: str) -> Latest | None:
        """Return what a collector found last; None if it is off, has not run, or is overdue."""
        latest = self._latest(name)
        if latest is None or latest.sampled is None or latest.expired(self._monotonic()):
            return None
        return latest

    def _latest(self, name: str) -> Latest | None:
        try:
            return self._snapshot[name]
        except KeyError:  # the collector is turned off
            return None


class Account:
    """A budget of GPU time for rounds: it accrues as a share of elapsed time, up to a bound."""

    def __init__(self, ratio: float, monotonic: Callable[[], float], saved: float) -> None:
        self._ratio = ratio
        self._monotonic = monotonic
        self._most = self._balance = ratio * saved
        self._at = monotonic()
        self.used = 0.0
        """Seconds used since the start, each round counted by the GPU that it used longest."""

    @property
    def open(self) -> bool:
        """Whether the budget lets another round use the GPUs."""
        self._accrue()
        return self._balance > 0

    def spend(self, seconds: float) -> None:
        """Take GPU time from the budget; a round may overdraw it."""
        self._accrue()
        self._balance -= seconds
        self.used += seconds

    def _accrue(self) -> None:
        now = self._monotonic()
        self._balance = min(self._most, self._balance + (now - self._at) * self._ratio)
        self._at = now


class Policy:
    """The decision whether a round may use the GPUs now."""

    def __init__(
        self, options: PolicyOptions, gpus: GpuOccupancy, monotonic: Callable[[], float]
    ) -> None:
        self._options = options
        self._gpus = gpus
        # Separate budgets, so that rounds requested by members never use up the schedule's share.
        self._scheduled = Account(options.duty_ratio, monotonic, SAVED)
        self._asked = Account(ASKED_RATIO, monotonic, ASKED_SAVED)

    @property
    def used(self) -> float:
        """GPU seconds used since the start, each round counted by the GPU that it used longest."""
        return self._scheduled.used + self._asked.used

    def spend(self, seconds: float, *, scheduled: bool) -> None:
        """Charge a round's GPU time to its budget."""
        (self._scheduled if scheduled else self._asked).spend(seconds)

    def spend_in_vain(self, seconds: float) -> None:
        """Charge the whole duration of another node's round that hung or failed: it has no
        timings.
        """
        self._asked.spend(min(seconds, LONGEST))

    def objection(self, *, scheduled: bool, asked: bool = False) -> str:
        """Return why the policy keeps a round off the GPUs now, as a slug, or empty. The share of
        time limits scheduled rounds and all that another node has `asked` for, but not the rounds
        that this node needs to confirm a suspicion of its own.
        """
        if self._options.gpus == "never":
            return NEVER
        busy = self._gpus.objection() if self._options.gpus == "idle" else ""
        spent = (scheduled and not self._scheduled.open) or (asked and not self._asked.open)
        return busy or (DUTY if spent else "")
