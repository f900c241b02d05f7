"""Open files and locked memory: on a small machine, and on this one with real children."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

from dshealthd.collectors.open_files import LIMIT, OPEN, parse_file_nr
from dshealthd.core.collector import Reason
from dshealthd.core.host import read
from dshealthd.core.options import Duration
from dshealthd.linux.process_limits import Usage
from tests.collectors.bench import Bench, child, named, reasons, values, write
from tests.jobs.machines import TORCH, Machine

MAX_JOBS = 16


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine without training."""
    return Machine(tmp_path / "proc")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A collector on that machine."""
    return Bench("open_files", tmp_path)


@pytest.fixture
def real() -> Bench:
    """A collector on this machine."""
    return Bench("open_files")


def test_system_wide(bench: Bench, machine: Machine) -> None:
    """The system's count is the kernel's own."""
    text = read("/proc/sys/fs/file-nr")
    write(machine.root, {"sys/fs/file-nr": text})
    found = named(bench.collect())
    count, most = parse_file_nr(text)
    assert found["open_files", "system", ""] == count
    assert found["open_files_limit", "system", ""] == most


def test_real_job(real: Bench) -> None:
    """Of two real ranks, the one with fewer files left is told; of memory likewise."""
    program = (
        "import os, resource, sys\nlimit, held, locked = map(int, sys.argv[1:])\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (locked, locked))\n"
        "while len(os.listdir('/proc/self/fd')) - 1 < held: os.dup(0)"
    )
    with contextlib.ExitStack() as ranks:
        for rank, numbers in enumerate((("64", "60", "1048576"), ("1000", "200", "65536"))):
            variables = {**os.environ, **TORCH, "RANK": str(rank), "SLURM_JOB_ID": str(os.getpid())}
            ranks.enter_context(child(program, *numbers, env=variables))
        found = named(real.collect())
    job = f"slurm-{os.getpid()}"
    assert (found["open_files", "job", job], found["open_files_limit", "job", job]) == (60, 64)
    assert found["job_locked_memory_limit_bytes", job] == 65536
    assert found["job_locked_memory_bytes", job, "locked"] == 0
    assert not [key for key in named(real.collect()) if job in key]


@pytest.mark.skipif(not os.stat("/proc/self/fd").st_size, reason="takes Linux 6.2")
def test_worst_of_all_processes(real: Bench) -> None:
    """A real process that is no training process, near its limit, is the worst of all."""
    program = (
        "import os, resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\ntry:\n    "
        "while True: os.dup(0)\nexcept OSError: pass"
    )
    with child(program):
        found = named(real.collect())
    # Or another test's, which is at its limit, too.
    assert found["open_files", "process", ""] == found["open_files_limit", "process", ""] >= 2
    after = named(real.collect())
    shown = after["open_files", "process", ""], after["open_files_limit", "process", ""]
    assert shown != (256, 256)


@pytest.mark.skipif(not os.stat("/proc/self/fd").st_size, reason="takes Linux 6.2")
@pytest.mark.parametrize("limit", [0, 1])
def test_a_sandbox_is_not_the_worst_of_all(real: Bench, limit: int) -> None:
    """A process with more open than its limit, to open nothing more, hides no other."""
    with child(f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))"):
        found = named(real.collect())
    assert found["open_files_limit", "process", ""] > limit


@pytest.mark.usefixtures("machine")
def test_the_worst_is_chosen_once_a_minute(bench: Bench) -> None:
    """Between, it alone is read; if it has ended, another one is chosen at once."""
    chosen = "7", Usage(9, 10)
    answers = [chosen, chosen, chosen, None, chosen]
    asked: list[list[str]] = []

    def worst(pids: Iterable[str]) -> tuple[str, Usage] | None:
        asked.append([*pids])
        return answers.pop(0)

    bench.collector._descriptors = SimpleNamespace(direct=True, worst=worst)
    for seconds in (0, 59, 1, 5):
        assert values(bench.collect(seconds), OPEN)["process", ""] == 9
    assert asked == [["1"], ["7"], ["1"], ["7"], ["1"]]


@pytest.mark.usefixtures("machine")
def test_no_job(bench: Bench) -> None:
    """Without training processes there are no series of jobs, and none that say 0."""
    found = named(bench.collect())
    assert not [key for key in found if "job" in key]
    assert found["processes_unseen", "permission_denied"] == 0


def test_process_that_cannot_be_read(machine: Machine, bench: Bench) -> None:
    """Descriptors that cannot be counted, and limits that are not understood, are a fault each, and
    no count of 0; the job's other processes are shown.
    """
    machine.process(50, TORCH, descriptors=7, soft="10")
    machine.process(51, TORCH, descriptors=9, soft="10")
    machine.process(52, TORCH, descriptors=9, soft="much")
    (machine.root / "51/fd").rename(machine.root / "51/away")
    (machine.root / "51/fd").symlink_to("fd")  # ELOOP
    result = bench.collect()
    assert {fault.reason for fault in result.faults} == {Reason.IO_ERROR, Reason.MALFORMED}
    assert {fault.part[:8] for fault in result.faults} == {"job run-"}
    assert [value for key, value in values(result, OPEN).items() if key[0] == "job"] == [7]


def test_ended_between_listing_and_count(machine: Machine, bench: Bench) -> None:
    """A process of a job that ended just now is neither a fault nor a 0."""
    directory = machine.process(50, TORCH, descriptors=7)
    bench.collect()
    (directory / "fd").rename(machine.root / "gone")
    result = bench.collect(61)
    assert result.faults == ()
    assert not [key for key in named(result) if "job" in key]


def test_number_of_jobs_is_bounded(machine: Machine, tmp_path: Path) -> None:
    """Of more than sixteen jobs the oldest stay."""
    for number in range(MAX_JOBS + 3):
        variables = {**TORCH, "SLURM_JOB_ID": str(number)}
        machine.process(100 + number, variables, start=500 - number, descriptors=number + 1)
    result = Bench("open_files", tmp_path).collect()
    jobs = {job for scope, job in values(result, OPEN) if scope == "job"}
    assert jobs == {f"slurm-{number}" for number in range(3, MAX_JOBS + 3)}


def test_limits_are_read_again(machine: Machine, tmp_path: Path) -> None:
    """A limit that is raised while the job runs shows after the full interval."""
    machine.process(50, TORCH, descriptors=7, soft="10")
    bench = Bench("open_files", tmp_path, full_interval=Duration(30))
    bench.collect()
    machine.process(50, TORCH, descriptors=8, soft="1000")
    assert set(values(bench.collect(29), LIMIT).values()) == {500000, 10}
    result = bench.collect(1)
    assert set(values(result, LIMIT).values()) == {500000, 1000}
    assert [value for key, value in values(result, OPEN).items() if key[0] == "job"] == [8]


def test_unlimited_memory(machine: Machine, bench: Bench) -> None:
    """No limit on locked memory is +Inf; what is locked and pinned is told."""
    limits = machine.process(50, {**TORCH, "SLURM_JOB_ID": "1"}) / "limits"
    limits.write_text(limits.read_text().replace("8388608 ", "unlimited "))
    found = named(bench.collect(), "job_locked_memory_")
    assert found["limit_bytes", "slurm-1"] == math.inf
    assert found["bytes", "slurm-1", "locked"] == 16 << 10
    assert found["bytes", "slurm-1", "pinned"] == 2 << 20


def test_memory_beyond_the_limit(machine: Machine, bench: Bench) -> None:
    """More than the limit can only be locked where none holds: with CAP_IPC_LOCK, which a pod gets
    for its RDMA with a limit of 64 KiB. Of two ranks, the other one is near its limit then.
    """
    job = {**TORCH, "SLURM_JOB_ID": "1"}
    limits = machine.process(50, job) / "limits"
    limits.write_text(limits.read_text().replace("8388608 ", "65536 "))
    found = named(bench.collect(), "job_locked_memory_")
    assert found["limit_bytes", "slurm-1"] == math.inf
    assert found["bytes", "slurm-1", "pinned"] == 2 << 20
    limits = machine.process(51, job) / "limits"
    limits.write_text(limits.read_text().replace("8388608 ", "2097152 "))
    found = named(bench.collect(60), "job_locked_memory_")
    assert found["limit_bytes", "slurm-1"] == 2 << 20
    third = machine.process(52, job)
    for name, before, after in (
        ("limits", "8388608 ", "1048576 "),
        ("status", "16 kB", "512 kB"),
        ("status", "2048 kB", "512 kB"),
    ):
        (third / name).write_text((third / name).read_text().replace(before, after))
    found = named(bench.collect(60), "job_locked_memory_")
    assert found["limit_bytes", "slurm-1"] == 2 << 20, "it has pinned all of it"


def test_hidden_processes_are_a_fault(machine: Machine, bench: Bench) -> None:
    """Where `/proc` hides processes, that is said; system-wide numbers stay."""
    machine.end(1)
    result = bench.collect()
    assert reasons(result) == {"processes": Reason.PERMISSION_DENIED}
    assert values(result, OPEN)["system", ""] == 1024
