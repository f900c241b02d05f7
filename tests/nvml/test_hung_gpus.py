"""Several GPUs hang at once, with the intervals and deadlines that are shipped.

Number 51 of the fault catalogue: the other GPUs stay fresher than 20 s, and each hung one has its
verdict within 30 s, from the first moment on, whether a worker at it can be killed or not.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import pytest

from dshealthd.collection import registry
from tests import frozen
from tests.agents import RunningAgent, running
from tests.nvml.simulator import Simulator
from tests.stopwatch import Stopwatch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GPUS = 8
FRESH, VERDICT = 20.0, 30.0
"""Seconds."""
CONFIG = "\n".join(
    f"[collectors.{name}]\nenabled = false"
    for name, kind in registry.all_collectors().items()
    if kind.worker != "device"
)


@contextlib.contextmanager
def healthy(directory: Path) -> Iterator[tuple[RunningAgent, Simulator]]:
    """Run an agent that shows all its simulated GPUs."""
    gpus = Simulator(directory)
    gpus.pci_sysfs(directory / "sys")
    flags = ("--path.sysfs", str(directory / "sys"))
    with running(directory, CONFIG, environment=gpus.environment(), flags=flags) as agent:
        agent.wait(lambda s: len(s.all("dshealthd_gpu_up")) == GPUS)
        yield agent, gpus


def follow(agent: RunningAgent, hung: set[int]) -> tuple[dict[int, float], float]:
    """Watch until every hung GPU is down and a while longer.

    Return the seconds until each verdict, and the greatest age that samples of the others had,
    both less what other work took from the agent and its workers.
    """
    gone = oldest = read = success = 0.0
    verdicts: dict[int, float] = {}
    well = set(range(GPUS)) - hung
    while gone < VERDICT:
        watch = Stopwatch(agent.pid, *agent.workers())
        scrape = agent.scrape()
        assert scrape.seconds < 1.0
        for gpu in range(GPUS):
            up = scrape.value("dshealthd_gpu_up", gpu=str(gpu))
            if gpu in hung and up == 0:
                verdicts.setdefault(gpu, gone)
            assert gpu in hung or up != 0, f"GPU {gpu} is well and was called down at {gone:.1f} s"
        shown = {gpu for gpu in well if scrape.all("dshealthd_gpu_power_watts", gpu=str(gpu))}
        if shown == well:
            last = scrape.value(
                "dshealthd_collector_last_success_timestamp_seconds", collector="gpu"
            )
            if last is not None and last > success:
                read, success = gone, last
        if well:
            oldest = max(oldest, gone - read)
        if len(verdicts) == len(hung) and gone > VERDICT / 2:
            break
        time.sleep(0.2)
        gone += watch.seconds()
    return verdicts, oldest


def see(directory: Path, killable: int, unkillable: int) -> None:
    """Let so many GPUs hang at once, and check when the agent knows what."""
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
        verdicts, oldest = follow(agent, hung)
        print(f"verdicts after {max(verdicts.values(), default=0):.1f} s, {oldest:.1f} s old")
        assert verdicts.keys() == hung, agent.log.read_text()
        assert max(verdicts.values()) <= VERDICT
        assert oldest <= FRESH, agent.log.read_text()
        gpus.clear_faults()


def test_51_most_gpus_hang(tmp_path: Path) -> None:
    """Seven of eight hang, two of them so that nothing ends the worker that is at them."""
    see(tmp_path, killable=5, unkillable=2)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["killable", "unkillable"])
@pytest.mark.parametrize("count", range(1, GPUS + 1))
def test_51_any_number_hangs(tmp_path: Path, count: int, kind: str) -> None:
    """However many hang, and however they do."""
    see(tmp_path, **{"killable": 0, "unkillable": 0} | {kind: count})
