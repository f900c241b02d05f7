"""Processes that hang in the kernel: made-up ones, and a real one on a frozen file system."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dshealthd.core.collector import Reason
from dshealthd.core.host import Host
from dshealthd.core.result import CollectionOutcome
from dshealthd.linux.process import sleeping
from tests import frozen
from tests.collectors.bench import Bench
from tests.jobs.machines import stat_line

KERNEL_THREAD = 0x0020_8040


def values(one: Bench) -> list[float]:
    """Collect once, and return how many processes are stuck, if that is known."""
    result = one.collect()
    assert result.outcome is CollectionOutcome.OK, result.detail
    return [sample.value for sample in result.samples]


def put(
    procfs: Path, pid: int, state: str, *, flags: int = 0x400000, start: int = 5, ticks: int = 7
) -> None:
    """Have a process in a made-up /proc."""
    place = procfs / str(pid)
    place.mkdir(exist_ok=True)
    line = stat_line(pid, comm=b"a (b) c", state=state, flags=flags, start=start, ticks=ticks)
    (place / "stat").write_bytes(line)


@pytest.fixture
def procfs(tmp_path: Path) -> Path:
    """A /proc with an init that waits for nothing."""
    put(tmp_path, 1, "S")
    (tmp_path / "meminfo").touch()
    return tmp_path


def test_two_looks(procfs: Path) -> None:
    """Stuck is who slept at both looks and was not awake in between."""
    for pid in (10, 11, 12, 13):
        put(procfs, pid, "D")
    put(procfs, 20, "D", flags=KERNEL_THREAD)
    put(procfs, 30, "R")
    one = Bench("stuck_processes", Host(procfs=procfs))
    assert values(one) == []
    put(procfs, 11, "D", ticks=8)
    put(procfs, 12, "D", start=6)
    put(procfs, 13, "S")
    put(procfs, 30, "D")
    assert values(one) == [1]
    assert values(one) == [4]  # all that sleep now slept so at the look before, and used no CPU


def children(procfs: Path, *pids: int) -> None:
    """Have these children of pid 2, which starts kernel threads."""
    put(procfs, 2, "S", flags=KERNEL_THREAD)
    (procfs / "2" / "task" / "2").mkdir(parents=True, exist_ok=True)
    (procfs / "2" / "task" / "2" / "children").write_text("".join(f"{pid} " for pid in pids))


def test_known_kernel_threads_are_not_read_again(procfs: Path) -> None:
    """A large node has thousands of kernel threads, whose files would take most of the time."""
    children(procfs, 20)
    put(procfs, 10, "D")
    put(procfs, 20, "D", flags=KERNEL_THREAD)
    one = Bench("stuck_processes", Host(procfs=procfs))
    values(one)
    (procfs / "20" / "stat").write_text("a file that must not be read: it is malformed\n")
    assert values(one) == [1]


def test_programs_that_the_kernel_runs_are_read(procfs: Path) -> None:
    """They are children of pid 2 too: a modprobe that hangs is as stuck as any other process."""
    children(procfs, 10)
    put(procfs, 10, "D")
    one = Bench("stuck_processes", Host(procfs=procfs))
    values(one)
    assert values(one) == [1]


def test_pid_of_an_ended_kernel_thread_is_read(procfs: Path) -> None:
    """What gets its number is another process."""
    children(procfs, 20)
    put(procfs, 20, "D", flags=KERNEL_THREAD)
    one = Bench("stuck_processes", Host(procfs=procfs))
    assert values(one) == []
    children(procfs)
    put(procfs, 20, "D")
    assert values(one) == [0]
    assert values(one) == [1]


def test_hidden_processes_are_unknown(procfs: Path) -> None:
    """Where others' processes are hidden, nothing is told of them, and it is said why."""
    (procfs / "1" / "stat").unlink()
    (procfs / "1").rmdir()
    put(procfs, 10, "D")
    one = Bench("stuck_processes", Host(procfs=procfs))
    for _ in range(2):
        result = one.collect()
        assert (result.reason, result.samples) == (Reason.PERMISSION_DENIED, ())


def test_malformed(procfs: Path) -> None:
    """A line that is no process status is an error, and no process that is well."""
    put(procfs, 10, "D")
    (procfs / "10" / "stat").write_text("10 (x\n")
    result = Bench("stuck_processes", Host(procfs=procfs)).collect()
    assert (result.outcome, result.reason) == (CollectionOutcome.ERROR, Reason.MALFORMED)


def test_real_process(mount: frozen.Mount) -> None:
    """A process that writes to a frozen file system is one more; thawed, it is no more."""
    one = Bench("stuck_processes")
    script = "import sys; open(sys.argv[1], 'w').write('x')"
    mount.freeze()
    with subprocess.Popen([sys.executable, "-c", script, str(mount.directory / "file")]) as process:
        try:
            frozen.wait_until_it_hangs(process.pid)
            values(one)
            assert values(one)[0] >= 1
        finally:
            mount.thaw()
        assert process.wait(60) == 0
    assert all(sleep.pid != process.pid for sleep in sleeping(Host(), set()) or ())
