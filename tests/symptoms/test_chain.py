"""Faults that are injected into a node lead to their tickets: source, collector, exposition, rule.

What the lab's faults do not cover; docs/coverage.md has them all by row.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.processes import free_port
from dshealthd.linux.nvswitch import FABRIC_MANAGER
from tests.collectors.test_job_checkpoint import save
from tests.collectors.test_nvlink_domain import daemon
from tests.jobs.ras.server import Communicator, Process, Rank, document, library
from tests.symptoms.chain import Machine, fires, rank

pytestmark = [pytest.mark.lab, pytest.mark.timeout(200)]
JOB = f"{os.getpid()}"
NAME = f"slurm-{JOB}"
HERE = Path(__file__).parent


@contextlib.contextmanager
def ranks(**variables: str) -> Iterator[list[int]]:
    """Run two ranks of a job that have these variables."""
    with rank(JOB, 0, **variables) as one, rank(JOB, 1, **variables) as two:
        yield [one.pid, two.pid]


def leads_to(alert: str, well: str, ill: str, directory: Path, **more: Any) -> None:
    """Require that the alert fires for the scrape with the fault, and not for the one before it."""
    assert fires(alert, {"node": (well, ill)}, directory, **more) == (False, True), alert


def test_ranks_share_a_gpu(tmp_path: Path) -> None:
    """Row 3: two ranks on one GPU, by NVML's list of its processes."""
    machine = Machine(tmp_path, ["gpu", "gpu_processes", "software"])
    with ranks() as (one, two):
        machine.simulator.set(0, "processes", f"{one}:1000000")
        machine.simulator.set(1, "processes", f"{two}:1000000")
        well = machine.scrape()
        machine.simulator.set(0, "processes", f"{one}:1000000, {two}:1000000")
        machine.simulator.set(1, "processes", "")
        ill = machine.scrape()
    leads_to("DshealthdRanksDoNotMeet", well, ill, tmp_path, job=NAME)


def test_p2p_disabled(tmp_path: Path) -> None:
    """Row 33: NCCL_P2P_DISABLE=1 on a node with NVLinks."""
    machine = Machine(tmp_path, ["gpu", "nvlink", "job_environment"])
    with ranks():
        well = machine.scrape()
    with ranks(NCCL_P2P_DISABLE="1"):
        ill = machine.scrape()
    leads_to("DshealthdJobSettings", well, ill, tmp_path, job=NAME)


def test_ranks_in_init(tmp_path: Path) -> None:
    """Row 4: NCCL says that one of two ranks is still in its initialization."""
    machine = Machine(tmp_path, ["nccl_ras"])
    (machine.sysfs / "module/nvidia").mkdir(parents=True)
    texts = []
    for state in (0, 7):
        answer = tmp_path / f"answer-{state}"
        answer.write_bytes(document(Communicator([Rank(0), Rank(1, init_state=state)])))
        port = free_port()
        process = Process(
            "json",
            answer,
            port=port,
            environment={
                "RANK": "0",
                "WORLD_SIZE": "2",
                "SLURM_JOB_ID": JOB,
                "NCCL_RAS_ADDR": f"127.0.0.1:{port}",
            },
            library=library(tmp_path),
        )
        try:
            texts.append(machine.scrape())
        finally:
            process.close()
    well, ill = texts
    leads_to("DshealthdRanksDoNotMeet", well, ill, tmp_path, job=NAME)


def test_memory_held_idle(tmp_path: Path) -> None:
    """Row 16: a job's GPU memory is full, and it computes next to nothing."""
    machine = Machine(tmp_path, ["gpu", "gpu_processes"], gpus=2)
    with ranks() as (one, two):
        machine.simulator.set(0, "processes", f"{one}:1000000")
        machine.simulator.set(1, "processes", f"{two}:1000000")
        machine.simulator.set(0, "memory_used", 79 << 30)
        machine.simulator.set(None, "utilization_gpu", 95)
        well = machine.scrape()
        machine.simulator.set(None, "utilization_gpu", 5)
        ill = machine.scrape()
    leads_to("DshealthdGpusStarved", well, ill, tmp_path, hours=2)


