"""What is kept of an environment, and what a job is called."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshealthd.jobs.environment import (
    ALLOWED,
    Launcher,
    held_gpus,
    job_name,
    launch,
    parse_environ,
    watchdog_seconds,
)
from tests.jobs import machines

MAX_VALUE = 4096
TIMEOUT = 600

TORCH = {**machines.TORCH, "TORCHELASTIC_RUN_ID": "none"}


VALUES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=50)
OTHERS = st.from_regex(r"[A-Z_]{1,20}", fullmatch=True).filter(lambda name: name not in ALLOWED)


@given(
    st.dictionaries(st.sampled_from(sorted(ALLOWED)), VALUES),
    st.dictionaries(OTHERS, VALUES),
    st.randoms(),
)
def test_allowed_variables_survive_among_others(
    allowed: dict[str, str], others: dict[str, str], shuffler: Random
) -> None:
    """Whatever else is set, and in whatever order, exactly the allowed variables come out,
    unchanged.
    """
    allowed = {**allowed, "RANK": "0"}
    entries = list({**allowed, **others}.items())
    shuffler.shuffle(entries)
    assert (
        parse_environ(b"".join(f"{name}={value}\0".encode() for name, value in entries)) == allowed
    )


def test_first_of_two_counts() -> None:
    """A name that occurs twice has the value that getenv(3) gives."""
    assert parse_environ(b"RANK=1\0RANK=2\0") == {"RANK": "1"}


def test_no_rank() -> None:
    """Of a process that no launcher has started nothing is kept."""
    assert parse_environ(b"MASTER_ADDR=a\0") == {}
    assert len(parse_environ(b"MASTER_ADDR=a\0SLURM_PROCID=1\0")) == 2


@pytest.mark.parametrize(("environment", "told", "seconds"), [
    ({}, 0, TIMEOUT),
    ({}, 300, 300),
    ({"DEEPSPEED_TIMEOUT": "30"}, 0, 1800),
    ({"DEEPSPEED_TIMEOUT": "30"}, 300, 300),
    ({"DEEPSPEED_TIMEOUT": "half an hour"}, 0, TIMEOUT),
    ({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "599"}, 0, 599),
    ({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "601"}, 0, TIMEOUT),
    ({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "0"}, 0, TIMEOUT),
    ({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "120", "TORCH_NCCL_ENABLE_MONITORING": "True"}, 0, 120),
    ({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "120", "TORCH_NCCL_ENABLE_MONITORING": "0"}, 0, TIMEOUT),
])  # fmt: skip
def test_watchdogs(environment: dict[str, str], told: int, seconds: int) -> None:
    """The first of a job's own watchdogs to end it, as its process group or its environment
    says.
    """
    assert watchdog_seconds(environment, told) == seconds


def test_long_value_is_left_out() -> None:
    """A value of megabytes under an allowed name is not kept in memory."""
    assert parse_environ(b"RANK=1\0VIRTUAL_ENV=" + b"/" * (MAX_VALUE + 1) + b"\0") == {"RANK": "1"}


@pytest.mark.parametrize(("environment", "launcher", "rank", "size"), [
    (TORCH, Launcher.TORCH, 3, 16),
    ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, Launcher.OPENMPI, 2, 4),
    ({"PMI_RANK": "5", "PMI_SIZE": "8"}, Launcher.PMI, 5, 8),
    ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}, Launcher.SLURM, 0, None),
    ({**TORCH, "SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"},
     Launcher.TORCH, 3, 16),
])  # fmt: skip
def test_launchers(
    environment: dict[str, str], launcher: Launcher, rank: int, size: int | None
) -> None:
    """Each launcher's variables give rank and size; torch's own go before the scheduler's."""
    place = launch(environment)
    assert place is not None
    assert (place.launcher, place.rank, place.world_size) == (launcher, rank, size)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "1"},
        {"WORLD_SIZE": "8"},
        {"RANK": "-1", "WORLD_SIZE": "8"},
        {"RANK": "x", "WORLD_SIZE": "8"},
        {"RANK": "٣", "WORLD_SIZE": "8"},
        {"RANK": "1" * 5000, "WORLD_SIZE": "8"},
        {"SLURM_JOB_ID": "7"},
        {"SLURM_PROCID": "0"},
    ],
)
def test_no_training_process(environment: dict[str, str]) -> None:
    """Half of what a launcher sets, or no plain number, makes no training process."""
    assert launch(environment) is None


