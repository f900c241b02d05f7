"""A driver that answers with arbitrary numbers, and calls that hang or crash beside those that say
how a GPU is.

Number 62 of the fault catalogue: what cannot be true is malformed, for that field alone, and costs
no more than the field. Nothing that the collectors beside `gpu` call takes a GPU away.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from dshealthd.config import registry
from tests.agents import RunningAgent, Scrape, running
from tests.nvml.simulator import Simulator

GPUS = 8
LASTS = float(os.environ.get("DSHEALTHD_ARBITRARY_SECONDS", "6"))
"""Seconds for which a driver answers with arbitrary numbers."""
CONFIG = "\n".join(
    f"[collectors.{name}]\n"
    + ("deadline = '4s'\n" if kind.worker == "device" else "enabled = false\n")
    # The samples of `gpu` expire after three of its intervals.
    + (f"interval = '{'5s' if name == 'gpu' else '1s'}'\n" if kind.worker == "device" else "")
    for name, kind in registry.all_collectors().items()
)


def up(scrape: Scrape) -> set[str]:
    """Return the GPUs that are up and have a temperature."""
    return {
        dict(key)["gpu"]
        for key, value in scrape.series.get("dshealthd_gpu_up", {}).items()
        if value == 1 and scrape.all("dshealthd_gpu_temperature_celsius", gpu=dict(key)["gpu"])
    }


def stay_up(agent: RunningAgent, seconds: float) -> Scrape:
    """Scrape for so long; every scrape has all GPUs up. Return the last one."""
    end = time.monotonic() + seconds
    while True:
        scrape = agent.scrape()
        assert up(scrape) == {str(gpu) for gpu in range(GPUS)}, agent.log.read_text()
        if time.monotonic() > end:
            return scrape
        time.sleep(0.5)


def failing(scrape: Scrape) -> set[tuple[str, str]]:
    """Return the collectors that fail, each with its reason."""
    return {
        (dict(key)["collector"], dict(key)["reason"])
        for key, value in scrape.series.get("dshealthd_collector_failing", {}).items()
        if value
    }


@pytest.mark.timeout(max(240, 4 * LASTS))
def test_62_arbitrary_numbers(tmp_path: Path) -> None:
    """Whatever a driver answers of which nothing is known, all eight GPUs stay up throughout, in
    one worker. So they do where a call that `ecc` alone makes hangs or crashes on every GPU: that
    collector says so.
    """
    gpus = Simulator(tmp_path)
    gpus.pci_sysfs(tmp_path / "sys")
    gpus.set(2, "mig_mode", 1)
    gpus.set(None, "arbitrary", "counter")
    flags = ("--path.sysfs", str(tmp_path / "sys"))
    expected = {(name, "malformed") for name in ("gpu", "nvlink", "mig", "gpu_processes")}
    with running(tmp_path, CONFIG, environment=gpus.environment(), flags=flags) as agent:
        agent.wait(lambda scrape: len(up(scrape)) == GPUS)
        for how in ("counter", "random"):
            gpus.set(None, "arbitrary", how)
            scrape = stay_up(agent, LASTS)
            assert scrape.value("dshealthd_worker_starts_total", worker="device") == 1
            assert failing(scrape) == expected, agent.log.read_text()
        gpus.unset(None, "arbitrary")
        for fault, value, reason in (("hang", 1, "timeout"), ("crash", "segv", "crashed")):
            agent.wait(lambda scrape: not failing(scrape), seconds=120.0)
            gpus.fault(fault, value, function="nvmlDeviceGetSramEccErrorStatus")
            end = time.monotonic() + 60.0
            while ("ecc", reason) not in failing(scrape := stay_up(agent, 0.0)):
                assert time.monotonic() < end, scrape.text
            assert {name for name, _ in failing(stay_up(agent, 3.0))} == {"ecc"}
            gpus.clear_faults()
