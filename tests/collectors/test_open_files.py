"""Open files and locked memory: on a small machine, and on this one with real children."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dshealthd.collectors.open_files import OpenFiles, parse_file_nr
from dshealthd.core.collector import Context, Reason
from dshealthd.core.exposition import render
from dshealthd.core.host import Host, read
from dshealthd.core.options import Duration
from dshealthd.core.result import CollectionOutcome, Result, attempt
from tests.jobs.machines import TORCH, Machine

if TYPE_CHECKING:
    from collections.abc import Mapping

FIXTURES = Path(__file__).parent / "fixtures" / "open_files"
Values = dict[tuple[str, ...], float]


def values(result: Result, *names: str) -> Values:
    """Return the samples of these metrics, by name without prefix and labels."""
    found = {
        (sample.metric.name.removeprefix("dshealthd_"), *sample.labels): sample.value
        for sample in result.samples
    }
    return {key: value for key, value in found.items() if not names or key[0] in names}


class Agent:
    """A collector with its context, asked sweep by sweep."""

    def __init__(self, context: Context, options: Mapping[str, object] | None = None) -> None:
        self.context = context
        self.collector = OpenFiles(OpenFiles.Options(**(options or {})), context)  # type: ignore[arg-type] # options of several types

    def sweep(self) -> Result:
        """Collect in a new sweep."""
        self.context.sweep += 1
        return attempt(self.collector, self.context.monotonic)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine without training."""
    return Machine(tmp_path / "proc")


@pytest.fixture
def real() -> Agent:
    """A collector on this machine."""
    return Agent(Context(host=Host(), monotonic=time.monotonic, wall=time.time))


def test_fixture() -> None:
    """Two jobs, one of three processes with a data loader of an odd name: the whole output."""
    context = Context(host=Host(procfs=FIXTURES / "proc"), monotonic=time.monotonic, wall=time.time)
    result = Agent(context).sweep()
    assert (result.outcome, result.faults) == (CollectionOutcome.OK, ())
    assert render(result.samples) == (FIXTURES / "expected.prom").read_text()


def test_system_wide(real: Agent) -> None:
    """The count of the whole system is the kernel's own, to within what other processes do
    meanwhile.
    """
    before = parse_file_nr(read("/proc/sys/fs/file-nr"))
    found = values(real.sweep())
    after = parse_file_nr(read("/proc/sys/fs/file-nr"))
    assert (
        min(before[0], after[0]) - 300
        <= found["open_files", "system", ""]
        <= max(before[0], after[0]) + 300
    )
    assert found["open_files_limit", "system", ""] == before[1] == after[1]


def test_real_job(real: Agent) -> None:
    """Of two real ranks, the one that has fewer files left is told, though the other has more open;
    memory limits likewise.
    """
    program = (
        "import os, resource, sys\n"
        "limit, held, locked = map(int, sys.argv[1:])\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (locked, locked))\n"
        "while len(os.listdir('/proc/self/fd')) - 1 < held: os.dup(0)\n"
        "print(flush=True); input()"
    )
    ranks = []
    try:
        for rank, numbers in enumerate((["64", "60", "1048576"], ["1000", "200", "65536"])):
            variables = {**os.environ, **TORCH, "RANK": str(rank), "SLURM_JOB_ID": str(os.getpid())}
            command = [sys.executable, "-c", program, *numbers]
            ranks.append(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables
                )
            )
            assert ranks[-1].stdout is not None
            ranks[-1].stdout.readline()
        found = values(real.sweep())
    finally:
        for child in ranks:
            child.communicate(b"\n", timeout=60)
    job = f"slurm-{os.getpid()}"
    assert (found["open_files", "job", job], found["open_files_limit", "job", job]) == (60, 64)
    assert found["job_locked_memory_limit_bytes", job] == 65536
    assert found["job_locked_memory_bytes", job, "locked"] == 0
    assert not [key for key in values(real.sweep()) if job in key]


