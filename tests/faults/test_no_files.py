"""The node is out of file descriptors: the kernel answers ENFILE, injected into a running agent."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from tests.agents import RunningAgent, running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONFIG = """
[collectors.memory]
interval = "200ms"
[collectors.pressure]
interval = "200ms"
[collectors.kernel]
interval = "200ms"
"""


@contextlib.contextmanager
def injected(agent: RunningAgent, seen: Path, calls: str, *limits: str) -> Iterator[None]:
    """Have system calls of the agent fail with ENFILE, those that `limits` choose.

    What was injected is in the file `seen` afterwards.
    """
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("there is no strace here")
    command = [strace, "-f", "-qq", "-o", str(seen), "-e", f"trace={calls}", *limits]
    command += ["-p", str(agent.pid)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
        try:
            end = time.monotonic() + 60
            while not traced(agent.pid):
                if tracer.poll() is not None:
                    assert tracer.stderr is not None
                    pytest.skip(f"tracing is not permitted here: {tracer.stderr.read().strip()}")
                assert time.monotonic() < end
                time.sleep(0.02)
            yield
        finally:
            tracer.terminate()
    assert "(INJECTED)" in seen.read_text()


def traced(pid: int) -> bool:
    """Tell whether a process has a tracer."""
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        return any(line.split()[1] != "0" for line in status if line.startswith("TracerPid:"))


def test_25_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    """Its collector is down with a reason and without values; others stay fresh, and it returns."""
    with running(tmp_path, CONFIG) as agent:
        agent.wait(lambda s: s.value("dshealthd_collector_up", collector="memory") == 1)
        inject = ("-P", "/proc/meminfo", "-e", "inject=open,openat:error=ENFILE")
        with injected(agent, tmp_path / "seen", "open,openat", *inject):
            scrape = agent.wait(
                lambda s: (
                    s.value("dshealthd_collector_failing", collector="memory", reason="io_error")
                    == 1
                )
            )
            assert not scrape.all("dshealthd_memory_available_bytes")
            assert "Too many open files in system" in agent.get("/api/v1/status")
            name = "dshealthd_collector_last_success_timestamp_seconds"
            before = agent.scrape().value(name, collector="kernel")
            agent.wait(lambda s: (s.value(name, collector="kernel") or 0) > (before or 0))
        agent.wait(lambda s: s.value("dshealthd_collector_up", collector="memory") == 1)


def test_25_connections_that_cannot_be_accepted(tmp_path: Path) -> None:
    """A connection that the kernel refuses to hand over waits, and is answered when it does."""
    with running(tmp_path, CONFIG) as agent:
        agent.wait(lambda s: s.value("dshealthd_collector_up", collector="memory") == 1)
        inject = ("-e", "inject=accept,accept4:error=ENFILE:when=1..5")
        with injected(agent, tmp_path / "seen", "accept,accept4", *inject):
            for _ in range(5):
                assert "dshealthd_collector_up" in agent.get("/metrics", 10.0)
        assert agent.process.poll() is None
        assert agent.scrape().seconds < 1.0
