"""Processes that hang in the kernel: made-up ones, and a real one on a frozen file system."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dshealthd.collectors import stuck_processes
from dshealthd.core.collector import Reason
from dshealthd.core.host import Host
from dshealthd.core.result import CollectionOutcome
from dshealthd.doctor.node import kernel as check
from dshealthd.linux.process import sleeping
from tests import frozen
from tests.collectors.bench import Bench
from tests.doctor.looks import look, outcomes

KERNEL_THREAD = 0x0020_8040
STUCK, STUCK_ON_GPU = stuck_processes.STUCK.name, stuck_processes.STUCK_ON_GPU.name


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[frozen.Mount]:
    """A file system that can be frozen."""
    with frozen.mounted(tmp_path) as mounted:
        yield mounted


def collector(host: Host) -> Bench:
    """Return a collector that has looked at nothing yet."""
    return Bench("stuck_processes", host)


def collected(one: Bench) -> dict[str, float]:
    """Collect once, by metric; it must succeed."""
    result = one.collect()
    assert result.outcome is CollectionOutcome.OK, result.detail
    return {sample.metric.name: sample.value for sample in result.samples}


def values(one: Bench) -> list[float]:
    """Collect once, and return how many processes are stuck, if that is known."""
    return [value for name, value in collected(one).items() if name == STUCK]


def put(
    procfs: Path, pid: int, state: str, *, flags: int = 0x400000, start: int = 5, ticks: int = 7
) -> None:
    """Have a process in a made-up /proc."""
    fields = [state, "1", "0", "0", "0", "-1", str(flags), *["0"] * 4, str(ticks), *["0"] * 7]
    place = procfs / str(pid)
    place.mkdir(exist_ok=True)
    (place / "stat").write_text(f"{pid} (a (b) c) {' '.join([*fields, str(start), *['0'] * 30])}\n")


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
    one = collector(Host(procfs=procfs))
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
    one = collector(Host(procfs=procfs))
    values(one)
    (procfs / "20" / "stat").write_text("a file that must not be read: it is malformed\n")
    assert values(one) == [1]


def test_programs_that_the_kernel_runs_are_read(procfs: Path) -> None:
    """They are children of pid 2 too: a modprobe that hangs is as stuck as any other process."""
    children(procfs, 10)
    put(procfs, 10, "D")
    one = collector(Host(procfs=procfs))
    values(one)
    assert values(one) == [1]


def test_pid_of_an_ended_kernel_thread_is_read(procfs: Path) -> None:
    """What gets its number is another process."""
    children(procfs, 20)
    put(procfs, 20, "D", flags=KERNEL_THREAD)
    one = collector(Host(procfs=procfs))
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
    one = collector(Host(procfs=procfs))
    for _ in range(2):
        result = one.collect()
        assert (result.outcome, result.reason) == (
            CollectionOutcome.ERROR,
            Reason.PERMISSION_DENIED,
        )
        assert not result.samples
    assert outcomes(check.STUCK_PROCESSES, look(host=Host(procfs=procfs))) == ["unknown"]


@pytest.mark.parametrize("ends", [True, False])
def test_process_that_ends_is_not_hidden(
    procfs: Path, monkeypatch: pytest.MonkeyPatch, *, ends: bool
) -> None:
    """The kernel denies the files of a process that ends, to root too: none is called hidden
    then.
    """
    put(procfs, 10, "D")

    def denied(_host: Host, pid: int) -> Iterator[str]:
        if ends:
            put(procfs, pid, "Z")
        raise PermissionError

    monkeypatch.setattr(check, "open_files", denied)
    found = outcomes(check.STUCK_PROCESSES, look(host=Host(procfs=procfs)))
    assert found == (["ok"] if ends else ["unknown"])


def test_malformed(procfs: Path) -> None:
    """A line that is no process status is an error, and no process that is well."""
    put(procfs, 10, "D")
    (procfs / "10" / "stat").write_text("10 (x\n")
    result = collector(Host(procfs=procfs)).collect()
    assert (result.outcome, result.reason) == (CollectionOutcome.ERROR, Reason.MALFORMED)


def opened(procfs: Path, pid: int, *files: str) -> None:
    """Have a made-up process hold files open."""
    place = procfs / str(pid) / "fd"
    place.mkdir()
    for slot, file in enumerate(files):
        (place / str(slot)).symlink_to(file)


def test_stuck_processes_with_a_gpu_open(procfs: Path) -> None:
    """Of those that are stuck, those that have a GPU open are counted, each once."""
    host = Host(procfs=procfs, dev=procfs / "dev")
    files = {
        10: ("/dev/null", "/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia1"),
        11: (host.device("nvidia0"),),
        12: ("/dev/null", "socket:[1]", "/data/dev/nvidia0"),
        13: ("/dev/nvidia0",),
        14: (),
    }
    for pid, names in files.items():
        put(procfs, pid, "S" if pid == 13 else "D")
        opened(procfs, pid, *names)
    one = collector(host)
    assert collected(one) == {}
    put(procfs, 13, "D")  # perhaps only for a moment
    assert collected(one) == {STUCK: 4, STUCK_ON_GPU: 2}
    for pid in (10, 11, 13):
        put(procfs, pid, "S")
    assert collected(one) == {STUCK: 2, STUCK_ON_GPU: 0}


@pytest.mark.parametrize(("limit", "known"), [(4, True), (3, False)])
def test_files_of_stuck_processes_are_limited(
    procfs: Path, monkeypatch: pytest.MonkeyPatch, limit: int, *, known: bool
) -> None:
    """What has more files open than are looked at may have a GPU open: it is unknown, and not 0."""
    monkeypatch.setattr(stuck_processes, "_DESCRIPTORS", limit)
    for pid in (10, 11):
        put(procfs, pid, "D")
        opened(procfs, pid, "/dev/null", "/dev/null")
    one = collector(Host(procfs=procfs))
    assert collected(one) == {}
    assert collected(one) == {STUCK: 2} | ({STUCK_ON_GPU: 0} if known else {})


def test_files_that_may_not_be_seen(procfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without permission to see open files, the processes are counted; their GPUs are unknown."""

    def denied(_host: Host, _pid: int) -> Iterator[str]:
        raise PermissionError

    monkeypatch.setattr(stuck_processes, "open_files", denied)
    put(procfs, 10, "D")
    one = collector(Host(procfs=procfs))
    assert collected(one) == {}
    assert collected(one) == {STUCK: 1}


def test_real_process(mount: frozen.Mount, tmp_path: Path) -> None:
    """A process that writes to a frozen file system is one more, and one with a GPU open if it has
    a device open; thawed, it is no more.
    """
    device = tmp_path / "nvidia0"
    device.touch()
    one = collector(Host(dev=tmp_path))
    script = "import sys; held = open(sys.argv[1]); open(sys.argv[2], 'w').write('x')"
    mount.freeze()
    with subprocess.Popen(
        [sys.executable, "-c", script, str(device), str(mount.directory / "file")]
    ) as process:
        try:
            frozen.wait_until_it_hangs(process.pid)
            collected(one)
            hung = collected(one)
            assert hung[STUCK] >= 1
            assert hung[STUCK_ON_GPU] >= 1
        finally:
            mount.thaw()
        assert process.wait(60) == 0
    assert all(sleep.pid != process.pid for sleep in sleeping(Host()) or ())
    assert collected(one)[STUCK_ON_GPU] == hung[STUCK_ON_GPU] - 1
