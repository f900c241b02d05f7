"""A simulated GPU node: the real collectors in a process of their own, on the genuine pynvml and a
clock that the test turns. It is forked from one that has imported them: most tests need only a few
milliseconds of it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import pytest

import dshealthd.nvml.session  # noqa: F401 - loaded before the processes are forked
from dshealthd.config import registry
from dshealthd.core.collector import Context, Fault, Reason
from dshealthd.core.host import Host
from dshealthd.core.options import Errors, decode
from dshealthd.core.result import CollectionResult, attempt
from tests.nvml.simulator import SONAME, Simulator

GPU_COLLECTORS = ("gpu", "ecc", "nvlink", "nvlink_domain", "pcie", "gpu_processes", "mig")
KINDS = {name: registry.load(name) for name in GPU_COLLECTORS}
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__])


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


def nodes(**how: Any) -> Any:
    """Return a fixture that gives such a node; arguments as of `Node`."""

    @pytest.fixture
    def node(tmp_path: Path) -> Iterator[Node]:
        with Node(tmp_path, **how) as made:
            yield made

    return node


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
        self._connection, theirs = FORKS.Pipe()
        self._process = FORKS.Process(
            target=main, args=(directory, options, self.simulator.environment(), theirs)
        )
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()

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
        self._connection.send((names or GPU_COLLECTORS, advance, blocked or {}, running))
        answer: Round = self._connection.recv()
        return answer

    def close(self) -> int | None:
        """Have the process end as a worker does; return its exit status."""
        self._connection.close()
        self._process.join(60)
        status: int | None = self._process.exitcode
        return status


def main(
    directory: Path,
    options: Mapping[str, Mapping[str, object]],
    environment: Mapping[str, str],
    connection: Connection,
) -> None:
    """Be the process with the collectors, until the connection is closed."""
    os.environ.update(environment)
    ctypes.CDLL(f"{environment['LD_LIBRARY_PATH']}/{SONAME}")  # by that name it is loaded from here
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
    for name, kind in KINDS.items():
        chosen = {"enabled": True, **options.get(name, {})}
        collectors[name] = kind(decode(kind.Options, chosen, "", Errors()), context)
    while True:
        try:
            names, advance, hung, running = connection.recv()
        except EOFError:
            break
        clock[0] += advance
        context.sweep += 1
        approached.clear()
        news.clear()
        blocked = {part: Fault(part, reason, "hung before") for part, reason in hung.items()}
        results = {}
        started = time.process_time()
        running_since = time.monotonic() if running else None
        for current in names:
            results[current] = attempt(collectors[current])
        cpu = time.process_time() - started
        clock[0], running_since = monotonic(), None
        connection.send(Round(results, approached, cpu, news))
    context.close()
