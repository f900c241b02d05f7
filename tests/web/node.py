"""A simulated node for the page: eight GPUs, four InfiniBand ports and a kernel log, read by a real
agent.
"""

from __future__ import annotations

import contextlib
import math
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from tests.agents import RunningAgent, running
from tests.kernel_log import KernelLog
from tests.nvml.simulator import Simulator

FIXTURES = Path(__file__).parents[1] / "collectors" / "fixtures"


class Node:
    """The simulated hardware: its scenario, its kernel log, and the agent that watches it."""

    def __init__(self, directory: Path) -> None:
        """Lay out `directory`: what would be /sys and /dev, and a scenario for NVML."""
        self.directory = directory
        self.nvml = Simulator(directory / "nvml")
        sys = directory / "sys"
        shutil.copytree(FIXTURES / "infiniband" / "sys", sys, symlinks=True)
        self.nvml.pci_sysfs(sys)
        (sys / "class" / "net").symlink_to("/sys/class/net")
        (sys / "devices" / "system").symlink_to("/sys/devices/system")
        self.dev = directory / "dev"
        self._log = KernelLog(self.dev / "kmsg")

    @contextlib.contextmanager
    def agent(self, more: str = "") -> Iterator[RunningAgent]:
        """Run an agent on this node; it samples every second. `more` is added to its file."""
        paths = ("--path.sysfs", str(self.directory / "sys"), "--path.dev", str(self.dev))
        collectors = (
            *("gpu", "ecc", "nvlink", "nvlink_domain", "pcie", "gpu_processes", "infiniband"),
            *("memory", "pressure", "tcp", "open_files", "kernel_log"),
        )
        config = "".join(f'[collectors.{name}]\ninterval = "1s"\n' for name in collectors)
        config += '[collectors.filesystem]\npaths = ["/", "/dev/shm"]\n'
        with running(
            self.directory, config + more, environment=self.nvml.environment(), flags=paths
        ) as agent:
            yield agent

    def train(self, moment: float) -> None:
        """Put the GPUs under the load of a training job, as it is `moment` seconds into it."""
        for gpu in range(8):
            noise = random.Random(gpu * 1000 + int(moment))
            wave = math.sin(moment / 7 + gpu)
            self.nvml.set(gpu, "utilization_gpu", round(93 + 5 * wave))
            self.nvml.set(gpu, "utilization_memory", round(48 + 9 * wave))
            self.nvml.set(
                gpu, "power_usage", round(598_000 + 60_000 * wave + noise.uniform(-9000, 9000))
            )
            self.nvml.set(gpu, "temperature", round(61 + gpu * 1.4 + 2 * wave))
            self.nvml.set(gpu, "memory_temperature", round(69 + gpu * 1.2 + 2 * wave))
            self.nvml.set(gpu, "memory_used", 71_600_000_000 + gpu * 37_000_000)

    def ail(self) -> None:
        """Let some things be wrong, each of another kind. A hot GPU, a row to be remapped, an
        NVLink down, a GPU lost.
        """
        self.nvml.set(2, "temperature", 88)
        self.nvml.set(2, "throttle_reasons", 0x60)
        self.nvml.set(5, "remapped_pending", 1)
        self.nvml.set(6, "nvlink3_state", 0)
        self.nvml.fault("fail", 15, gpu=7)
        bus = self.nvml.value(7, "pci")[4:].lower()
        lost = "pid=1234, name=python3, GPU has fallen off the bus."
        self._log.say(f"NVRM: Xid (PCI:{bus}): 79, {lost}")

    def close(self) -> None:
        """Close the kernel log."""
        self._log.close()


@contextlib.contextmanager
def node(directory: Path) -> Iterator[Node]:
    """Make a simulated node below an existing directory."""
    with contextlib.closing(Node(directory)) as made:
        yield made
