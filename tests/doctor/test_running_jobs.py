"""Trainings that run on this node: ranks, devices and variables of real processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import pytest

from dshealthd.core.host import Host
from dshealthd.doctor.check import Check, Result
from dshealthd.doctor.node_context import NodeContext
from dshealthd.doctor.snapshot_check import SnapshotCheck
from tests.collectors.bench import child
from tests.doctor.looks import look, named, results
from tests.doctor.machine import Machine
from tests.doctor.test_snapshot_check import seen

JOB = "987654"
RANK = {
    "SLURM_JOB_ID": JOB,
    "RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29599",
    "WORLD_SIZE": "2",
    "PATH": os.environ["PATH"],
}
"""The environment of a rank of this test's job."""
OF_JOBS = named("job-rendezvous"), named("job-devices"), named("job-nccl-settings")


@contextlib.contextmanager
def ranks(*each: dict[str, str]) -> Iterator[None]:
    """Run a process for each environment."""
    with contextlib.ExitStack() as stack:
        for one in each:
            stack.enter_context(child("", env=RANK | one))
        yield


def of_the_job(check: Check[NodeContext], context: NodeContext) -> list[Result]:
    """Return what is said of this test's job; others may run on the machine."""
    return [one for one in results(check, context) if JOB in one.component]


def test_ranks_devices_and_variables(make_machine: Callable[..., Machine]) -> None:
    """Wrong ranks, devices and variables are found, each once; with the right ones nothing is."""
    machine = make_machine()
    host = Host(sysfs=machine.sys, dev=machine.dev)
    sources = ("job_environment", "nvlink", "infiniband")
    wrong = {"RANK": "0", "LOCAL_RANK": "5", "CUDA_VISIBLE_DEVICES": "0,1"}
    wrong |= {"NCCL_SOCKET_IFNAME": "nothere0", "NCCL_P2P_DISABLE": "1"}
    with ranks(wrong, wrong, wrong | {"RANK": "1"}):
        context = look(*sources, host=host)
        found = {
            check.name: (check.slug, [one.outcome.value for one in of_the_job(check, context)])
            for check in OF_JOBS
        }
    assert found == {
        "job-rendezvous": ("ranks-stuck-at-init", ["warning"]),
        "job-devices": ("device-ordinal", ["warning"]),
        "job-nccl-settings": ("nccl-environment", ["warning", "warning"]),
    }
    right = {"CUDA_VISIBLE_DEVICES": "0,1"}
    with ranks(
        {**right, "RANK": "0", "LOCAL_RANK": "0"}, {**right, "RANK": "1", "LOCAL_RANK": "1"}
    ):
        context = look(*sources, host=host)
        assert [
            point for point in context.series("job_ranks") if JOB in point.labels["training_job"]
        ]
        for check in OF_JOBS:
            assert of_the_job(check, context) == []


@pytest.mark.parametrize(
    ("check", "variable", "problem", "words"),
    [
        (named("job-nccl-settings"), "NCCL_TIMEOUT", "unread", "is not read by any release"),
        (named("job-nccl-settings"), "NCCL_RINGS", "retired", "is no longer read"),
        (named("job-nccl-settings"), "NCCL_MIN_NRINGS", "renamed", "has been renamed"),
        (named("job-devices"), "LOCAL_RANK", "beyond", "is not below the number of"),
        (named("job-devices"), "CUDA_VISIBLE_DEVICES", "repeated", "lists a GPU twice"),
    ],
)
def test_problems_that_are_no_findings(
    check: SnapshotCheck, variable: str, problem: str, words: str
) -> None:
    """What only the fleet's alerts or nobody else judges is a warning here, in words."""
    scene = ("job_environment_problems", 2, JOB, "run", "3", variable, problem)
    (found,) = results(check, seen(check, (scene,)))
    assert found.outcome.value == "warning"
    assert f"{variable} of job {JOB} {words}" in found.text
    assert "(2 ranks, first rank 3)" in found.text
    assert found.remedy
