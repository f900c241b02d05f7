"""Training jobs on nodes of the lab.

Real processes under a real launcher on each node, two ranks a node, over gloo.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dshealthd.jobs.environment import job_name, parse_environ
from tests.lab.mishaps import DIRECTORY
from tests.lab.node import Node
from tests.processes import children, start_time
from tests.waiting import until

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
RANKS = 2
"""Of each node."""
LINE = re.compile(r"rank (\d+) step (\d+) seconds ([\d.]+) .*\n")
END_SECONDS = 20.0


class Job:
    """A training that runs on some nodes.

    `launchers` are the processes that were started on each, in the order of the nodes.
    """

    def __init__(
        self, directory: Path, nodes: Sequence[Node], launchers: Sequence[subprocess.Popen[bytes]]
    ) -> None:
        self.directory, self.nodes, self.launchers = directory, nodes, launchers

    def text(self) -> str:
        """Return what the ranks and the launchers have printed."""
        return "".join(
            file.read_text(encoding="utf-8", errors="replace")
            for file in sorted(self.directory.rglob("std*.log"))
        )

    def steps(self) -> dict[int, list[float]]:
        """Return the durations of the steps of each rank, as the training printed them."""
        found: dict[int, list[float]] = {}
        for rank, _, seconds in LINE.findall(self.text()):
            found.setdefault(int(rank), []).append(float(seconds))
        return found

    def until(self, step: int, seconds: float = 120.0) -> None:
        """Wait until every rank has made so many steps.

        AssertionError with the logs if the job ends before, or is too slow.
        """

        def reached() -> bool:
            running = all(launcher.poll() in {None, 0} for launcher in self.launchers)
            assert running, self.text()[-5000:]
            steps = [len(made) for made in self.steps().values()]
            return len(steps) == RANKS * len(self.nodes) and min(steps) >= step

        until(reached, lambda: self.text()[-5000:], seconds)

    def pids(self) -> dict[int, int]:
        """Return the pids of the ranks' own processes as this machine counts them, by RANK."""
        found: dict[int, int] = {}
        for launcher in self.launchers:
            for pid in (launcher.pid, *children(launcher.pid)):
                if (rank := variables(pid).get("RANK")) is not None:
                    found[int(rank)] = pid
        return found

    def name(self) -> str:
        """Return the name that the agents are to give it, by the environment of one of its
        ranks.
        """
        pid = next(iter(self.pids().values()))
        return job_name(variables(pid), machine="")

    def node_of(self, rank: int) -> Node:
        """Return the node that a rank is on."""
        return self.nodes[rank // RANKS]

    @contextlib.contextmanager
    def mishap(self, name: str, rank: int) -> Iterator[None]:
        """Have one of `tests.lab.mishaps` happen to a rank meanwhile."""
        file = self.directory / f"{name}.{rank}"
        with self.nodes[0].lab.injected(f"{name} of rank {rank} on {self.node_of(rank).name}"):
            file.touch()
            try:
                yield
            finally:
                file.unlink()

    def end(self) -> None:
        """End the job as a scheduler does: SIGTERM for the launchers, which end their ranks.

        What remains is killed.
        """
        ranks = {
            pid: start_time(pid) for launcher in self.launchers for pid in children(launcher.pid)
        }
        for launcher in self.launchers:
            launcher.terminate()
        end = time.monotonic() + END_SECONDS
        for launcher in self.launchers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(max(0.1, end - time.monotonic()))
            launcher.kill()
            launcher.wait()
        for pid, started in ranks.items():  # each is a session of its own
            if started and start_time(pid) == started:
                os.kill(pid, signal.SIGKILL)


def variables(pid: int) -> dict[str, str]:
    """Return what the agent reads of a rank's environment; nothing if the process is gone."""
    try:
        return parse_environ(Path(f"/proc/{pid}/environ").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return {}


def environment(directory: Path) -> dict[str, str]:
    """Return what the ranks of a node get; DeepSpeed computes on the CPU."""
    own = {DIRECTORY: str(directory)}
    quiet = {
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": str(ROOT),
        "DS_ACCELERATOR": "cpu",
    }
    return {**os.environ, **quiet, **own}


@contextlib.contextmanager
def torchrun(
    directory: Path,
    nodes: Sequence[Node],
    script: str,
    *arguments: str,
    port: int = 29500,
    added: Mapping[str, Mapping[str, str]] | None = None,
    limits: Sequence[str] = (),
) -> Iterator[Job]:
    """Run a script of this folder under torchrun on these nodes, of which the first is the master,
    and end it.

    The script gets `directory` as its second argument, for checkpoints. What is `added` to the
    environment is by the name of a node; `limits` is a command, such as `prlimit --nofile=256`,
    that the launchers run under.
    """
    directory.mkdir()
    first, *rest = arguments
    launchers = []
    for number, node in enumerate(nodes):
        command = [*limits, sys.executable, "-m", "torch.distributed.run", "--redirects=3"]
        command += [f"--nnodes={len(nodes)}", f"--node-rank={number}", f"--nproc-per-node={RANKS}"]
        command += [f"--master-addr={nodes[0].member}", f"--master-port={port}"]
        command += [f"--log-dir={directory / node.name}", str(HERE / script), first, str(directory)]
        own = (added or {}).get(node.name, {})
        launchers.append(_start(node, [*command, *rest], directory, f"launcher-{node.name}", own))
    with _ended(Job(directory, nodes, launchers)) as job:
        yield job


@contextlib.contextmanager
def by_hand(
    directory: Path,
    nodes: Sequence[Node],
    script: str,
    *arguments: str,
    port: int,
    changed: Mapping[int, Mapping[str, str]],
) -> Iterator[Job]:
    """Run a script as `torchrun` does, without a launcher.

    With RANK and its like set for each rank, and `changed` by rank.
    """
    directory.mkdir()
    first, *rest = arguments
    launchers = []
    for rank in range(RANKS * len(nodes)):
        own = {**place(rank, RANKS * len(nodes), nodes[0].member, port), **changed.get(rank, {})}
        command = [sys.executable, str(HERE / script), first, str(directory), *rest]
        launchers.append(_start(nodes[rank // RANKS], command, directory, f"rank-{rank}", own))
    with _ended(Job(directory, nodes, launchers)) as job:
        yield job


def place(rank: int, world_size: int, master: str, port: int) -> dict[str, str]:
    """Return the variables by which a rank without a launcher knows its place."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % RANKS),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": master,
        "MASTER_PORT": str(port),
    }


@contextlib.contextmanager
def _ended(job: Job) -> Iterator[Job]:
    try:
        yield job
    finally:
        job.end()


def _start(
    node: Node, command: Sequence[str], directory: Path, name: str, added: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    with (directory / f"std-{name}.log").open("wb") as log:
        return node.station.popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**environment(directory), **added},
            cwd=directory,
        )
