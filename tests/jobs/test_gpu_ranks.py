"""Whose processes NVML's pids are."""

from __future__ import annotations

from pathlib import Path

import pytest

from dshealthd.jobs.gpu_ranks import GpuRanks
from tests.jobs.machines import TORCH, Machine

JOB = {**TORCH, "SLURM_JOB_ID": "9"}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine with nothing but its first process."""
    return Machine(tmp_path / "proc")


def test_ranks_and_others(machine: Machine) -> None:
    """A rank is told with its job; another process is known to be none."""
    machine.process(50, JOB)
    found, unknown = GpuRanks(machine.context()).ranks_of([50, 1, 60, 50])
    assert {pid: (rank.job, rank.launch.rank) for pid, rank in found.items()} == {
        50: ("slurm-9", 3)
    }
    assert unknown == 0


def test_unknown_is_counted(machine: Machine) -> None:
    """A process that may not be read, that waits in the kernel, or whose status makes no sense is
    counted, and found when that is over.
    """
    machine.process(50, JOB, state="D")
    machine.process(60, JOB)
    (machine.root / "60/environ").unlink()
    (machine.root / "60/environ").mkdir()
    machine.process(70, JOB)
    (machine.root / "70/stat").write_bytes(b"rubbish")
    ranks = GpuRanks(machine.context())
    assert ranks.ranks_of([50, 60, 70]) == ({}, 3)
    machine.process(50, JOB)
    found = ranks.ranks_of([50])
    assert ([*found[0]], found[1]) == ([50], 0)
    machine.process(50, JOB, state="D")
    assert ranks.ranks_of([50]) == found, "what is known needs no look"


def test_reused_pid(machine: Machine) -> None:
    """A pid that another process has taken is looked at again."""
    machine.process(50, JOB, start=100)
    ranks = GpuRanks(machine.context())
    ranks.ranks_of([50])
    machine.process(50, {}, start=200)
    assert ranks.ranks_of([50]) == ({}, 0)
