"""What the doctor says of a single one: "1 GPU", not "1 GPUs"."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dshealthd.doctor.node import agent, gpus, rendezvous, running_jobs
from tests.doctor.job.asking import asked, texts
from tests.doctor.job.asking import results as job_results
from tests.doctor.looks import results
from tests.doctor.test_snapshot_checks import seen
from tests.singular import ONE_OF_MANY

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dshealthd.doctor.snapshot_check import SnapshotCheck
    from tests.doctor.machine import Machine
    from tests.doctor.test_snapshot_checks import Scene

GPU = ("gpu_up", 1, "0", "GPU-a")
ROUND = (("probe_rounds_total", 1, "pair", "ok"), ("probe_up", 1))


@pytest.mark.parametrize(
    ("check", "scene", "text"),
    [
        (gpus.GPUS, (("gpus_visible", 1), ("gpus_expected", 1)), "1 GPU in NVML, 1 on the PCI"),
        (
            gpus.GPU_METRICS,
            (("gpus_expected", 1), ("gpus_visible", 1), GPU),
            "1 NVIDIA GPU on the PCI bus, and",
        ),
        (gpus.GPU_MEMORY, (GPU,), "on 1 GPU; 1 does not count errors"),
        (
            gpus.NVLINK,
            (("nvlinks_up", 1, "0", "GPU-a"), ("gpu_fabric_state", 3, "0", "GPU-a")),
            "1 NVLink of 1 GPU up; 1 GPU is registered with the fabric",
        ),
        (
            rendezvous.LISTENERS,
            (("rendezvous_listeners", 1, "false"), ("rendezvous_ports", 1)),
            "1 listener on 1 rendezvous port, none orphaned",
        ),
        (
            rendezvous.PORTS,
            (("rendezvous_sockets", 1, "time_wait"), ("tcp_ephemeral_ports", 28232)),
            "1 socket on rendezvous ports in TIME_WAIT",
        ),
        (
            rendezvous.RENDEZVOUS_CONNECTIONS,
            (("rendezvous_client_sockets", 1, "established"),),
            "1 connection to rendezvous ports, none waiting",
        ),
        (running_jobs.JOB_HANGS, (("job_ranks", 1, "j", "r"),), "1 training job here, none hung"),
        (
            running_jobs.JOB_LOSSES,
            (("job_loss_finite", 1, "j", "0"),),
            "1 training job reports a loss",
        ),
        (agent.LINK_SUSPECTS, ROUND, "1 round with other nodes"),
        (agent.PROBE_FAILURES, ROUND, "1 round with other nodes"),
        (agent.STRAGGLER, ROUND, "1 round with other nodes"),
        (
            agent.AGENT,
            (("worker_stuck", 0, "filesystem"),),
            "0 workers cannot be killed; every file was reloaded",
        ),
    ],
    ids=lambda one: getattr(one, "name", None),
)
def test_snapshot_checks(check: SnapshotCheck, scene: Scene, text: str) -> None:
    """A check that has seen one of a kind says so in the singular."""
    said = texts(results(check, seen(check, scene)))
    assert text in said
    assert not ONE_OF_MANY.search(said), said


@pytest.mark.parametrize(
    ("check", "text"),
    [
        ("hostfile", "1 host with 1 slot, 1 rank"),
        ("launcher", "torchrun: 1 rank on 1 node"),
        ("ranks-and-gpus", "1 rank per node (torchrun), 1 GPU per node"),
    ],
)
def test_job(tmp_path: Path, check: str, text: str) -> None:
    """A job of one rank on one node with one GPU."""
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("127.0.0.1 slots=1\n")
    launch = "torchrun --nnodes=1 --nproc-per-node=1 train.py"
    given = ["--launch", launch, "--gpus-per-node", "1"]
    if check == "hostfile":
        given = ["--hostfile", str(hostfile)]
    said = texts(job_results(check, asked(*given)))
    assert text in said
    assert not ONE_OF_MANY.search(said), said


def test_machine(make_machine: Callable[..., Machine]) -> None:
    """All that is said of a machine with one GPU and one InfiniBand port."""
    machine = make_machine(1, "h100")
    machine.simulator.set(None, "fabric_state", 3)
    machine.add_infiniband("irdma0", "mlx5_1", "mlx5_2", "mlx5_3")
    answer = machine.examine()
    said = "\n".join(
        result["text"] for check in answer.node["checks"] for result in check["results"]
    )
    assert "1 GPU in NVML, 1 on the PCI bus" in said
    assert "1 of 1 InfiniBand port up" in said
    assert not ONE_OF_MANY.search(said), said
