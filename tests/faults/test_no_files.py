"""The node is out of file descriptors: the kernel answers ENFILE, injected into a running agent."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agents import RunningAgent, Scrape, running
from tests.waiting import until

CONFIG = """
[collectors.memory]
interval = "200ms"
[collectors.kernel]
interval = "200ms"
[collectors.network]
interval = "200ms"
"""
"""Two collectors in the agent itself, and one in a worker."""
UP = "dshealthd_collector_up"
SUCCESS = "dshealthd_collector_last_success_timestamp_seconds"


@pytest.fixture(scope="module")
def running_agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    """Run one agent for all tests: after each fault it is as it was before."""
    with running(tmp_path_factory.mktemp("agent"), CONFIG) as agent:
        yield agent


@pytest.fixture
def agent(running_agent: RunningAgent) -> Iterator[RunningAgent]:
    """Give the agent when all is well, and see that it has lived through the test."""
    running_agent.wait(
        lambda s: all(s.value(UP, collector=name) == 1 for name in ("memory", "kernel", "network")),
        70.0,
    )
    yield running_agent
    assert running_agent.process.poll() is None


@contextlib.contextmanager
def injected(agent: RunningAgent, seen: Path, calls: str, *limits: str) -> Iterator[None]:
    """Have calls that `limits` choose fail with ENFILE; the file `seen` has which."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("there is no strace here")
    command = [strace, "-f", "-qq", "-o", str(seen), "-e", f"trace={calls}", *limits]
    command += ["-p", str(agent.pid)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
        try:
            until(lambda: traced(agent.pid) or tracer.poll() is not None)
            if tracer.poll() is not None:
                assert tracer.stderr is not None
                pytest.skip(f"tracing is not permitted here: {tracer.stderr.read().strip()}")
            yield
        finally:
            tracer.terminate()
            try:
                tracer.wait(20)
            except subprocess.TimeoutExpired:  # strace waits for a tracee that is about to end
                tracer.kill()
    assert "(INJECTED)" in seen.read_text()


def traced(pid: int) -> bool:
    """Tell whether a process has a tracer."""
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        return any(line.split()[1] != "0" for line in status if line.startswith("TracerPid:"))


def test_25_a_file_that_cannot_be_opened(agent: RunningAgent, tmp_path: Path) -> None:
    """Its collector is down with a reason and without values; others stay fresh, and it returns."""
    inject = ("-P", "/proc/meminfo", "-e", "inject=open,openat:error=ENFILE")
    with injected(agent, tmp_path / "seen", "open,openat", *inject):
        scrape = agent.wait(
            lambda s: (
                s.value("dshealthd_collector_failing", collector="memory", reason="io_error") == 1
            )
        )
        assert not scrape.all("dshealthd_memory_available_bytes")
        assert "Too many open files in system" in agent.get("/api/v1/status")
        before = agent.scrape().value(SUCCESS, collector="kernel")
        agent.wait(lambda s: (s.value(SUCCESS, collector="kernel") or 0) > (before or 0))
    agent.wait(lambda s: s.value(UP, collector="memory") == 1)


def test_25_connections_that_cannot_be_accepted(agent: RunningAgent, tmp_path: Path) -> None:
    """A connection that the kernel refuses to hand over waits, and is answered when it does."""
    inject = ("-e", "inject=accept,accept4:error=ENFILE:when=1..5")
    with injected(agent, tmp_path / "seen", "accept,accept4", *inject):
        for _ in range(5):
            assert UP in agent.get("/metrics", 10.0)
    assert agent.scrape().seconds < 1.0


def cannot_start(agent: RunningAgent, scrape: Scrape) -> bool:
    """Kill the workers that run: the tracer may take a moment until it injects.

    Tell whether the worker of the collector `network` cannot be started again.
    """
    for worker in agent.workers():
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
    why = {"collector": "network", "reason": "cannot_start"}
    return scrape.value("dshealthd_collector_failing", **why) == 1


@pytest.mark.parametrize("call", ["socketpair", "memfd_create", "pipe2", "pidfd_open"])
def test_25_a_worker_that_cannot_be_started(agent: RunningAgent, tmp_path: Path, call: str) -> None:
    """Whichever descriptor is refused, its collectors say why, others go on; then it starts."""
    inject = ("-e", f"inject={call}:error=ENFILE")
    with injected(agent, tmp_path / "seen", call, *inject):
        agent.wait(lambda s: cannot_start(agent, s))
        why = "cannot be started: the node is out of file descriptors (fs.file-max)"
        assert why in agent.get("/api/v1/status")
        before = agent.scrape().value(SUCCESS, collector="memory") or 0.0
        agent.wait(lambda s: (s.value(SUCCESS, collector="memory") or 0.0) > before)
    agent.wait(lambda s: s.value(UP, collector="network") == 1, 70.0)


def test_25_a_source_that_cannot_be_looked_for(agent: RunningAgent, tmp_path: Path) -> None:
    """Whether there is a source is unknown: the agent lives on, the worker reads it."""
    inject = ("-P", "/sys/class/net", "-e", "inject=open,openat:error=ENFILE")
    with injected(agent, tmp_path / "seen", "open,openat", *inject):
        before = agent.scrape().value(SUCCESS, collector="network") or 0.0
        agent.wait(lambda s: (s.value(SUCCESS, collector="network") or 0.0) > before + 1.0)


def test_25_metrics_about_the_agent_itself(agent: RunningAgent, tmp_path: Path) -> None:
    """What a scrape cannot read of the agent itself is absent, not zero."""
    affected = {"process_resident_memory_bytes", "process_open_fds"}
    before = agent.scrape()
    assert all(before.value(name) for name in affected)
    calls = "open,openat,stat,newfstatat"
    paths = ("-P", "/proc/self/statm", "-P", "/proc/self/fd")
    inject = ("-e", f"inject={calls}:error=ENFILE")
    with injected(agent, tmp_path / "seen", calls, *paths, *inject):
        scrape = agent.wait(lambda s: affected.isdisjoint(s.series))
        assert scrape.series.keys() >= before.series.keys() - affected
    agent.wait(lambda s: all(s.value(name) for name in affected))