@pytest.mark.parametrize(("scheduler", "name"), [
    ({"SLURM_JOB_ID": "123"}, "slurm-123"),
    ({"PBS_JOBID": "77.head.site.org"}, "pbs-77"),
    ({"PBS_JOBID": "77[3].head"}, "pbs-77-3"),
    ({"PBS_JOBID": "77[].head"}, "pbs-77"),
    ({"LSB_JOBID": "9", "LSB_JOBINDEX": "0"}, "lsf-9"),
    ({"LSB_JOBID": "9", "LSB_JOBINDEX": "12"}, "lsf-9-12"),
    ({"LSB_JOBID": "9", "LSB_JOBINDEX": "x"}, "lsf-9"),
])  # fmt: skip
def test_scheduler_names_the_job(scheduler: dict[str, str], name: str) -> None:
    """With a scheduler, its number is the job, whatever the rendezvous. Elements of an array train
    on their own: each is a job.
    """
    assert job_name(TORCH | scheduler, "a") == name
    assert scheduler.keys() <= ALLOWED


def test_job_is_equal_on_all_nodes() -> None:
    """What differs between the ranks and nodes of a job does not change its name."""
    other = {
        **TORCH,
        "RANK": "11",
        "LOCAL_RANK": "3",
        "CUDA_VISIBLE_DEVICES": "3",
        "VIRTUAL_ENV": "/x",
        "MASTER_ADDR": " NODE1",
    }
    assert job_name(TORCH, "machine one") == job_name(other, "machine two")


@pytest.mark.parametrize(
    "name", ["MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"]
)
def test_rendezvous_tells_jobs_apart(name: str) -> None:
    """Another address, port, size or run id is another job."""
    assert job_name(TORCH, "") != job_name({**TORCH, name: "8"}, "")


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "127.1.2.3", "::1", ""])
def test_loopback_job_is_this_machines_own(address: str) -> None:
    """Equal single-node jobs of two machines, on the default address and port, are not one job."""
    environment = {**TORCH, "MASTER_ADDR": address}
    assert job_name(environment, "machine one") != job_name(environment, "machine two")


def test_mpi_names_the_job() -> None:
    """Without an address to meet at, mpirun's own name for the job is the same on all nodes."""
    environment = {
        "OMPI_COMM_WORLD_RANK": "2",
        "OMPI_COMM_WORLD_SIZE": "4",
        "PMIX_NAMESPACE": "prterun-node1-4711@1",
    }
    assert job_name(environment, "machine one") == job_name(
        {**environment, "OMPI_COMM_WORLD_RANK": "0"}, "machine two"
    )


@given(st.dictionaries(st.sampled_from(sorted(ALLOWED)), st.text()), st.text())
def test_job_is_safe_as_a_label(environment: dict[str, str], machine: str) -> None:
    """Whatever a user writes into an environment, the name is short and plain."""
    name = job_name(environment, machine)
    assert len(name) <= 30
    assert name.replace("-", "").isalnum()
    assert name.isascii()


@pytest.mark.parametrize(
    ("variables", "held"),
    [
        ({"SLURM_JOB_GPUS": "0,1,2,3"}, {"0", "1", "2", "3"}),
        ({"SLURM_JOB_GPUS": "0,1,2,3", "SLURM_STEP_GPUS": "2"}, {"2"}),
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, {"GPU-a", "GPU-b"}),
        ({"SLURM_JOB_GPUS": "1", "NVIDIA_VISIBLE_DEVICES": "all"}, {"1"}),
        # What images set, CDI, MIG, and what no scheduler writes: nothing is known.
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, set()),
        ({"NVIDIA_VISIBLE_DEVICES": "void"}, set()),
        ({"NVIDIA_VISIBLE_DEVICES": "0,1"}, set()),
        ({"NVIDIA_VISIBLE_DEVICES": "MIG-a"}, set()),
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-a,MIG-b"}, set()),
        ({"SLURM_JOB_GPUS": "0,gpu:1"}, set()),
        ({"SLURM_JOB_GPUS": "0,"}, set()),
        ({"SLURM_JOB_GPUS": ""}, set()),
        ({}, set()),
    ],
)
def test_gpus_that_a_scheduler_has_given(variables: dict[str, str], held: set[str]) -> None:
    """A step's before its job's; whole GPUs only, and only if each is understood."""
    assert held_gpus(variables) == held
