"""What the benchmarks share: starting servers, and the CPU time and memory of their process
trees.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from dshealthd.cli.free_port import candidates, hold
from dshealthd.core.host import Host
from tests.processes import children

PORTS = (20_000, 29_000)
"""From which free ports are taken: below rendezvous and ephemeral ports."""


CPUCLOCK_SCHED = 2
"""`CPUCLOCK_SCHED` of linux/posix-timers.h: the clock of a process by its pid."""


@dataclass(frozen=True)
class Server:
    """A process that serves /metrics."""

    name: str
    process: subprocess.Popen[bytes]
    connection: http.client.HTTPConnection

    def tree(self) -> list[int]:
        """Return the pids of the server and its children."""
        return [self.process.pid, *children(self.process.pid)]

    def cpu(self) -> float:
        """Return the CPU time of the tree in seconds: of live processes with their ended threads,
        at the scheduler's own resolution, and of ended children.
        """
        return sum(cpu(pid) + _ended_children(pid) for pid in self.tree())

    def wakeups(self) -> int:
        """Return how often the tree's live threads have slept and been woken."""
        return sum(
            int(line.split()[1])
            for pid in self.tree()
            for task in os.listdir(f"/proc/{pid}/task")
            for line in Path(f"/proc/{pid}/task/{task}/status").read_text("ascii").splitlines()
            if line.startswith("voluntary_ctxt_switches:")
        )

    def pss(self) -> dict[str, float]:
        """Return the proportional set size in MiB, of the server and of its children together."""
        first, *others = [memory(pid)["Pss"] for pid in self.tree()]
        return {"server": first, "workers": sum(others)}

    def scrape(self) -> bytes:
        """Return one answer of /metrics, asked for as Prometheus asks.

        Over a connection that is kept.
        """
        accept = (
            "application/openmetrics-text;version=1.0.0;q=0.8,text/plain;version=0.0.4;"
            "q=0.5,*/*;q=0.1"
        )
        try:
            self.connection.request("GET", "/metrics", headers={"Accept": accept})
            return self.connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            self.connection.close()
            raise


def cpu(pid: int) -> float:
    """Return the CPU time of a process in seconds, with its ended threads, at the scheduler's own
    resolution.
    """
    return time.clock_gettime((~pid << 3) | CPUCLOCK_SCHED)


def memory(pid: int) -> dict[str, float]:
    """Return the sizes of a process's memory by the kernel's names (`Pss`, `Rss`), in MiB."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    return {
        name.rstrip(":"): int(size) / 1024
        for name, size, *_ in map(str.split, rollup.splitlines()[1:])
    }


def _ended_children(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    """Return a port that nothing listens on, for a server that is about to start.

    Below the ephemeral range: until the server binds a port of that, seconds later, the kernel may
    give it to any other socket of this machine.
    """
    held = hold(candidates(Host(), *PORTS))
    held.release()
    return held.port


@contextlib.contextmanager
def serving(
    name: str, command: Sequence[str], port: int, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Start a server, wait until it answers, and end it."""
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        env=environment,
    ) as process:
        server = Server(name, process, http.client.HTTPConnection("127.0.0.1", port, timeout=10))
        try:
            for _ in range(600):  # a minute: other work may have the CPUs
                with contextlib.suppress(OSError):
                    server.scrape()
                    break
                time.sleep(0.1)
            yield server
        finally:
            server.connection.close()
            process.terminate()


@contextlib.contextmanager
def agent(
    config: str, name: str = "dshealthd", more: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Server]:
    """Run dshealthd on the text of a configuration, with `more` in its environment."""
    port = free_port()
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "dshealthd.toml")
        file.write_text(config, encoding="utf-8")
        flags = [
            "--config.file",
            str(file),
            "--web.listen-address",
            f"127.0.0.1:{port}",
            "--path.state",
            directory,
        ]
        command = [sys.executable, "-m", "dshealthd", "run", *flags]
        with serving(name, command, port, {**os.environ, **more}) as server:
            yield server


@contextlib.contextmanager
def node_exporter(*flags: str) -> Iterator[Server]:
    """Run Debian's prometheus-node-exporter."""
    port = free_port()
    with serving(
        "node_exporter",
        ["prometheus-node-exporter", f"--web.listen-address=127.0.0.1:{port}", *flags],
        port,
    ) as server:
        yield server


@contextlib.contextmanager
def sleepers(count: int) -> Iterator[None]:
    """Keep so many more processes on the machine."""
    processes = [subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table; floats are written with three significant digits."""
    lines = [
        head,
        ["---"] * len(head),
        *(
            [f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row]
            for row in rows
        ),
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
