"""Users who name the same job are kept apart, and the scheduler says whose it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from dshealthd.evidence import members
from dshealthd.jobs.gpu_ranks import GpuRanks
from dshealthd.jobs.ownership import claimed_name, scheduled_in
from dshealthd.jobs.processes import ProcessTable
from dshealthd.jobs.ranks import Ranks
from tests.jobs.machines import TORCH, Machine

JOB = {**TORCH, "SLURM_JOB_ID": "5000"}
V2 = "0::/system.slice/slurmstepd.scope/job_5000/step_0/user/task_0\n"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine without training."""
    return Machine(tmp_path / "proc")


def process(machine: Machine, pid: int, user: int, cgroup: str = "0::/\n", **more: str) -> None:
    """Start a process of a user that names job 5000."""
    place = machine.process(pid, {**JOB, **more}, start=pid)
    (place / "status").write_text(f"Name:\tpython\nUid:{f'{chr(9)}{user}' * 4}\n")
    (place / "cgroup").write_text(cgroup)


def jobs(machine: Machine) -> dict[int, str]:
    """Return the job of each process."""
    return {process.pid: process.job for process in ProcessTable(machine.context()).refresh()}


@pytest.mark.parametrize("cgroup", [
    V2,
    "0::/system.slice/gpu-17_slurmstepd.scope/job_5000/step_batch/user/task_0\n",
    "12:memory:/slurm/uid_1000/job_5000/step_0/task_0\n4:cpuset:/\n0::/\n",
    "7:freezer:/slurm_gpu17/uid_1000/job_5000\n",
])  # fmt: skip
def test_slurm_says_which_job(cgroup: str) -> None:
    """Slurm's cgroups of both versions are known."""
    assert scheduled_in(cgroup.encode()) == "slurm-5000"


@pytest.mark.parametrize("cgroup", [
    "0::/user.slice/user-7.slice/user@7.service/system.slice/slurmstepd.scope/job_5000\n",
    "0::/user.slice/slurm/uid_1000/job_5000\n", "0::/system.slice/slurmstepd.scope/job_5000x\n",
    "0::/system.slice/slurmd.service\n", "",
])  # fmt: skip
def test_what_a_user_can_name_is_no_word_of_slurm_s(cgroup: str) -> None:
    """A user may make cgroups below its own slice, by any name."""
    assert scheduled_in(cgroup.encode()) is None


def test_a_claim_before_the_job(machine: Machine) -> None:
    """Who names a job before it begins has to give the name up once the scheduler's is there."""
    process(machine, 50, 666)
    assert jobs(machine) == {50: "slurm-5000"}
    process(machine, 60, 1000, V2)
    assert jobs(machine) == {50: "slurm-5000-uid666", 60: "slurm-5000"}


def test_a_claim_from_another_job(machine: Machine) -> None:
    """One who is in a job of its own is not in the one that it names."""
    process(machine, 50, 666, V2.replace("5000", "4999"))
    process(machine, 60, 1000, V2)
    assert jobs(machine) == {50: "slurm-5000-uid666", 60: "slurm-5000"}


def test_where_the_scheduler_is_silent_the_oldest_has_the_name(machine: Machine) -> None:
    """Without cgroups a later claim changes nothing for a job that runs."""
    process(machine, 60, 1000)
    process(machine, 70, 666)
    process(machine, 80, 1000)
    assert jobs(machine) == {60: "slurm-5000", 70: "slurm-5000-uid666", 80: "slurm-5000"}
    machine.end(70)
    assert jobs(machine) == {60: "slurm-5000", 80: "slurm-5000"}


def test_no_environment_makes_such_a_name(machine: Machine) -> None:
    """The name of another user's job cannot be claimed."""
    process(machine, 60, 1000)
    process(machine, 70, 666, SLURM_JOB_ID="5000-uid1000")
    assert jobs(machine)[60] == "slurm-5000"
    assert jobs(machine)[70].startswith("run-")
    assert (claimed_name("slurm-5000-uid1000"), claimed_name("run-0c5d")) == (
        "slurm-5000",
        "run-0c5d",
    )


def test_a_rank_is_not_used_twice_by_a_stranger(machine: Machine) -> None:
    """Another user's process with the same rank is of another run, on this node or elsewhere."""
    process(machine, 60, 1000, V2)
    process(machine, 70, 666)
    table = ProcessTable(machine.context())
    runs = Ranks().runs(table.refresh(), table.machine)
    assert [len(run.processes) for run in runs] == [1, 1]
    assert len({run.name for run in runs}) == 2


def test_processes_on_gpus(machine: Machine) -> None:
    """The same holds for the ranks by their GPUs."""
    process(machine, 50, 666)
    process(machine, 60, 1000, V2)
    found, unknown = GpuRanks(machine.context()).ranks_of([50, 60])
    assert ({pid: rank.job for pid, rank in found.items()}, unknown) == (
        {50: "slurm-5000-uid666", 60: "slurm-5000"},
        0,
    )


def test_evidence_of_a_job_takes_its_user_s_processes_alone(machine: Machine) -> None:
    """Evidence that heartbeats ask for finds that user's ranks, however the job is called here."""
    process(machine, 50, 666)
    process(machine, 60, 1000)
    process(machine, 61, 1000, RANK="4")
    host = machine.context().host
    found = members.find(lambda *_: None, host, "slurm-5000", [60])["ranks"]
    assert {(rank["job"], rank["pid"]) for rank in found} == {
        ("slurm-5000", 60),
        ("slurm-5000", 61),
    }
    by_hand = members.find(lambda *_: None, host, "slurm-5000-uid1000")["ranks"]
    assert {rank["pid"] for rank in by_hand} == {60, 61}
