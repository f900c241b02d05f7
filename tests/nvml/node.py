"""A simulated GPU node: the real collectors in a process of their own, on the genuine pynvml and a
clock that the test turns.

Run as a module it is that process: one request a line (`{"collect": [NAME, …], "blocked": {PART:
REASON}, "advance": SECONDS}`), one answer a line: the results by name, and the parts that were
approached.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from dshealthd.config import registry
from dshealthd.core import wire
from dshealthd.core.collector import Context, Fault, Reason
from dshealthd.core.host import Host
from dshealthd.core.options import Errors, decode
from dshealthd.core.result import CollectionResult, attempt
from tests.nvml.simulator import Simulator

GPU_COLLECTORS = ("gpu", "ecc", "nvlink", "nvlink_domain", "pcie", "gpu_processes", "mig")


@dataclass(frozen=True)
class Round:
    """What one sweep gave."""

    results: Mapping[str, CollectionResult]
    approached: list[str]
    """COLLECTOR PART, in order."""
    cpu: float
    """Seconds of CPU in the worker."""
    news: list[str]
    """What the collectors told others."""

    def values(self, metric: str, **labels: str) -> dict[tuple[str, ...], float]:
        """Return the values of a metric by the labels that are not given."""
        found = {}
        for result in self.results.values():
            for sample in result.samples:
                named = dict(zip(sample.metric.labels, sample.labels, strict=True))
                if sample.metric.name == f"dshealthd_{metric}" and labels.items() <= named.items():
                    found[tuple(value for name, value in named.items() if name not in labels)] = (
                        sample.value
                    )
        return found

    def value(self, metric: str, **labels: str) -> float:
        """Return the value of the one series that the labels leave."""
        (value,) = self.values(metric, **labels).values()
        return value

    def reasons(self, name: str = "gpu") -> dict[str, Reason]:
        """Return the reasons of a collector's faults by part."""
        return {fault.part: fault.reason for fault in self.results[name].faults}


class Node:
    """Eight simulated GPUs, the sysfs that goes with them, and a process with the collectors.

    A directory `proc` that is there at the start stands for `/proc`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        profile: str = "h100",
        gpus: int = 8,
        pci: bool = True,
        options: Mapping[str, Mapping[str, object]] = {},
    ) -> None:
        """Start the process; `options` are those of collectors, by name."""
        self.simulator = Simulator(directory / "simulator", gpus=gpus, profile=profile)
        self.sysfs = directory / "sys"
        (self.sysfs / "bus/pci/devices").mkdir(parents=True, exist_ok=True)
        if pci:
            self.simulator.pci_sysfs(self.sysfs)
        self._decoder = wire.Decoder(
            {name: registry.metrics(registry.load(name)) for name in GPU_COLLECTORS}
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.nvml.node", str(directory), json.dumps(options)],
            env=os.environ | self.simulator.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process as process:
            process.kill()

    def uuid(self, gpu: int) -> str:
        """Return the UUID of a physical GPU."""
        return self.simulator.value(gpu, "uuid")

    def collect(
        self,
        *names: str,
        advance: float = 5.0,
        blocked: Mapping[str, Reason] | None = None,
        running: bool = False,
    ) -> Round:
        """Run one sweep after `advance` seconds on the collectors' clock.

        All collectors of GPUs that run as shipped if none is named. `running`: their clock goes on
        during the sweep.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {
            "collect": names or GPU_COLLECTORS,
            "advance": advance,
            "blocked": blocked or {},
            "running": running,
        }
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        return Round(
            {name: self._decoder.unpack(result) for name, result in answer["results"].items()},
            answer["approached"],
            answer["cpu"],
            answer["news"],
        )

    def close(self) -> int:
        """Have the process end as a worker does; return its exit status."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(timeout=60)


def main(directory: Path, options: Mapping[str, Mapping[str, object]]) -> None:
    """Be the process with the collectors."""
    clock = [1000.0]
    running_since: float | None = None
    blocked: dict[str, Fault] = {}
    approached: list[str] = []
    news: list[str] = []
    current = ""

    def entering(part: str) -> Fault | None:
        approached.append(f"{current} {part}")
        return blocked.get(part)

    def monotonic() -> float:
        gone = 0.0 if running_since is None else time.monotonic() - running_since
        return clock[0] + gone

    procfs = directory / "proc"
    host = Host(
        procfs=procfs if procfs.exists() else Path("/proc"),
        sysfs=directory / "sys",
        dev=directory / "dev",
        rootfs=directory / "root",
    )
    context = Context(host=host, monotonic=monotonic, entering=entering, tell=news.append)
    collectors: dict[str, Any] = {}
    encoder = wire.Encoder()
    for name in GPU_COLLECTORS:
        kind = registry.load(name)
        chosen = {"enabled": True, **options.get(name, {})}
        collectors[name] = kind(decode(kind.Options, chosen, "", Errors()), context)
    for line in sys.stdin:
        request = json.loads(line)
        clock[0] += request["advance"]
        context.sweep += 1
        approached.clear()
        news.clear()
        blocked = {
            part: Fault(part, Reason(reason), "hung before")
            for part, reason in request["blocked"].items()
        }
        results = {}
        started = time.process_time()
        running_since = time.monotonic() if request["running"] else None
        for current in request["collect"]:
            results[current] = attempt(collectors[current])
        cpu = time.process_time() - started
        clock[0], running_since = monotonic(), None
        frames = {
            name: json.loads(encoder.pack(name, result)[wire.LENGTH.size :])
            for name, result in results.items()
        }
        answer = {"results": frames, "approached": approached, "cpu": cpu, "news": news}
        print(json.dumps(answer), flush=True)
    context.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
