"""A whole agent with simulated GPUs, of which one is lost, as everything sees it that queries it.

`dshealthd status`, NVRx, node-problem-detector: before the fault, with it and after it.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import grpc

from tests import agents
from tests.agents import RunningAgent
from tests.command_line import dshealthd
from tests.kubernetes.test_node_problem_detector import plugin
from tests.nvml.simulator import Simulator
from tests.nvrx.client import ask
from tests.waiting import until

NVML_ERROR_GPU_IS_LOST = 15
SECONDS = 120.0


def status(port: int) -> tuple[int, dict[str, Any]]:
    """Run `dshealthd status --json` as a process; return its exit status and the node's part."""
    done = dshealthd("status", "--json", f"127.0.0.1:{port}", seconds=SECONDS)
    (node,) = json.loads(done.stdout)["nodes"]
    return done.returncode, node


def found(agent: RunningAgent, alert: str) -> bool:
    """Return whether the agent has a finding of this alert."""
    return alert in [finding["alert"] for finding in agent.status()["findings"]]


def test_from_well_to_lost_and_back(tmp_path: Path) -> None:
    """A lost GPU is critical, dated, and unfit to NVRx and node-problem-detector until it is back;
    a bad reload is found; no agent is unknown. gRPC is in the server's process alone.
    """
    gpus = Simulator(tmp_path, 2)
    gpus.pci_sysfs(tmp_path / "sys")
    (tmp_path / "dev").mkdir()
    for name in ("null", "nvidiactl"):
        (tmp_path / "dev" / name).touch()
    path = tmp_path / "nvhcd.sock"
    config = (
        f'[path]\nsysfs = "{tmp_path}/sys"\ndev = "{tmp_path}/dev"\n[nvrx]\nsocket = "{path}"\n'
        '[collectors.gpu]\ninterval = "1s"\n'
    )

    def healthy() -> bool:
        """NVRx takes an error for healthy, so it must be an answer."""
        said = ask(path)
        return said.status is grpc.StatusCode.OK and said.healthy

    with agents.running(tmp_path, config, environment=gpus.environment()) as agent:
        agent.wait(lambda scrape: scrape.value("dshealthd_nvrx_up") == 1)
        until(healthy)
        until(lambda: plugin(agent.port) == (0, "fit"))
        before = time.time()
        gpus.fault("fail", NVML_ERROR_GPU_IS_LOST, gpu=1)
        until(lambda: found(agent, "DshealthdGpuLost"))
        code, node = status(agent.port)
        (lost,) = (one for one in node["findings"] if one["alert"] == "DshealthdGpuLost")
        assert (code, node["verdict"], lost["part"]) == (2, "critical", "GPU 1")
        assert before - 1 <= lost["since"] <= time.time()
        _, later = status(agent.port)
        assert lost["since"] in [one["since"] for one in later["findings"]]
        assert "gpu_lost (GPU 1)" in ask(path).response.error
        assert plugin(agent.port) == (1, "unfit: gpu_lost (GPU 1)")

        (tmp_path / "dshealthd.toml").write_text("nonsense = 1\n", encoding="utf-8")
        agent.process.send_signal(signal.SIGHUP)
        until(lambda: found(agent, "DshealthdAgentTrouble"))
        gpus.clear_faults()
        until(lambda: not found(agent, "DshealthdGpuLost"))
        until(healthy)
        until(lambda: plugin(agent.port) == (0, "fit"))
        with open(f"/proc/{agent.pid}/maps", encoding="utf-8") as maps:
            assert "/grpc/" not in maps.read()
    assert not path.exists()
    code, node = status(agent.port)
    assert (code, node["verdict"]) == (3, "unknown")
