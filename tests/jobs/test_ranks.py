"""Which processes are ranks, and which ranks belong together."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest

from dshealthd.core.collector import Context
from dshealthd.core.host import Host
from dshealthd.jobs.environment import job_name, launch, launched_by
from dshealthd.jobs.heartbeats.identity import Identity, identify
from dshealthd.jobs.processes import ProcessTable, TrainingProcess
from dshealthd.jobs.ranks import Ranks, Run
from tests.jobs.machines import training_process
from tests.netns import network_namespace
from tests.processes import wait_for_environment

BASE = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500", "WORLD_SIZE": "4"}


def process(
    pid: int, environment: dict[str, str], *, parent: int = 1, start: int = 0
) -> TrainingProcess:
    """Return a process as the table tells it."""
    job = job_name(environment, "m")
    return training_process(pid, environment, start=start or pid, parent=parent, job=job)


def rank(
    number: int, changed: Mapping[str, str] | None = None, *, pid: int = 0, parent: int = 1
) -> TrainingProcess:
    """Return a rank of the usual run, with some of its variables changed."""
    return process(
        pid or 100 + number,
        {**BASE, "RANK": str(number), "LOCAL_RANK": str(number), **(changed or {})},
        parent=parent,
    )


def runs(*processes: TrainingProcess, ranks: Ranks | None = None, machine: str = "m") -> list[Run]:
    """Return the runs of some processes."""
    return (ranks or Ranks()).runs(processes, machine)


def pids(run: Run) -> dict[int, list[int]]:
    """Return the pids of each rank."""
    return {number: [process.pid for process in members] for number, members in run.ranks.items()}


def kin(of: Iterable[Run]) -> set[str]:
    """Return the variables about which alone these runs differ."""
    first, *others = (run.without("m") for run in of)
    return {
        variable
        for variable in first
        if all(other.get(variable) == first[variable] for other in others)
    }


def test_one_run() -> None:
    """Ranks that agree are one run, named as their job is where no scheduler names it."""
    (run,) = runs(*(rank(number) for number in range(4)))
    assert pids(run) == {0: [100], 1: [101], 2: [102], 3: [103]}
    assert (run.job, run.world_size, run.whole, run.many_nodes) == (run.name, 4, True, False)


def test_rank_used_twice() -> None:
    """Two processes with one rank, neither started by the other, are told as that."""
    (run,) = runs(rank(0), rank(1), rank(1, pid=200))
    assert pids(run) == {0: [100], 1: [101, 200]}
    assert not run.whole


def test_children_of_ranks_are_no_ranks() -> None:
    """Data loaders inherit a rank's environment and are none, even as orphans (fault 21)."""
    ranks = Ranks()
    (run,) = runs(rank(0), rank(0, pid=200, parent=100), rank(0, pid=300, parent=200), ranks=ranks)
    assert pids(run) == {0: [100]}
    assert runs(rank(0, pid=200, parent=100), rank(0, pid=300, parent=200), ranks=ranks) == []


def test_reused_parent() -> None:
    """A process is no child of one that was started after it."""
    (run,) = runs(rank(1, pid=100), process(200, {**BASE, "RANK": "1"}, parent=100, start=50))
    assert sorted(pids(run)[1]) == [100, 200]


def test_parents_that_go_round() -> None:
    """By pids that are used again, two processes may be each other's parents."""
    one, other = rank(0, parent=101), rank(1, parent=100)
    assert runs(replace(one, start=100), replace(other, start=100)) == []


def test_launcher_below_a_scheduler() -> None:
    """Below srun, torchrun is a task of the step; what it starts are the ranks (fault 21)."""
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
    shell = process(10, slurm)
    torchrun = process(20, slurm, parent=10)
    started = [rank(number, slurm, parent=20) for number in range(2)]
    (run,) = runs(shell, torchrun, *started)
    assert pids(run) == {0: [100], 1: [101]}
    assert (run.job, run.world_size, run.many_nodes) == ("slurm-7", 4, True)
    assert run.name != run.job


@pytest.mark.parametrize("scheduler", [{}, {"SLURM_JOB_ID": "7"}])
def test_a_run_within_a_rank(scheduler: dict[str, str]) -> None:
    """What a rank starts in its own place is its child, though it meets elsewhere, as an engine
    that generates rollouts does. A launcher of one rank has no place among the ranks of its node.
    """
    ranks = [rank(number, scheduler) for number in range(4)]
    elsewhere = {**scheduler, "MASTER_PORT": "30000"}
    engines = [rank(number, elsewhere, pid=200 + number, parent=100 + number) for number in (1, 3)]
    (run,) = runs(*ranks, *engines)
    assert pids(run) == {0: [100], 1: [101], 2: [102], 3: [103]}
    torchrun = process(50, {**BASE, **elsewhere, "RANK": "1"})
    (run,) = runs(torchrun, rank(1, {**scheduler, "LOCAL_RANK": "0"}, parent=50))
    assert pids(run) == {1: [101]}


