"""Healthy machines of many kinds: no warning that is not true."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.doctor.machine import OF_THIS_MACHINE, Answer, Machine


def h100(machine: Machine) -> None:
    """Eight H100 with NVLink to switches, a fabric that is complete, and two NDR ports."""
    machine.simulator.set(None, "fabric_state", 3)
    machine.add_infiniband("irdma0", "mlx5_2", "mlx5_3")


def a100_with_mig(machine: Machine) -> None:
    """Two of eight GPUs are split by MIG."""
    for gpu in (0, 1):
        machine.simulator.set(gpu, "mig_mode", 1)


def pcie_cards(machine: Machine) -> None:
    """Cards without NVLink that do not count ECC errors."""
    machine.simulator.set(None, "nvlink_count", 0)
    machine.simulator.set(None, "ecc_mode", 0)


def gb200_without_imex(machine: Machine) -> None:
    """Registered with a fabric of several nodes, and IMEX not set up, as where jobs do not use
    it.
    """
    machine.simulator.set(None, "fabric_state", 3)
    machine.simulator.set(None, "fabric_cluster_uuid", "0123456789abcdef0123456789abcdef")
    machine.simulator.set(None, "fabric_clique", 7)


def b200(machine: Machine) -> None:
    """Eight B200 behind switches: registered with the fabric of one node, which has no cluster."""
    machine.simulator.set(None, "fabric_state", 3)
    machine.add_infiniband("irdma0", "mlx5_2", "mlx5_3")


def tcp_only(machine: Machine) -> None:
    """GPUs and no InfiniBand: NCCL uses sockets, and that is how the cluster is built."""
    machine.simulator.set(None, "nvlink_count", 0)


def busy_in_a_container(machine: Machine) -> None:
    """In a container two of eight GPUs are there: on PCI and in NVML, with their device files."""
    machine.simulator.set(None, "utilization_gpu", 100)
    (machine.dev / "kmsg").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("gpus", "profile", "prepare"),
    [
        (8, "h100", h100),
        (8, "a100", a100_with_mig),
        (2, "a100", pcie_cards),
        (4, "b200", gb200_without_imex),
        (8, "b200", b200),
        (4, "a100", tcp_only),
        (2, "h100", busy_in_a_container),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_machines_with_gpus(
    make_machine: Callable[..., Machine],
    gpus: int,
    profile: str,
    prepare: Callable[[Machine], None],
) -> None:
    """All checks are ok, and say so."""
    machine = make_machine(gpus, profile)
    prepare(machine)
    answer = machine.examine()
    assert (answer.found, answer.status) == ({}, 0)
    assert answer.node["facts"]["gpus"] == str(gpus)
    assert answer.results("gpus")[0]["text"] == "Every GPU responds"


def test_login_node_of_slurm(
    make_machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No GPU, no InfiniBand and no daemon; an allocation of one node."""
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "cluster")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    answer = make_machine(gpus=0).examine()
    assert (answer.found, answer.status) == ({}, 0)
    assert "not applicable" in answer.results("infiniband")[0]["text"]


def test_roce(make_machine: Callable[..., Machine]) -> None:
    """Ethernet ports of RDMA adapters that are down may belong elsewhere: not judged."""
    machine = make_machine(gpus=0)
    machine.add_infiniband("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3")
    assert machine.examine().found == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="gives up root's capabilities")
def test_unprivileged_user(make_machine: Callable[..., Machine]) -> None:
    """What a user may not read is unknown with a way to read it, and never a warning."""
    machine = make_machine(gpus=0)
    log = machine.dev / "kmsg"
    log.write_text("")
    log.chmod(0)
    without = [
        "setpriv",
        "--bounding-set=-all",
        "--inh-caps=-all",
        sys.executable,
        "-m",
        "dshealthd",
    ]
    done = subprocess.run(
        [*without, *machine.arguments("--json", "--skip", OF_THIS_MACHINE)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    answer = Answer(done.returncode, json.loads(done.stdout))
    assert {outcome for _, outcome in answer.found.values()} == {"unknown"}
    assert answer.status == 3
    (unread,) = answer.results("gpu-memory")
    assert "permission" in unread["text"]
    assert "sudo" in unread["remedy"]
