"""Several GPUs hang at once, with the intervals and deadlines that are shipped.

Number 51 of the fault catalogue: the other GPUs stay fresher than 20 s, and each hung one has its
verdict within 30 s, from the first moment on, whether a worker at it can be killed or not. Its own
readings are withheld, few workers are started, and the finding can begin.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dshealthd.collectors.gpu import FAULT, UP
from dshealthd.config import registry
from dshealthd.core.timing import Backoff
from dshealthd.findings.gpus import HUNG, NVML
from dshealthd.nvml.collector import GpuCollectorOptions
from tests import frozen
from tests.agents import RunningAgent, Scrape, running
from tests.nvml.simulator import Simulator
from tests.stopwatch import Stopwatch

WAKE_SPACING = 5.0
SECOND_DEADLINE = 12.0

GPUS = 8
FRESH, VERDICT = 20.0, 30.0
"""Seconds."""
CONFIG = "\n".join(
    f"[collectors.{name}]\nenabled = false"
    for name, kind in registry.all_collectors().items()
    if kind.worker != "device"
)
READINGS = {metric.name for metric in registry.metrics(registry.load("gpu")).values()} - {
    UP.name,
    FAULT.name,
}
"""Metrics that the collector `gpu` reads from a GPU, not those that say that it cannot be read."""
FOR = SECOND_DEADLINE
"""Seconds for which the sign of a hang must last before it is a finding."""


@contextlib.contextmanager
def healthy(directory: Path) -> Iterator[tuple[RunningAgent, Simulator]]:
    """Run an agent that shows all its simulated GPUs."""
    gpus = Simulator(directory)
    gpus.pci_sysfs(directory / "sys")
    flags = ("--path.sysfs", str(directory / "sys"))
    with running(directory, CONFIG, environment=gpus.environment(), flags=flags) as agent:
        agent.wait(lambda scrape: all(readings(scrape, gpu) for gpu in range(GPUS)))
        yield agent, gpus


def pending(scrape: Scrape) -> bool:
    """Return whether there is a sign that NVML hangs."""
    failing = map(dict, scrape.series.get("dshealthd_collector_failing", {}))
    return bool(scrape.value("dshealthd_worker_stuck", worker="device")) or any(
        labels["collector"] in NVML and labels["reason"] in HUNG for labels in failing
    )


def readings(scrape: Scrape, gpu: int) -> set[str]:
    """Return the metrics read from a GPU that a scrape shows."""
    label = ("gpu", str(gpu))
    return {name for name in READINGS if any(label in key for key in scrape.series.get(name, {}))}


def most_starts(killable: int, first: float, last: float) -> float:
    """Return how many workers may be started in all; arguments as in `Seen`.

    Until the verdicts one starts for each GPU: a scout, or the successor of the worker that was
    left at the GPU. Then each retry starts a scout. A sweep retries at most one GPU. Sweeps start
    at the interval and, once more, after a GPU's first verdict, which shows up to a sweep later.

    No GPU is retried before its back-off is over, and a retry takes as long as the deadline. A GPU
    whose worker cannot be killed is not retried.
    """
    options, backoff = GpuCollectorOptions(), Backoff()
    sweeps = 3 + first // options.interval + (first - last) // WAKE_SPACING
    retries, due = 0, backoff.after(1)
    while due <= first + options.interval:
        retries += 1
        due += options.deadline + backoff.after(retries + 1)
    return GPUS + min(sweeps, killable * retries)


@dataclass
class Seen:
    """What the scrapes said while GPUs hung; times without those of other work."""

    verdicts: dict[int, float] = field(default_factory=dict)
    """Seconds until the verdict on each hung GPU."""
    oldest: float = 0.0
    """The greatest age in seconds that samples had, also those of hung GPUs while they show."""
    starts: float = 0.0
    """Workers started since the first scrape."""
    first: float = 0.0
    last: float = 0.0
    """Seconds from the first and from the last GPU's verdict to the end, by the clock."""
    lost: float = 0.0
    """Seconds that other work took, in which a worker may be too late and be replaced for it."""