def test_memory_low(tmp_path: Path) -> None:
    """Row 17: 1 % of the host's memory is available, and tasks wait for it."""
    machine = Machine(tmp_path, ["memory", "pressure"])
    text = Path("/proc/meminfo").read_text(encoding="ascii")
    lines = dict(line.split(":", 1) for line in text.splitlines())
    total = int(lines["MemTotal"].split()[0])
    meminfo = {
        share: "".join(
            f"{key}: {f'{int(total * share)} kB' if key == 'MemAvailable' else value}\n"
            for key, value in lines.items()
        )
        for share in (0.5, 0.01)
    }
    pressure = (
        "some avg10={} avg60=0.00 avg300=0.00 total=1\n"
        "full avg10=0.00 avg60=0.00 avg300=0.00 total=1\n"
    )
    machine.lay_over("meminfo", meminfo[0.5])
    machine.lay_over("pressure/memory", pressure.format("0.00"))
    well = machine.scrape()
    machine.lay_over("meminfo", meminfo[0.01])
    machine.lay_over("pressure/memory", pressure.format("60.00"))
    ill = machine.scrape()
    leads_to("DshealthdHostMemoryPressure", well, ill, tmp_path)


def test_locked_memory(tmp_path: Path) -> None:
    """Row 19: a rank has locked nearly all the memory that it may."""
    machine = Machine(tmp_path, ["open_files"])
    lock = (
        "import ctypes, mmap, resource",
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))",
        "held = mmap.mmap(-1, 1000 << 10)",
        "place = ctypes.addressof(ctypes.c_char.from_buffer(held))",
        "assert ctypes.CDLL(None).mlock(ctypes.c_void_p(place), len(held)) == 0",
    )
    with rank(JOB, 0, *lock[:2]):
        well = machine.scrape()
    with rank(JOB, 0, *lock):
        ill = machine.scrape()
    leads_to("DshealthdHostLimitNear", well, ill, tmp_path, job=NAME)


def test_aio_requests(tmp_path: Path) -> None:
    """Row 41: the system's asynchronous requests, by which NVMe offload reads, are used up."""
    machine = Machine(tmp_path, ["kernel"])
    machine.lay_over("sys/fs/aio-max-nr", "65536\n")
    machine.lay_over("sys/fs/aio-nr", "100\n")
    well = machine.scrape()
    machine.lay_over("sys/fs/aio-nr", "65500\n")
    ill = machine.scrape()
    leads_to("DshealthdHostLimitNear", well, ill, tmp_path)


def test_pcie_width(tmp_path: Path) -> None:
    """Row 42: a GPU on half of its lanes."""
    machine = Machine(tmp_path, ["gpu", "pcie"])
    well = machine.scrape()
    machine.simulator.set(2, "pcie_width", 8)
    leads_to("DshealthdPcieDegraded", well, machine.scrape(), tmp_path)


def test_fabric_manager(tmp_path: Path) -> None:
    """Row 28: Fabric Manager ends on a node with NVSwitches, and NVML shows no change."""
    machine = Machine(tmp_path, ["kernel", "nvlink_domain"])
    machine.lay_over("2/comm", "kthreadd\n")
    machine.lay_over("uptime", "90000.00 90000.00\n")
    switch = machine.sysfs / "bus/pci/devices/0000:20:00.0"
    switch.mkdir()
    (switch / "class").write_text("0x068000\n")
    (switch / "vendor").write_text("0x10de\n")
    machine.procfs.mkdir()
    with daemon(tmp_path, FABRIC_MANAGER):
        well = machine.scrape()
    leads_to("DshealthdFabricManagerDown", well, machine.scrape(), tmp_path)


def test_loopback(tmp_path: Path) -> None:
    """Row 7: the loopback interface is down."""
    machine = Machine(tmp_path, ["loopback"])
    well = machine.scrape()
    machine.command = ("unshare", "--net")
    ill = machine.scrape()
    leads_to("DshealthdLoopbackRefused", well, ill, tmp_path)


def test_gpus_starved(tmp_path: Path) -> None:
    """Row 36: a job's GPUs idle while tasks wait for the CPU."""
    machine = Machine(tmp_path, ["gpu", "gpu_processes", "pressure"])
    calm = (
        "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 avg60=0.00 "
        "avg300=0.00 total=0\n"
    )
    with ranks() as pids:
        machine.simulator.set(0, "processes", f"{pids[0]}:1000000")
        machine.simulator.set(1, "processes", f"{pids[1]}:1000000")
        machine.simulator.set(None, "utilization_gpu", 95)
        for resource in ("cpu", "io", "memory"):
            machine.lay_over(f"pressure/{resource}", calm)
        well = machine.scrape()
        machine.simulator.set(None, "utilization_gpu", 15)
        busy = calm.replace("some avg10=0.00 avg60=0.00", "some avg10=80.00 avg60=80.00")
        machine.lay_over("pressure/cpu", busy)
        ill = machine.scrape()
    leads_to("DshealthdGpusStarved", well, ill, tmp_path)


