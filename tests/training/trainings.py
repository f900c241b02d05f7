"""Real trainings on the CPU, over gloo, and what they themselves say of their steps."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
LINE = re.compile(r"rank (\d+) step \d+ seconds (-?[\d.]+) to ([\d.]+) input ([\d.]+|unknown) .*\n")


class Step(NamedTuple):
    """What a rank printed of one of its steps: bounds of what its heartbeat measured, in seconds."""

    least: float
    most: float
    input_most: float | None


class TrainingRun:
    """The ranks of a training that run on one node, and their logs.

    Torchrun gives each rank its own.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
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
        """Return the process of each rank of this node, by its rank in the whole training.

        Only those that run.
        """
        found = {}
        for pid in children(self.process.pid):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                match = re.search(
                    rb"(?:^|\0)RANK=(\d+)\0", Path(f"/proc/{pid}/environ").read_bytes()
                )
                if match is not None:
                    found[int(match[1])] = pid
        return found

    def wait_for(self, step: int, ranks: int = 2, seconds: float = 240.0) -> None:
        """Wait until every rank of this node has made so many steps."""
        end = time.monotonic() + seconds
        while len(steps := self.steps()) < ranks or min(map(len, steps.values())) < step:
            assert self.process.poll() in {None, 0}, self.text()
            assert time.monotonic() < end, self.text()
            time.sleep(0.1)


@contextlib.contextmanager
def training(
    directory: Path,
    script: str,
    *arguments: str,
    port: int,
    python: str = sys.executable,
    ranks: int = 2,
    variables: Mapping[str, str] | None = None,
    nnodes: int = 1,
    node_rank: int = 0,
    master_addr: str = "127.0.0.1",
    prefix: Sequence[str] = (),
) -> Iterator[TrainingRun]:
    """Run a script of this folder under torchrun, and end it with all its ranks.

    A training over several nodes takes one call for each, with the same `nnodes`, `master_addr` and
    `port`, a `node_rank` and a `directory` of its own, and `ranks` of that node. `prefix` puts it
    onto the node: `("ip", "netns", "exec", "n1")`, say, or any other command that runs the rest of
    its arguments in its own place. Ranks that have a variable `GLOO_SOCKET_IFNAME` use that
    interface of their node.
    """
    log = directory / "stdlauncher.log"
    command = [
        *prefix,
        python,
        "-m",
        "torch.distributed.run",
        f"--nnodes={nnodes}",
        f"--node-rank={node_rank}",
        f"--nproc-per-node={ranks}",
    ]
    command += [
        f"--master-addr={master_addr}",
        f"--master-port={port}",
        "--redirects=3",
        f"--log-dir={directory / 'ranks'}",
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        **(variables or {}),
    }
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, str(HERE / script), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=directory,
            start_new_session=True,
        )
    try:
        yield TrainingRun(process, log)
    finally:
        # The launcher first, so that it restarts none. Each rank is a session of its own.
        for group in (process.pid, *(children(process.pid) if process.poll() is None else ())):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        process.wait()


def children(pid: int) -> list[int]:
    """Return the processes that a process has started; none if it has ended."""
    try:
        return [
            int(child)
            for child in Path(f"/proc/{pid}/task/{pid}/children")
            .read_text(encoding="ascii")
            .split()
        ]
    except FileNotFoundError:
        return []