def follow(agent: RunningAgent, hung: set[int]) -> Seen:
    """Watch until every hung GPU is down and the finding has had the time to begin.

    From its verdict on, no scrape may show readings of a hung GPU. Once there is a sign of
    the hang, each scrape must have it.
    """
    seen = Seen()
    gone = read = success = 0.0
    since = None
    well = set(range(GPUS)) - hung
    before = None
    decided: list[float] = []
    while gone < VERDICT + FOR:
        watch, began = Stopwatch(agent.pid, *agent.workers()), time.monotonic()
        scrape = agent.scrape()
        now = time.monotonic()
        assert scrape.seconds < 1.0
        for gpu in range(GPUS):
            up = scrape.value("dshealthd_gpu_up", gpu=str(gpu))
            if gpu in hung and up == 0 and gpu not in seen.verdicts:
                seen.verdicts[gpu] = gone
                decided.append(now)
            assert gpu in hung or up != 0, f"GPU {gpu} is well and was called down at {gone:.1f} s"
        for gpu in hung:
            if shows := readings(scrape, gpu):
                assert gpu not in seen.verdicts, f"GPU {gpu} is down at {gone:.1f} s with {shows}"
                seen.oldest = max(seen.oldest, gone)
        shown = {gpu for gpu in well if scrape.all("dshealthd_gpu_power_watts", gpu=str(gpu))}
        if shown == well:
            last = scrape.value(
                "dshealthd_collector_last_success_timestamp_seconds", collector="gpu"
            )
            if last is not None and last > success:
                read, success = gone, last
        if well:
            seen.oldest = max(seen.oldest, gone - read)
        started = scrape.value("dshealthd_worker_starts_total", worker="device")
        assert started is not None
        before = started if before is None else before
        seen.starts = started - before
        if decided:
            seen.first, seen.last = now - decided[0], now - decided[-1]
        if pending(scrape):
            since = now if since is None else since
        assert since is None or pending(scrape), f"the alert no longer holds at {gone:.1f} s"
        if len(seen.verdicts) == len(hung) and since is not None and now - since > FOR:
            break
        time.sleep(0.2)
        gone += (passed := watch.seconds())
        seen.lost += time.monotonic() - began - passed
    else:
        assert since is not None, f"the alert never held\n{scrape.text}"
    return seen


def see(directory: Path, killable: int, unkillable: int) -> None:
    """Let so many GPUs hang at once, and check when the agent knows what, and at what cost."""
    directory.mkdir(exist_ok=True)
    hung = set(range(GPUS - killable - unkillable, GPUS))
    with contextlib.ExitStack() as stack:
        mount = stack.enter_context(frozen.mounted(directory)) if unkillable else None
        agent, gpus = stack.enter_context(healthy(directory))
        if mount is not None:
            mount.freeze()
            stack.callback(mount.thaw)
        for count, gpu in enumerate(sorted(hung)):
            if count < killable:
                gpus.fault("hang", gpu=gpu)
            else:
                assert mount is not None
                gpus.fault("dstate", f"{mount.directory}/x", gpu=gpu)
        seen = follow(agent, hung)
        print(f"{killable} + {unkillable} of {GPUS} hang: {seen}")
        assert seen.verdicts.keys() == hung, agent.log.read_text()
        assert max(seen.verdicts.values()) <= VERDICT
        assert seen.oldest <= FRESH, agent.log.read_text()
        limit = most_starts(killable, seen.first, seen.last) + int(seen.lost)
        assert seen.starts <= limit, agent.log.read_text()
        gpus.clear_faults()


def test_51_most_gpus_hang(tmp_path: Path) -> None:
    """Seven of eight hang, two of them so that nothing ends the worker that is at them."""
    see(tmp_path, killable=5, unkillable=2)


@pytest.mark.parametrize("count", [2, GPUS])
def test_51_some_or_all_hang(tmp_path: Path, count: int) -> None:
    """Two of eight hang, or all of them; each worker that is at one can be killed."""
    see(tmp_path, killable=count, unkillable=0)


def test_51_hang_before_the_agent_starts(tmp_path: Path) -> None:
    """NVML that hangs already when the agent starts is a finding within the same time."""
    gpus = Simulator(tmp_path)
    gpus.pci_sysfs(tmp_path / "sys")
    gpus.fault("hang")
    flags = ("--path.sysfs", str(tmp_path / "sys"))
    with running(tmp_path, CONFIG, environment=gpus.environment(), flags=flags) as agent:
        watch = Stopwatch(agent.pid)
        agent.wait(lambda scrape: scrape.all("dshealthd_finding", symptom="nvml-broken") == [1.0])
        assert watch.seconds() <= VERDICT
        gpus.clear_faults()


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["killable", "unkillable"])
@pytest.mark.parametrize("count", range(1, GPUS + 1))
def test_51_any_number_hangs(tmp_path: Path, count: int, kind: str) -> None:
    """However many hang, and however they do."""
    see(tmp_path, **{"killable": 0, "unkillable": 0} | {kind: count})