def test_drift(tmp_path: Path) -> None:
    """Row 37: one node of ten has another sysctl than the others."""
    machine = Machine(tmp_path, ["gpu", "software"])
    machine.lay_over("sys/kernel/numa_balancing", "0\n")
    well = machine.scrape()
    machine.lay_over("sys/kernel/numa_balancing", "1\n")
    nodes = dict.fromkeys((f"node-{number}" for number in range(9)), (well, well))
    nodes["node-9"] = (well, machine.scrape())
    assert fires("DshealthdNodeDrift", nodes, tmp_path, hours=8) == (False, True)


def test_nccl_known_bad(tmp_path: Path) -> None:
    """Row 24: an environment with NCCL 2.21.5 and PyTorch 2.3."""
    packages = tmp_path / "environment/lib/python3.11/site-packages"
    for name, version in {"torch": "2.2.0", "nvidia_nccl_cu12": "2.19.3"}.items():
        (packages / f"{name}-{version}.dist-info").mkdir(parents=True)
    (tmp_path / "environment/pyvenv.cfg").write_text("version = 3.11.7\n", encoding="ascii")
    machine = Machine(
        tmp_path, ["software"], {"software": {"environments": [str(tmp_path / "environment")]}}
    )
    well = machine.scrape()
    shutil.rmtree(packages)
    for name, version in {"torch": "2.3.1", "nvidia_nccl_cu12": "2.21.5"}.items():
        (packages / f"{name}-{version}.dist-info").mkdir(parents=True)
    leads_to("DshealthdNcclKnownBad", well, machine.scrape(), tmp_path)


def test_checkpoint(tmp_path: Path) -> None:
    """Rows 38 and 39: a checkpoint loses a file, and another takes more than is free."""
    machine = Machine(tmp_path, ["job_checkpoint"])
    saved = tmp_path / "checkpoints"
    folder = save(saved, "global_step10")
    say = (
        f"import sys; sys.path.insert(0, {str(HERE.parent.parent)!r})",
        "from dshealthd.training.heartbeat import Heartbeat",
        "heartbeat = Heartbeat()",
        "heartbeat.step()",
        f"heartbeat.saved({str(saved)!r}, deepspeed=True, optimizer_files=2)",
    )
    with rank(JOB, 0, *say):
        well = machine.scrape()
        (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
        incomplete = machine.scrape()
        save(saved, "global_step10")
        os.truncate(folder / "mp_rank_00_model_states.pt", 1 << 43)
        large = machine.scrape()
    for alert, ill in (
        ("DshealthdCheckpointIncomplete", incomplete),
        ("DshealthdFilesystemFull", large),
    ):
        leads_to(alert, well, ill, tmp_path, job=NAME)


def test_job_of_two_versions(tmp_path: Path) -> None:
    """Row 37: of a job's two nodes one has loaded another NCCL."""
    machine = Machine(tmp_path, ["software"])
    texts = []
    for version in ("2.27.7", "2.29.3"):
        site = tmp_path / version / "site-packages"
        (site / f"nvidia_nccl_cu12-{version}.dist-info").mkdir(parents=True)
        loads = ["import mmap, os"]
        for name in ("torch/lib/libtorch_cuda.so", "nvidia/nccl/lib/libnccl.so.2"):
            (site / name).parent.mkdir(parents=True)
            (site / name).write_bytes(bytes(4096))
            file = f"os.open({str(site / name)!r}, os.O_RDONLY)"
            loads.append(f"held{len(loads)} = mmap.mmap({file}, 0, prot=mmap.PROT_READ)")
        with rank(JOB, 0, *loads):
            texts.append(machine.scrape())
    one, other = texts
    nodes = {"node-1": (one, one), "node-2": (one, other)}
    assert fires("DshealthdNodeDrift", nodes, tmp_path, job=NAME) == (False, True)
