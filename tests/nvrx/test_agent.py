"""A whole agent with simulated GPUs, asked as `ft_launcher` asks.

Before a fault, with it, and what it costs to be ready for that.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import grpc

from tests import agents
from tests.nvml.simulator import Simulator
from tests.nvrx.client import ask

if TYPE_CHECKING:
    from pathlib import Path

    from tests.nvrx.client import Said


NVML_ERROR_GPU_IS_LOST = 15


def judged(path: Path, wanted: str, seconds: float = 120.0) -> Said:
    """Ask until the answer is `healthy` or `unhealthy`."""
    end = time.monotonic() + seconds
    while True:
        said = ask(path)
        if (
            said.status is grpc.StatusCode.OK
            and ("healthy" if said.healthy else "unhealthy") == wanted
        ):
            return said
        assert time.monotonic() < end, f"not {wanted} within {seconds:g} s: {said}"
        time.sleep(0.3)


def test_a_gpu_falls_off_the_bus(tmp_path: Path) -> None:
    """The agent says healthy once it has looked at everything, unhealthy with the GPU when that is
    lost, and healthy again; gRPC is in the server's process alone.
    """
    gpus = Simulator(tmp_path, 2)
    gpus.pci_sysfs(tmp_path / "sys")
    (tmp_path / "dev").mkdir()
    for name in ("null", "nvidiactl"):
        (tmp_path / "dev" / name).touch()
    path = tmp_path / "nvhcd.sock"
    config = (
        f'[path]\nsysfs = "{tmp_path}/sys"\ndev = "{tmp_path}/dev"\n[nvrx]\nsocket = "{path}"\n'
    )
    with agents.running(tmp_path, config, environment=gpus.environment()) as agent:
        agent.wait(lambda scrape: scrape.value("dshealthd_nvrx_up") == 1)
        judged(path, "healthy")
        gpus.fault("fail", NVML_ERROR_GPU_IS_LOST, gpu=1)
        said = judged(path, "unhealthy")
        assert "gpu_lost (GPU 1)" in said.response.error
        gpus.clear_faults()
        judged(path, "healthy")
        with open(f"/proc/{agent.pid}/maps", encoding="utf-8") as maps:
            assert "/grpc/" not in maps.read()
    assert not path.exists()


def test_off(tmp_path: Path) -> None:
    """Without the option nothing of it is loaded and no process of it runs."""
    with agents.running(tmp_path) as agent:
        scrape = agent.wait(
            lambda scrape: scrape.value("dshealthd_collector_up", collector="memory") == 1
        )
        assert "dshealthd_nvrx_up" not in scrape.series
        for pid in (agent.pid, *agent.workers()):
            with open(f"/proc/{pid}/maps", encoding="utf-8") as maps:
                assert "/grpc/" not in maps.read()
            with open(f"/proc/{pid}/cmdline", "rb") as command:
                assert b"nvrx" not in command.read()
