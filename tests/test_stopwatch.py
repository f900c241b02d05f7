"""A stopwatch counts what is waited for, and not what other work takes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

import pytest

from tests.stopwatch import Stopwatch


def spin(seconds: float) -> None:
    """Use this much CPU."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_a_pause_counts() -> None:
    """Time that a thread sleeps is its own."""
    watch = Stopwatch()
    time.sleep(0.2)
    assert watch.seconds() > 0.15


def test_work_counts() -> None:
    """Time that a thread computes is its own."""
    watch = Stopwatch()
    spin(0.2)
    assert watch.seconds() > 0.15


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="no schedstat")
def test_other_work_does_not_count() -> None:
    """A thread that shares its CPU with another is slower by the clock, not by the stopwatch."""
    before = os.sched_getaffinity(0)
    code = (
        "import time\nprint(flush=True)\n"
        "end = time.monotonic() + 30\nwhile time.monotonic() < end: pass"
    )
    os.sched_setaffinity(0, {min(before)})
    try:
        busy = [
            subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(3)
        ]
        try:
            for process in busy:
                assert process.stdout is not None
                process.stdout.readline()  # it is at work
            watch, started = Stopwatch(), time.monotonic()
            spin(0.3)
            passed, counted = time.monotonic() - started, watch.seconds()
        finally:
            for process in busy:
                process.kill()
                process.communicate()
    finally:
        os.sched_setaffinity(0, before)
    assert passed > 0.6
    assert counted < 0.75 * passed


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="no schedstat")
def test_another_thread_that_has_no_cpu_does_not_count() -> None:
    """A process that is waited for is slower by the clock, and so is each of its threads."""
    before = os.sched_getaffinity(0)
    code = (
        "import sys, threading, time\n"
        "def spin():\n"
        "    sys.stdin.readline()\n"
        "    while time.thread_time() < 0.3: pass\n"
        "    print(flush=True)\n"
        "    sys.stdin.readline()\n"  # what it waited for is known while it lives
        "threading.Thread(target=spin).start()\n"
    )
    busy_code = "import time\nend = time.monotonic() + 30\nwhile time.monotonic() < end: pass"
    with contextlib.ExitStack() as stack:
        stack.callback(os.sched_setaffinity, 0, before)
        os.sched_setaffinity(0, {min(before)})
        for _ in range(3):
            busy = stack.enter_context(subprocess.Popen([sys.executable, "-c", busy_code]))
            stack.callback(busy.kill)
        watched = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
        )
        assert watched.stdin is not None
        assert watched.stdout is not None
        watch, started = Stopwatch(watched.pid), time.monotonic()
        watched.stdin.write("\n")
        watched.stdout.readline()
        passed, counted = time.monotonic() - started, watch.seconds()
        watched.stdin.write("\n")
    assert passed > 0.6
    assert counted < 0.75 * passed
