"""What processes do, and how they end, of real processes."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from dshealthd.core.host import Host
from dshealthd.jobs.hangs.exits import End, ExitKind, ExitWatcher
from dshealthd.linux.activity import ThreadState, activity, busiest, demands
from tests.jobs.machines import started
from tests.waiting import until

HOST = Host()


@pytest.fixture
def start() -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Start processes of Python's, which end with the test."""
    running = []

    def run(code: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-I", "-c", code]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        return running[-1]

    yield run
    for process in running:
        process.kill()
        process.communicate()


def becomes(process: subprocess.Popen[bytes], state: ThreadState) -> None:
    """Wait until a process is in a state."""
    start = started(process.pid)

    def reached() -> bool:
        found = activity(HOST, process.pid, start)
        return found is not None and found.state is state

    until(reached)


def test_states(start: Callable[[str], subprocess.Popen[bytes]]) -> None:
    """A process that computes, sleeps, is stopped, and has ended without being asked for."""
    becomes(start("while True: pass"), ThreadState.RUNNING)
    process = start("import time; time.sleep(60)")
    becomes(process, ThreadState.SLEEPING)
    process.send_signal(signal.SIGSTOP)
    becomes(process, ThreadState.STOPPED)
    process.kill()
    becomes(process, ThreadState.ZOMBIE)


def test_time_on_cpus(start: Callable[[str], subprocess.Popen[bytes]]) -> None:
    """The time that a process computes for is counted, as the process itself counts it."""
    code = "import time\nwhile time.process_time() < 0.3: pass\n"
    process = start(code + "print(time.process_time(), flush=True)\ntime.sleep(60)")
    assert process.stdout is not None
    counted = float(process.stdout.readline())
    found = activity(HOST, process.pid, started(process.pid))
    assert found is not None
    assert counted - 0.05 <= found.cpu_seconds <= counted + 0.3


def test_time_without_a_cpu(start: Callable[[str], subprocess.Popen[bytes]]) -> None:
    """Of processes that share a CPU each works all the time, by what it takes and what it waits
    for; one that sleeps does not.
    """
    cpu = min(os.sched_getaffinity(0))
    code = f"import os, time\nos.sched_setaffinity(0, {{{cpu}}})\nprint(flush=True)\n"
    rivals = [start(code + "while True: pass") for _ in range(4)]
    sleeper = start(code + "time.sleep(60)")
    for process in (*rivals, sleeper):
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"  # it sleeps while it starts
    becomes(sleeper, ThreadState.SLEEPING)

    def worked(process: subprocess.Popen[bytes]) -> float:
        found = activity(HOST, process.pid, started(process.pid))
        assert found is not None
        assert found.queued_seconds is not None
        return found.work_seconds

    for process in rivals:
        becomes(process, ThreadState.RUNNING)
    threads = [demands(HOST, process.pid) for process in (*rivals, sleeper)]
    before, began_at = [worked(process) for process in (*rivals, sleeper)], time.monotonic()
    time.sleep(1.5)
    passed = time.monotonic() - began_at
    *shares, idle = [
        (worked(process) - then) / passed
        for process, then in zip((*rivals, sleeper), before, strict=True)
    ]
    assert min(shares) > 0.6
    assert idle < 0.1
    *most, least = [
        busiest(then, demands(HOST, process.pid)) / passed
        for process, then in zip((*rivals, sleeper), threads, strict=True)
    ]
    assert min(most) > 0.6
    assert least < 0.1


def test_another_process_of_that_pid() -> None:
    """A process that started at another time is not the one that is meant."""
    assert activity(HOST, os.getpid(), 1) is None
    assert activity(HOST, 1 << 22, 1) is None


async def end_of(exit_watcher: ExitWatcher, process: subprocess.Popen[bytes], ticks: int) -> End:
    """Return how a process ended, of which only the kernel tells."""
    while (end := exit_watcher.end(process.pid, ticks)) is None:
        await asyncio.sleep(0.01)
    return end


HANDLES = """
import os, signal
signal.signal(15, lambda *_: sys.exit(128 + 15))
os.kill(os.getpid(), 15)
signal.pause()
"""


@pytest.mark.parametrize(("code", "ended"), [
    ("", ExitKind.ENDED),
    ("raise MemoryError", ExitKind.FAILED),
    ("sys.exit(1)", ExitKind.FAILED),
    ("sys.exit(137)", ExitKind.FAILED),  # some container's SIGKILL: nobody has asked
    (HANDLES, ExitKind.TERMINATED),
    ("sys.exit(130)", ExitKind.TERMINATED),
    ("import os; os.kill(os.getpid(), 9)", ExitKind.KILLED),
    ("import os; os.kill(os.getpid(), 15)", ExitKind.TERMINATED),
    (
        "import os, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.abort()",
        ExitKind.CRASHED,
    ),
])  # fmt: skip
async def test_how_a_process_ends(
    start: Callable[[str], subprocess.Popen[bytes]], code: str, ended: ExitKind
) -> None:
    """How it ended is known while its parent has not asked, and stays known when it has."""
    process = start(f"import sys; sys.stderr = None\n{code}")
    ticks = started(process.pid)
    with closing(ExitWatcher(HOST, asyncio.get_running_loop(), time.time)) as exit_watcher:
        exit_watcher.follow(process.pid, ticks)
        before = time.time()
        end = await end_of(exit_watcher, process, ticks)
        assert end.how is ended
        assert before - 1.0 <= end.at <= time.time()
        process.wait()
        assert exit_watcher.end(process.pid, ticks) == end


async def test_the_first_to_end(start: Callable[[str], subprocess.Popen[bytes]]) -> None:
    """Whose end was first is known although their parent asks at once."""
    first, second = (start("import time; time.sleep(60)") for _ in range(2))
    ticks = {process.pid: started(process.pid) for process in (first, second)}
    with closing(ExitWatcher(HOST, asyncio.get_running_loop(), time.time)) as exit_watcher:
        for pid, number in ticks.items():
            exit_watcher.follow(pid, number)
        for process, number in ((first, signal.SIGKILL), (second, signal.SIGTERM)):
            process.send_signal(number)
            becomes(process, ThreadState.ZOMBIE)
            await asyncio.sleep(0.05)  # what torchrun waits, at the least
            process.wait()
        ends = [exit_watcher.end(process.pid, ticks[process.pid]) for process in (first, second)]
    one, other = ends
    assert one is not None
    assert other is not None
    assert (one.how, other.how) == (ExitKind.KILLED, ExitKind.TERMINATED)
    assert one.at < other.at


@pytest.mark.parametrize(
    ("number", "ended"), [(signal.SIGKILL, ExitKind.KILLED), (signal.SIGSEGV, ExitKind.CRASHED)]
)
async def test_end_whose_parent_asked_before_the_loop_ran(
    start: Callable[[str], subprocess.Popen[bytes]], number: int, ended: ExitKind
) -> None:
    """An agent that waits for a CPU while a rank is killed and reaped still knows how it ended."""
    process = start("import time; time.sleep(60)")
    ticks = started(process.pid)
    with closing(ExitWatcher(HOST, asyncio.get_running_loop(), time.time)) as exit_watcher:
        exit_watcher.follow(process.pid, ticks)
        process.send_signal(number)
        process.wait()  # nothing else runs meanwhile
        if tuple(map(int, os.uname().release.split(".")[:2])) < (6, 15):
            pytest.skip("the kernel is older than Linux 6.15")
        assert (await end_of(exit_watcher, process, ticks)).how is ended


async def test_pid_of_another_process_is_not_followed(
    start: Callable[[str], subprocess.Popen[bytes]],
) -> None:
    """A process that has a pid now says nothing of the end of the one that had it before."""
    process = start("import time; time.sleep(60)")
    ticks = started(process.pid) - 1
    with closing(ExitWatcher(HOST, asyncio.get_running_loop(), time.time)) as exit_watcher:
        exit_watcher.follow(process.pid, ticks)
        process.kill()
        process.wait()
        assert (await end_of(exit_watcher, process, ticks)).how is ExitKind.UNKNOWN


async def test_an_end_that_nobody_saw(start: Callable[[str], subprocess.Popen[bytes]]) -> None:
    """A process that had ended before it was followed, and was asked for, ended nobody knows how.

    One that lives has no end.
    """
    process = start("")
    ticks = started(process.pid)
    process.wait()
    with closing(ExitWatcher(HOST, asyncio.get_running_loop(), time.time)) as exit_watcher:
        exit_watcher.follow(process.pid, ticks)
        assert (await end_of(exit_watcher, process, ticks)).how is ExitKind.UNKNOWN
        alive = start("import time; time.sleep(60)")
        gc.collect()  # descriptors that other tests of this process have left
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(2):  # its job has got another name
            exit_watcher.follow(alive.pid, started(alive.pid))
        assert exit_watcher.end(alive.pid, started(alive.pid)) is None
        assert len(os.listdir("/proc/self/fd")) == before + 1
        exit_watcher.forget(alive.pid, started(alive.pid))
        assert len(os.listdir("/proc/self/fd")) == before
