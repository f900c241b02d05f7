"""Real trainings on the CPU, over gloo, and what they themselves say of their steps."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from bench.processes import free_port
from dshealthd.core.host import Host
from dshealthd.jobs.environment import job_name, parse_environ
from dshealthd.jobs.processes import boot_id
from tests.lab import Node
from tests.waiting import until

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
LINE = re.compile(r"rank (\d+) step \d+ seconds (-?[\d.]+) to ([\d.]+) input ([\d.]+|unknown) .*\n")


class Step(NamedTuple):
    """What a rank printed of one of its steps: bounds of what its heartbeat measured, in
    seconds.
    """

    least: float
    most: float
    input_most: float | None


class TrainingRun:
    """The ranks of a training, and their logs: torchrun gives each rank its own."""

    def __init__(self, process: subprocess.Popen[Any], log: Path) -> None:
        self.process = process
        self.log = log

    def steps(self) -> dict[int, list[Step]]:
        """Return the steps of each rank, as the training printed them."""
        found: dict[int, list[Step]] = {}
        for rank, least, most, waited in LINE.findall(self.text()):
            input_most = None if waited == "unknown" else float(waited)
            found.setdefault(int(rank), []).append(Step(float(least), float(most), input_most))
        return found

    def text(self) -> str:
        """Return what the ranks and the launcher have printed."""
        return "".join(file.read_text() for file in sorted(self.log.parent.rglob("std*.log")))

    def pids(self) -> dict[int, int]:
        """Return the processes of the ranks that run, by rank."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if (rank := child.environ().get("RANK")) is not None:
                    found[int(rank)] = child.pid
        return found

    def job(self) -> str:
        """Return the name that an agent gives it, by the environment of one of its ranks."""
        pid = next(iter(self.pids().values()))
        environment = parse_environ(Path(f"/proc/{pid}/environ").read_bytes())
        return job_name(environment, boot_id(Host()))

    def wait_for(self, step: int) -> None:
        """Wait until every rank has made so many steps."""

        def reached() -> bool:
            assert self.process.poll() in {None, 0}, self.text()
            steps = [len(made) for made in self.steps().values()]
            return len(steps) == 2 and min(steps) >= step

        until(reached, self.text)


@contextlib.contextmanager
def training(
    directory: Path,
    script: str,
    *arguments: str,
    variables: Mapping[str, str],
    restarts: int = 0,
    untouched: bool = False,
    node: Node | None = None,
) -> Iterator[TrainingRun]:
    """Run a script of this folder under torchrun with two ranks, and end it with both.

    torchrun starts it anew so often. One that is untouched gets its heartbeat from outside. `node`
    is one of the two nodes of a lab, on each of which a rank of the training is to be started.
    """
    log = directory / "stdlauncher.log"
    command = [sys.executable, "-m", "torch.distributed.run", "--redirects=3"]
    command += [f"--max-restarts={restarts}"]
    if node is None:
        command += ["--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    else:
        command += ["--nproc-per-node=1", "--nnodes=2", f"--node-rank={node.number - 1}"]
        command += [f"--master-addr={node.lab.nodes[0].address}"]
    command += [f"--log-dir={directory / 'ranks'}", *(["-m", "dshealthd.training"] * untouched)]
    command += [str(HERE / script), *arguments]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        **variables,
    }
    with log.open("wb") as out:
        start: Callable[..., subprocess.Popen[Any]] = (
            functools.partial(subprocess.Popen, start_new_session=True)
            if node is None
            else node.station.popen
        )
        process = start(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=directory,
        )
    try:
        yield TrainingRun(process, log)
    finally:
        # The launcher first, so that it restarts none. Each rank is a session of its own.
        ranks = psutil.Process(process.pid).children() if process.poll() is None else []
        for group in (process.pid, *(rank.pid for rank in ranks)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        process.wait()
