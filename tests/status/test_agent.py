"""The commands against a whole agent with simulated GPUs: well, with a lost GPU, and gone."""

from __future__ import annotations

import json
import signal
import time
from typing import TYPE_CHECKING, Any

from tests import agents
from tests.command_line import dshealthd
from tests.nvml.simulator import Simulator

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.agents import RunningAgent

NVML_ERROR_GPU_IS_LOST = 15
SECONDS = 120.0


def status(port: int) -> tuple[int, dict[str, Any]]:
    """Run `dshealthd status --json` as a process; return its exit status and the node's part."""
    done = dshealthd("status", "--json", f"127.0.0.1:{port}", seconds=SECONDS)
    (node,) = json.loads(done.stdout)["nodes"]
    return done.returncode, node


def until(agent: RunningAgent, wanted: Callable[[list[str]], bool]) -> None:
    """Wait until the alerts of the agent's findings are as wanted."""
    end = time.monotonic() + SECONDS
    while not wanted([finding["alert"] for finding in agent.status()["findings"]]):
        assert time.monotonic() < end
        time.sleep(0.3)


def test_from_well_to_lost(tmp_path: Path) -> None:
    """A lost GPU is critical, status 2 and dated; bad configuration is found; no agent is 3."""
    gpus = Simulator(tmp_path, 2)
    gpus.pci_sysfs(tmp_path / "sys")
    config = f'[path]\nsysfs = "{tmp_path}/sys"\n[collectors.gpu]\ninterval = "1s"\n'
    with agents.running(tmp_path, config, environment=gpus.environment()) as agent:
        agent.wait(lambda scrape: len(scrape.all("dshealthd_gpu_up")) == 2)
        until(agent, lambda alerts: not any("Gpu" in alert for alert in alerts))
        before = time.time()
        gpus.fault("fail", NVML_ERROR_GPU_IS_LOST, gpu=1)
        until(agent, lambda alerts: "DshealthdGpuLost" in alerts)
        code, node = status(agent.port)
        (lost,) = (one for one in node["findings"] if one["alert"] == "DshealthdGpuLost")
        assert (code, node["verdict"], lost["part"]) == (2, "critical", "GPU 1")
        assert before - 1 <= lost["since"] <= time.time()
        _, later = status(agent.port)
        assert lost["since"] in [one["since"] for one in later["findings"]]

        (tmp_path / "dshealthd.toml").write_text("nonsense = 1\n", encoding="utf-8")
        agent.process.send_signal(signal.SIGHUP)
        until(agent, lambda alerts: "DshealthdAgentTrouble" in alerts)
        gpus.clear_faults()
        until(agent, lambda alerts: "DshealthdGpuLost" not in alerts)
    code, node = status(agent.port)
    assert (code, node["verdict"]) == (3, "unknown")