@pytest.mark.skipif(not os.stat("/proc/self/fd").st_size, reason="takes Linux 6.2")
def test_worst_of_all_processes(real: Agent) -> None:
    """A real process that is no training process, near its limit, is the worst of all."""
    program = (
        "import os, resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n"
        "try:\n    while True: os.dup(0)\nexcept OSError: print(flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        found = values(real.sweep())
        child.communicate(b"\n", timeout=60)
    assert (found["open_files", "process", ""], found["open_files_limit", "process", ""]) == (
        256,
        256,
    )
    after = values(real.sweep())
    assert after["open_files", "process", ""] < after["open_files_limit", "process", ""]


def test_all_processes_can_be_left_out(real: Agent) -> None:
    """Who does not want the worst of all processes does not pay for it."""
    result = Agent(real.context, {"all_processes": False}).sweep()
    assert not [key for key in values(result) if "process" in key]


def test_no_job(machine: Machine) -> None:
    """Without training processes there are no series of jobs, and none that say 0."""
    found = values(Agent(machine.context()).sweep())
    assert {key for key in found if "job" in key} == set()
    assert found["open_files_jobs_left_out",] == 0
    assert found["processes_unseen", "permission_denied"] == 0


def test_unreadable_process(machine: Machine) -> None:
    """A process of a job whose descriptors cannot be counted is a fault."""
    machine.process(50, TORCH, descriptors=7, soft="10")
    machine.process(51, TORCH, descriptors=9, soft="10")
    (machine.root / "51/fd").rename(machine.root / "51/away")
    (machine.root / "51/fd").symlink_to("fd")  # ELOOP
    result = Agent(machine.context()).sweep()
    (fault,) = result.faults
    assert fault.part.startswith("job run-")
    assert fault.reason is Reason.IO_ERROR
    assert [value for key, value in values(result, "open_files").items() if key[1] == "job"] == [7]


def test_unreadable_limits(machine: Machine) -> None:
    """Limits that are not understood are a fault, and no limit of 0 or infinity."""
    machine.process(50, TORCH, descriptors=7, soft="much")
    result = Agent(machine.context()).sweep()
    assert [fault.reason for fault in result.faults] == [Reason.MALFORMED]
    assert {key for key in values(result) if "job" in key} == set()


def test_ended_between_listing_and_count(machine: Machine) -> None:
    """A process of a job that ended just now is neither a fault nor a 0."""
    directory = machine.process(50, TORCH, descriptors=7)
    agent = Agent(machine.context())
    agent.sweep()
    (directory / "fd").rename(machine.root / "gone")
    machine.clock.now += 61
    result = agent.sweep()
    assert result.faults == ()
    assert {key for key in values(result) if "job" in key} == set()


def test_number_of_jobs_is_bounded(machine: Machine) -> None:
    """More jobs than the configured number are counted and not shown; the oldest stay."""
    for number in range(5):
        machine.process(
            100 + number,
            {**TORCH, "SLURM_JOB_ID": str(number)},
            start=500 - number,
            descriptors=number + 1,
        )
    found = values(Agent(machine.context(), {"max_jobs": 2}).sweep())
    assert {key[2] for key in found if key[0] == "open_files" and key[1] == "job"} == {
        "slurm-3",
        "slurm-4",
    }
    assert found["open_files_jobs_left_out",] == 3


def test_limits_are_read_again(machine: Machine) -> None:
    """A limit that is raised while the job runs shows after the full interval."""
    machine.process(50, TORCH, descriptors=7, soft="10")
    agent = Agent(machine.context(), {"full_interval": Duration(30)})
    agent.sweep()
    machine.process(50, TORCH, descriptors=8, soft="1000")
    machine.clock.now += 29
    assert set(values(agent.sweep(), "open_files_limit").values()) == {500000, 10}
    machine.clock.now += 1
    result = agent.sweep()
    assert set(values(result, "open_files_limit").values()) == {500000, 1000}
    assert [value for key, value in values(result, "open_files").items() if key[1] == "job"] == [8]


def test_unlimited_memory(machine: Machine) -> None:
    """No limit on locked memory is +Inf; what is locked and pinned is told."""
    directory = machine.process(50, {**TORCH, "SLURM_JOB_ID": "1"})
    text = (directory / "limits").read_text()
    (directory / "limits").write_text(text.replace("8388608 ", "unlimited "))
    found = values(Agent(machine.context()).sweep())
    assert found["job_locked_memory_limit_bytes", "slurm-1"] == math.inf
    assert found["job_locked_memory_bytes", "slurm-1", "locked"] == 16 << 10
    assert found["job_locked_memory_bytes", "slurm-1", "pinned"] == 2 << 20


def test_hidden_processes_are_a_fault(machine: Machine) -> None:
    """Where `/proc` hides processes, that is said; system-wide numbers stay."""
    machine.end(1)
    result = Agent(machine.context()).sweep()
    assert [(fault.part, fault.reason) for fault in result.faults] == [
        ("processes", Reason.PERMISSION_DENIED)
    ]
    assert values(result)["open_files", "system", ""] == 1024


def test_malformed_file_nr(machine: Machine) -> None:
    """Numbers that are not understood are an error, and no sample."""
    (machine.root / "sys/fs/file-nr").write_text("many\n")
    result = Agent(machine.context()).sweep()
    assert (result.outcome, result.reason, result.samples) == (
        CollectionOutcome.ERROR,
        Reason.MALFORMED,
        (),
    )
