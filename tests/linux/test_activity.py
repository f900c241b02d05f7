"""What a process does, as the kernel shows it: here, whether somebody has frozen it."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dshealthd.core.host import Host, read_bytes
from dshealthd.linux import activity as activity_module
from dshealthd.linux.activity import MAX_THREADS, ThreadState, activity, thread_of
from dshealthd.linux.process import parse_stat
from tests.cgroups import remove
from tests.jobs.machines import Machine, stat_line
from tests.waiting import until

FREEZERS = {
    "v1": (Path("/sys/fs/cgroup/freezer"), "freezer.state", "FROZEN", "THAWED"),
    "v2": (Path("/sys/fs/cgroup"), "cgroup.freeze", "1", "0"),
    "v2 beside v1": (Path("/sys/fs/cgroup/unified"), "cgroup.freeze", "1", "0"),
}


@pytest.mark.parametrize(("state", "wchan", "frozen", "expected"), [
    ("S", "do_freezer_trap", "", ThreadState.STOPPED),
    ("S", "get_signal", "", ThreadState.STOPPED),
    ("S", "futex_wait_queue", "", ThreadState.SLEEPING),
    ("S", "request_wait_answer", "FROZEN", ThreadState.BLOCKED),
    ("D", "folio_wait_bit_common", "THAWED", ThreadState.BLOCKED),
    ("D", "hrtimer_nanosleep", "FROZEN", ThreadState.STOPPED),
    ("D", "__refrigerator", "FREEZING", ThreadState.STOPPED),
    ("D", "hrtimer_nanosleep", "", ThreadState.BLOCKED),
])  # fmt: skip
def test_a_frozen_process(
    tmp_path: Path, state: str, wchan: str, frozen: str, expected: ThreadState
) -> None:
    """A freezer stops a process like a signal; a file system that does not answer blocks it."""
    machine = Machine(tmp_path / "proc")
    task = machine.process(10, state=state) / "task" / "10"
    task.mkdir(parents=True)
    (task / "stat").write_bytes(stat_line(10, state=state))
    (task / "wchan").write_text(wchan)
    (machine.root / "10" / "cgroup").write_text("4:freezer:/slurm/job_7\n0::/\n")
    place = tmp_path / "sys/fs/cgroup/freezer/slurm/job_7"
    place.mkdir(parents=True)
    if frozen:
        (place / "freezer.state").write_text(f"{frozen}\n")
    host = Host(procfs=machine.root, sysfs=tmp_path / "sys")
    found = activity(host, 10, 100)
    assert found is not None
    assert found.state is expected
    assert activity(host, 10, 101) is None, "another process has its pid"


@contextlib.contextmanager
def group_of(version: str) -> Iterator[Path]:
    """Make a cgroup; skip where this machine or user has none of this kind."""
    root, name, _, _ = FREEZERS[version]
    group = root / f"dshealthd-test-{os.getpid()}"
    if not (root / "cgroup.procs").exists():
        pytest.skip("no cgroups of this kind")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error}")
    try:
        if not (group / name).exists():
            pytest.skip(f"no {name} on this machine")
        yield group
    finally:
        remove(group)


@pytest.mark.parametrize("version", FREEZERS)
def test_this_kernel_shows_a_frozen_process(version: str) -> None:
    """Whichever freezer there is: a genuine process that it stops is not just asleep."""
    _, name, freeze, thaw = FREEZERS[version]
    with group_of(version) as group, subprocess.Popen(["sleep", "900"]) as process:
        try:
            (group / "cgroup.procs").write_text(str(process.pid))
            (group / name).write_text(freeze)
            start = parse_stat(Path(f"/proc/{process.pid}/stat").read_bytes()).start
            until(
                lambda: (
                    (found := activity(Host(), process.pid, start)) is not None
                    and found.state is ThreadState.STOPPED
                )
            )
        finally:
            (group / name).write_text(thaw)
            process.kill()


def test_the_thread_that_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found by its own number, in a pid namespace too. A user cannot make the agent look at
    more than MAX_THREADS, whatever number is told.
    """
    looks: list[str] = []

    def looked(place: str) -> bytes:
        looks.append(place)
        return read_bytes(place)

    monkeypatch.setattr(activity_module, "read_bytes", looked)
    for pid, threads, inside in ((10, 4000, 0), (5000, 3, 4900)):
        for thread in range(pid, pid + threads):
            task = tmp_path / str(pid) / "task" / str(thread)
            task.mkdir(parents=True)
            (task / "status").write_text(f"Name:\tpython\nNSpid:\t{thread}\t{thread - inside}\n")
    host = Host(procfs=tmp_path)
    assert thread_of(host, 10, 0) == 10
    assert not looks
    assert thread_of(host, 10, 4009) == 4009
    assert thread_of(host, 5000, 102) == 5002
    looks.clear()
    assert thread_of(host, 10, 999_999) == 10
    assert len(looks) <= MAX_THREADS + 1