def test_two_runs_in_one_allocation() -> None:
    """A sweep that trains twice side by side in one job of the scheduler has two runs, each with a
    rank 0.
    """
    both = [
        rank(0, {"MASTER_PORT": str(29500 + port), "SLURM_JOB_ID": "7"}, pid=10 + port)
        for port in range(2)
    ]
    first, second = runs(*both)
    assert first.job == second.job
    assert first.name != second.name


@pytest.mark.parametrize(("variable", "value"), [
    ("MASTER_PORT", "29501"),
    ("WORLD_SIZE", "3"),
    ("MASTER_ADDR", "node2"),
    ("MASTER_ADDR", "127.0.0.1"),
])  # fmt: skip
@pytest.mark.parametrize("scheduler", [{}, {"SLURM_JOB_ID": "7"}])
def test_ranks_that_disagree(variable: str, value: str, scheduler: dict[str, str]) -> None:
    """A rank with another address, port or size is in a run of its own, and it is seen which of
    them is the difference.
    """
    one, other = runs(rank(0, scheduler), rank(1, {variable: value, **scheduler}))
    assert one.name != other.name
    assert kin([one, other]) == {variable}


def test_ranks_that_disagree_about_two() -> None:
    """Runs that differ in address and port are different runs, and no mistake."""
    assert kin(runs(rank(0), rank(1, {"MASTER_ADDR": "node2", "MASTER_PORT": "29501"}))) == set()


def test_loopback_is_right_where_rank_0_is() -> None:
    """Rank 0 may name its own node by the loopback address."""
    (run,) = runs(rank(0, {"MASTER_ADDR": "localhost"}))
    assert "MASTER_ADDR" not in run.without("m")
    (run,) = runs(rank(1, {"MASTER_ADDR": "localhost"}))
    assert "MASTER_ADDR" in run.without("m")


def test_no_address() -> None:
    """Without an address that launchers hand out there is nothing to disagree about."""
    (run,) = runs(process(10, {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}))
    assert run.without("m") == {}


@pytest.mark.parametrize(("environment", "launcher"), [
    ({**BASE, "RANK": "0"}, "torch"),
    ({**BASE, "RANK": "0", "TORCHELASTIC_RUN_ID": "none"}, "torchrun"),
    ({**BASE, "RANK": "0", "CROSS_SIZE": "1", "LOCAL_SIZE": "4"}, "deepspeed"),
    ({**BASE, "RANK": "0", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}, "slurm"),
    ({**BASE, "RANK": "0", "SLURM_JOB_ID": "7"}, "torch"),
    ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "openmpi"),
    ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "pmi"),
])  # fmt: skip
def test_what_started_it(environment: dict[str, str], launcher: str) -> None:
    """Each launcher is known by what it alone sets."""
    place = launch(environment)
    assert place is not None
    assert launched_by(environment, place) == launcher


@pytest.mark.parametrize("scheduler", [{}, {"SLURM_JOB_ID": str(os.getpid())}])
def test_one_localhost_in_two_network_namespaces(scheduler: dict[str, str]) -> None:
    """Two pods that meet on `localhost` and the same port are two runs, and no rank is used twice.

    Nor do they disagree about anything; those in one namespace are one run. Real processes.
    """
    environment = {
        "PATH": os.defpath,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29877",
        "WORLD_SIZE": "2",
        **scheduler,
    }

    def start(number: int) -> subprocess.Popen[bytes]:
        ranked = environment | {"RANK": str(number), "LOCAL_RANK": str(number)}
        process = subprocess.Popen(["sleep", "600"], env=ranked)
        wait_for_environment(process.pid)
        return process

    started = [start(0), start(1)]
    try:
        with network_namespace():
            started += [start(0), start(1)]
        pids_of = {process.pid for process in started}
        context = Context(host=Host())
        identities = [identify(Host(), process.pid, os.getuid()) for process in started]
        table = ProcessTable(context)
        found = [process for process in table.refresh() if process.pid in pids_of]
        one, other = runs(*found, machine=table.machine)
        assert sorted(one.ranks) == sorted(other.ranks) == [0, 1]
        assert one.whole
        assert other.whole
        assert {process.pid for process in one.processes} == {started[0].pid, started[1].pid}
        assert kin([one, other]) == set()
        for process, identity in zip(started, identities, strict=True):
            assert isinstance(identity, Identity)
            (seen,) = [entry for entry in found if entry.pid == process.pid]
            assert identity.process.job == seen.job  # as the heartbeats name it, too
    finally:
        for process in started:
            process.kill()
            process.wait()
