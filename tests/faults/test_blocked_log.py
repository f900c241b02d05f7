"""A log that nobody reads stops neither the scrapes nor the end of the agent."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.processes import free_port
from dshealthd.agent.logs import LineWriter
from dshealthd.core import child
from tests.agents import RunningAgent
from tests.waiting import until


def test_what_a_full_pipe_does_not_take_is_dropped_and_counted() -> None:
    """Lines beyond the queue are counted; once the pipe is read, a line says how many were lost."""
    read_end, write_end = os.pipe()
    writer = LineWriter(write_end, waiting=10)
    for _ in range(2000):
        writer.put("x" * 100)
    assert writer.dropped > 0
    text = b""
    end = time.monotonic() + 60.0
    while b"log lines dropped" not in text:
        assert time.monotonic() < end
        text += os.read(read_end, 65536)
    told = re.search(rb"(\d+) log lines dropped", text)
    assert told is not None
    assert 0 < int(told[1]) <= writer.dropped


def test_a_log_that_hangs_delays_the_end_for_no_longer_than_asked() -> None:
    """The last lines wait for whoever reads them, half a second at exit, and are then given up."""
    read_end, write_end = os.pipe()
    writer = LineWriter(write_end)
    for _ in range(100):
        writer.put("x" * 10_000)  # more than a pipe holds
    began = time.monotonic()
    writer.flush(0.2)
    assert time.monotonic() - began >= 0.2
    left = 100 * 10_001
    while left > 0:
        left -= len(os.read(read_end, 65536))
    writer.flush(60.0)
    assert time.monotonic() - began < 60.0
    os.close(read_end)


FAKETIME = glob.glob("/usr/lib/*/faketime/libfaketimeMT.so.1")


@pytest.mark.skipif(not FAKETIME, reason="libfaketime is not installed")
def test_a_log_that_hangs_prints_no_traceback_at_exit() -> None:
    """Under a wall clock that is moved, where sleeping fails with EINVAL."""
    code = """
import atexit, os
from dshealthd.agent import logs
writer = logs.LineWriter(os.pipe()[1])
atexit.register(writer.flush, 0.1)
for _ in range(100):
    writer.put("x" * 10_000)
"""
    environment = {
        "LD_PRELOAD": FAKETIME[0],
        "FAKETIME": "+3",
        "DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stderr == ""


def test_children_never_wait_for_the_agents_standard_error() -> None:
    """Their lines come through a pipe of their own, cut and made printable, whoever takes them."""
    taken: list[str] = []
    write = 'print("x" * 5000, "\\x1b[2J", *range(20), file=sys.stderr)'
    code = f"import sys\nfor _ in range(400): {write}\nsys.stderr.write('the end')"

    async def play() -> None:
        errors = child.ErrorPipe(taken.append)
        started = child.spawn("writer", [sys.executable, "-c", code])
        assert await started.ends(60.0)
        assert started.code == 0
        errors.close()

    asyncio.run(play())
    assert taken[-1].endswith("the end")
    assert "\x1b" not in "".join(taken)
    assert "".join(taken).count("x" * 4096) == 400


def test_an_agent_that_nobody_reads_serves_and_stops(tmp_path: Path) -> None:
    """Standard output and error are full pipes: it serves all the same, and its workers too."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write_end, b"x" * 4096)
    os.set_blocking(write_end, True)
    address, port = "127.94.17.3", free_port()
    command = [sys.executable, "-m", "dshealthd", "run", "--log.level", "debug"]
    command += ["--web.listen-address", f"{address}:{port}", "--path.state", str(tmp_path)]
    process = subprocess.Popen(command, stdout=write_end, stderr=write_end, text=True)
    os.close(write_end)
    log = tmp_path / "agent.log"
    log.touch()
    try:
        agent = RunningAgent(process, port, log, address)
        until(agent.scrape, errors=(ConnectionError,))
        agent.wait(lambda scrape: scrape.value("dshealthd_collector_up", collector="network"))
        for _ in range(20):
            process.send_signal(signal.SIGHUP)  # which is logged
            assert agent.scrape().seconds < 1.0
        assert agent.scrape().value("dshealthd_log_lines_dropped_total") is not None
        ours = os.readlink(f"/proc/{agent.pid}/fd/2")
        assert all(os.readlink(f"/proc/{pid}/fd/2") != ours for pid in agent.workers())
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        os.close(read_end)
        process.kill()
        process.wait(60)
