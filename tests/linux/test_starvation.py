"""Whether this process and its children had the CPU to meet their deadlines."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import pytest

from dshealthd.linux import starvation
from dshealthd.linux.starvation import LoopLag, RunQueue, run_queue
from tests.waiting import until


async def test_a_loop_that_was_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A delay counts before its late timer has run, and stays; waiting is no delay."""
    monkeypatch.setattr(starvation, "TICK", 0.01)
    with LoopLag() as early, LoopLag() as lag:
        early.close()
        await asyncio.sleep(0.1)
        time.sleep(0.6)
        assert lag.starved
        await asyncio.sleep(0.05)
        assert lag.starved
    time.sleep(0.6)
    assert lag.longest > 0.5
    assert early.longest < 0.5
    early._longest = 0.5
    assert not early.starved


async def test_a_loop_is_checked_ten_times_a_second() -> None:
    """More often would cost what it is to find."""

    class Counted(LoopLag):
        checks = 0

        def _measure(self) -> None:
            self.checks += 1
            super()._measure()

    began = time.monotonic()
    with Counted() as lag:
        await asyncio.sleep(0.5)
    assert 1 <= lag.checks <= (time.monotonic() - began) * 10 + 1


@pytest.mark.parametrize(
    ("running", "waiting", "starved"),
    [(0.0, 0.0, False), (0.1, 0.9, False), (0.1, 1.1, True), (5.0, 9.0, False), (3.0, 9.0, True)],
)
def test_less_than_a_third(running: float, waiting: float, *, starved: bool) -> None:
    """A starved process has waited for long, and for most of the time in which it could run."""
    assert RunQueue(running, waiting).starved is starved
    assert RunQueue(running + 7, waiting + 7).since(RunQueue(7, 7)).starved is starved


def test_real_processes() -> None:
    """A process that gets no CPU beside another one is starved."""
    cpu = min(os.sched_getaffinity(0))
    pin = f"import os, time\nos.sched_setaffinity(0, {{{cpu}}})\n"
    sleeper = "print(flush=True)\ntime.sleep(600)"
    codes = ("os.nice(19)\nwhile True: pass", sleeper, *("while True: pass",) * 5)
    processes = [
        subprocess.Popen([sys.executable, "-I", "-S", "-c", pin + code], stdout=subprocess.PIPE)
        for code in codes
    ]
    try:
        assert processes[1].stdout is not None
        assert processes[1].stdout.readline() == b"\n"  # its start is over, in which it may starve
        until(
            lambda: (found := run_queue(processes[0].pid)) and found.starved,
            lambda: run_queue(processes[0].pid),
        )
        before = run_queue(processes[1].pid)
        time.sleep(1.5)
        after = run_queue(processes[1].pid)
        assert before is not None
        assert after is not None
        assert not after.since(before).starved
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert run_queue(processes[-1].pid) is None
