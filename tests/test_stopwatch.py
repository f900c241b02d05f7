"""A stopwatch counts what is waited for, and not what other work takes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.stopwatch import Stopwatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def spin(seconds: float) -> None:
    """Use this much CPU."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.mark.parametrize("pass_time", [time.sleep, spin])
def test_own_time_counts(pass_time: Callable[[float], None]) -> None:
    """Time for which a thread sleeps, or computes, is its own."""
    watch = Stopwatch()
    pass_time(0.2)
    assert watch.seconds() > 0.15


@contextlib.contextmanager
def a_busy_cpu() -> Iterator[None]:
    """Have this process, and what it starts, share one CPU with three that compute."""
    if not os.path.exists("/proc/self/schedstat"):
        pytest.skip("no schedstat")
    before = os.sched_getaffinity(0)
    code = "import time\nprint(flush=True)\nend = time.monotonic() + 30\n"
    command = [sys.executable, "-c", f"{code}while time.monotonic() < end: pass"]
    with contextlib.ExitStack() as stack:
        stack.callback(os.sched_setaffinity, 0, before)
        os.sched_setaffinity(0, {min(before)})
        for _ in range(3):
            busy = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(busy.kill)
            assert busy.stdout is not None
            busy.stdout.readline()  # it is at work
        yield


def test_other_work_does_not_count() -> None:
    """A thread that shares its CPU with another is slower by the clock, not by the stopwatch."""
    with a_busy_cpu():
        watch, started = Stopwatch(), time.monotonic()
        spin(0.3)
        passed, counted = time.monotonic() - started, watch.seconds()
    assert passed > 0.6
    assert counted < 0.75 * passed


def test_another_thread_that_has_no_cpu_does_not_count() -> None:
    """A process that is waited for is slower by the clock, and so is each of its threads."""
    code = (
        "import sys, threading, time\n"
        "def spin():\n"
        "    sys.stdin.readline()\n"
        "    while time.thread_time() < 0.3: pass\n"
        "    print(flush=True)\n"
        "    sys.stdin.readline()\n"  # what it waited for is known while it lives
        "threading.Thread(target=spin).start()\n"
    )
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 1}
    with (
        a_busy_cpu(),
        subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as watched,
    ):
        assert watched.stdin is not None
        assert watched.stdout is not None
        watch, started = Stopwatch(watched.pid), time.monotonic()
        watched.stdin.write("\n")
        watched.stdout.readline()
        passed, counted = time.monotonic() - started, watch.seconds()
        watched.stdin.write("\n")
    assert passed > 0.6
    assert counted < 0.75 * passed
