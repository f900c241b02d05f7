"""Threads of jobs against the limits of their control groups."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from dshealthd.core.collector import Reason
from dshealthd.core.host import Host
from dshealthd.core.result import CollectionOutcome, CollectionResult
from dshealthd.linux.pids_cgroup import OutsideNamespace, Tasks, parse_pids_path, tasks_and_limit
from tests.collectors.bench import Bench, Values, named
from tests.jobs.machines import TORCH, Machine

GROUP = "system.slice/slurmstepd.scope/job_7/step_0"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine with one rank of job 7, in a control group of Slurm's."""
    made = Machine(tmp_path / "proc")
    rank = made.process(10, {**TORCH, "SLURM_JOB_ID": "7"})
    (rank / "cgroup").write_text(f"0::/{GROUP}\n")
    return made


def group(machine: Machine, path: str, current: object, limit: object) -> None:
    """Have a control group."""
    place = machine.root.parent / "sys/fs/cgroup" / path
    place.mkdir(parents=True, exist_ok=True)
    (place / "pids.current").write_text(f"{current}\n")
    (place / "pids.max").write_text(f"{limit}\n")


def look(machine: Machine) -> CollectionResult:
    """Collect once."""
    return Bench("job_threads", machine.root.parent).collect()


def threads(result: CollectionResult) -> Values:
    """Return the samples, by name without prefix, and labels."""
    return named(result, "job_threads")


def test_nearest_limit(machine: Machine) -> None:
    """Shown is the group that is nearest to its limit, of the process's own and those above it."""
    group(machine, GROUP, 100, "max")
    group(machine, "system.slice/slurmstepd.scope/job_7", 900, 1000)
    group(machine, "system.slice", 2000, 30000)
    assert threads(look(machine)) == {
        ("", "slurm-7"): 900,
        ("_limit", "slurm-7"): 1000,
    }


def test_no_limit(machine: Machine) -> None:
    """Where nothing is limited, the limit is infinite, and not absent or 0."""
    group(machine, GROUP, 100, "max")
    found = threads(look(machine))
    assert (found["", "slurm-7"], found["_limit", "slurm-7"]) == (100, math.inf)


def test_version_1(machine: Machine) -> None:
    """With cgroup v1 the pids controller has a tree of its own, whatever else is mounted."""
    (machine.root / "10/cgroup").write_text("8:pids:/job\n4:cpu,cpuacct:/other\n0::/user.slice\n")
    group(machine, "pids/job", 63, 64)
    group(machine, "user.slice", 1, 2)
    assert threads(look(machine))["_limit", "slurm-7"] == 64


def test_what_cannot_be_known(machine: Machine) -> None:
    """No count of tasks is no sample; a file of nonsense is a fault that names it."""
    assert threads(look(machine)) == {}
    group(machine, GROUP, "many", "max")
    result = look(machine)
    (fault,) = result.faults
    assert (fault.part, fault.reason) == ("job slurm-7", Reason.MALFORMED)
    assert "pids.current" in fault.detail
    assert threads(result) == {}


def test_rank_that_has_ended(machine: Machine) -> None:
    """A process that ended since it was listed is passed by; the others of its job count."""
    group(machine, GROUP, 5, 10)
    machine.process(11, {**TORCH, "SLURM_JOB_ID": "7"})  # it has no cgroup any more
    assert threads(look(machine))["", "slurm-7"] == 5


def test_agent_in_a_container(machine: Machine) -> None:
    """With a cgroup namespace of its own the agent cannot see the job's group, and says so."""
    (machine.root / "10/cgroup").write_text("0::/../../kubepods.slice/pod7\n")
    result = look(machine)
    assert result.outcome is CollectionOutcome.NOT_AVAILABLE
    assert "--cgroupns=host" in result.detail


def test_parse() -> None:
    """Names of groups may hold colons; a process of a kernel without cgroups has no line."""
    assert parse_pids_path("0::/a:b/c\n") == "a:b/c"
    assert parse_pids_path("9:name=systemd:/x\n8:pids:/y\n0::/\n") == "pids/y"
    assert parse_pids_path("") is None


def test_this_machine() -> None:
    """The group that this process is in counts it, or this kernel counts none."""
    try:
        found = tasks_and_limit(Host(), os.getpid())
    except OutsideNamespace:
        pytest.skip("this process sees no group above its own")
    assert found is None or (isinstance(found, Tasks) and found.current >= 1)
