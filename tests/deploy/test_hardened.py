"""With the shipped hardening every function works: GPUs, kernel log, jobs of users."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dshealthd.jobs.hangs.silence import FIRST_STEPS
from tests import cgroups
from tests.deploy.machine import LONGEST, Machine, booted
from tests.deploy.test_package import CONFIG, install, main_pid
from tests.nvml.simulator import Simulator

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(LONGEST)]

DROP_IN = "/etc/systemd/system/dshealthd.service.d/test.conf"
QUICK = """
[collectors.gpu]
interval = "500ms"
deadline = "2s"
[collectors.kernel_log]
interval = "500ms"
[collectors.training]
interval = "200ms"
[collectors.job_hang]
interval = "200ms"
floor = "2s"
[evidence]
after = "1s"
min_free_bytes = 0
"""
NVML_ERROR_GPU_IS_LOST = 15
LIBRARY = "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"
HOG = "echo $$ >{}/cgroup.procs; exec python3 -c 'b = [bytes([1]) * (1 << 20) for _ in range(500)]'"


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Simulator:
    """A node's driver library with eight GPUs."""
    return Simulator(tmp_path_factory.mktemp("nvml"), 8)


@pytest.fixture(scope="module")
def machine(package: Path, gpus: Simulator) -> Iterator[Machine]:
    """A machine with the package, eight simulated GPUs, a user, and a watchdog of 4 s."""
    with booted("gpu-node") as made:
        shutil.copy(gpus.directory / "lib/libnvidia-ml.so.1", made.root / LIBRARY)
        made.write("/etc/nvml-scenario", gpus.scenario.read_text())
        made.write(
            DROP_IN, "[Service]\nEnvironment=NVML_SIM_SCENARIO=/etc/nvml-scenario\nWatchdogSec=4\n"
        )
        made.run("mknod", "/dev/nvidiactl", "c", "195", "255")  # that there is a driver
        made.run("useradd", "--create-home", "alice")
        with zipfile.ZipFile(next(package.parent.glob("dshealthd_training*.whl"))) as wheel:
            wheel.extractall(made.root / "home/alice/site")
        rank = Path(__file__).parents[1] / "jobs/rank.py"
        made.write("/home/alice/train.py", rank.read_text(encoding="utf-8"))
        install(made, package)
        made.write(CONFIG, QUICK)
        made.run("systemctl", "restart", "dshealthd")
        yield made


def train(machine: Machine, number: int) -> int:
    """Start two ranks of the user's, of a job of that number, and return the pid of rank 0.

    Rank 1 does what is written to `orders-1`.
    """
    machine.run("systemctl", "stop", "training.service", check=False)
    command = ["systemd-run", "--quiet", "--unit=training", "--uid=alice", "--collect"]
    variables = ["WORLD_SIZE=2", "LOCAL_WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=29500"]
    variables += ["PYTHONPATH=/home/alice/site", f"SLURM_JOB_ID={number}"]
    command += [f"--setenv={variable}" for variable in variables]
    for orders in ("/home/alice/orders-0", "/home/alice/orders-1"):
        machine.sh(
            f"rm -f {orders}; mkfifo -m 666 {orders}; "
            f"systemd-run --quiet --collect sh -c 'sleep 3600 >{orders}'"
        )
    rank = "RANK={0} LOCAL_RANK={0} exec python3 train.py <orders-{0}"
    both = f"cd /home/alice; ({rank.format(1)}) & {rank.format(0)}"
    machine.run(*command, "sh", "-c", both)
    return int(machine.property("MainPID", "training.service"))


def test_gpus(machine: Machine) -> None:
    """Eight GPUs are read through NVML."""
    machine.wait(
        lambda: len(machine.scrape().all("dshealthd_gpu_temperature_celsius", sensor="core")) == 8,
        "eight GPUs",
    )
    assert machine.scrape().value("dshealthd_collector_up", collector="gpu") == 1


def test_devices(machine: Machine) -> None:
    """Character devices of a driver that is loaded later can be opened, block devices cannot.

    Without a driver behind it, a node that may be opened gives ENXIO, and not EPERM.
    """
    machine.sh(
        "mkdir -p /root/dev; cd /root/dev; mknod gpu c 195 200; mknod uvm c 498 0; mknod disk b 8 0"
    )
    group = "/sys/fs/cgroup/system.slice/dshealthd.service/cgroup.procs"
    found = {}
    for name in ("gpu", "uvm", "disk"):
        script = f"echo $$ >{group}; exec 3<>/root/dev/{name}"
        found[name] = machine.run("bash", "-c", script, check=False).stderr
    assert "No such device or address" in found["gpu"]
    assert "No such device or address" in found["uvm"]
    assert "Operation not permitted" in found["disk"]


@contextlib.contextmanager
def faulty(
    machine: Machine, gpus: Simulator, kind: str, value: int = 1, *, gpu: int
) -> Iterator[None]:
    """Have a GPU of the machine fail."""
    gpus.fault(kind, value, gpu=gpu)
    machine.write("/etc/nvml-scenario", gpus.scenario.read_text())
    try:
        yield
    finally:
        gpus.clear_faults()
        machine.write("/etc/nvml-scenario", gpus.scenario.read_text())


def test_hung_nvml_is_not_restarted(machine: Machine, gpus: Simulator) -> None:
    """A driver call that never returns costs a GPU, not the agent, whose watchdog is fed on."""
    before, restarts = main_pid(machine), machine.property("NRestarts")
    with faulty(machine, gpus, "hang", gpu=3):
        failures = "dshealthd_worker_failures_total"
        machine.wait(
            lambda: machine.scrape().value(failures, worker="device", reason="timeout"),
            "a hung worker",
        )
        machine.sh("sleep 9")  # two periods of the watchdog
        assert main_pid(machine) == before
        assert machine.property("NRestarts") == restarts
        assert len(machine.scrape().all("dshealthd_gpu_temperature_celsius", sensor="core")) == 7


def test_a_finding_outlives_a_restart(machine: Machine, gpus: Simulator) -> None:
    """The judge may write and read its file: a restarted agent knows since when a GPU is lost."""

    def lost() -> float:
        found = (item for item in machine.status()["findings"] if item["slug"] == "gpu-lost")
        return float(next(found, {"since": 0})["since"])

    with faulty(machine, gpus, "fail", NVML_ERROR_GPU_IS_LOST, gpu=5):
        since = machine.wait(lost, "the finding")
        began = time.time()
        machine.run("systemctl", "restart", "dshealthd")
        assert machine.wait(lost, "the finding again") == pytest.approx(since, abs=0.1)
        assert since < began
        assert machine.scrape().value("dshealthd_state_write_failures_total", file="findings") == 0
        assert "begins without a past" not in machine.log(began)


def test_kernel_log(machine: Machine) -> None:
    """A line that the kernel itself writes is counted, where dmesg_restrict refuses others."""
    machine.wait(
        lambda: machine.scrape().value("dshealthd_collector_up", collector="kernel_log") == 1,
        "the kernel log",
    )
    event = "dshealthd_kernel_events_total"
    before = machine.scrape().value(event, event="oom_kill") or 0
    with cgroups.group("memory") as group:
        group.limit_memory(40 << 20)
        done = subprocess.run(["sh", "-c", HOG.format(group.directory)], check=False, timeout=60)
    assert done.returncode == -9
    machine.wait(lambda: (machine.scrape().value(event, event="oom_kill") or 0) > before, "the OOM")


def steps(machine: Machine, job: str, number: int = 1) -> float:
    """Wait for so many steps of rank 0 that this agent hears, and return the last."""

    def heard() -> float | None:
        return machine.scrape().value("dshealthd_job_step", training_job=job, rank="0")

    first: float = machine.wait(heard, "a step")
    last: float = machine.wait(
        lambda: (step := heard() or 0) >= first + number and step, f"{number} more steps"
    )
    return last


def evidence_of_a_stop(machine: Machine, pid: int) -> tuple[str, ...]:
    """Stop a rank that the other then waits for, wait for a new bundle, and return its summary,
    stacks and kernel's view.
    """
    before = len(machine.status()["evidence"]["bundles"])
    machine.run("kill", "-STOP", str(pid))
    machine.sh("echo wait >/home/alice/orders-1")

    def bundle() -> str:
        evidence = machine.status()["evidence"]
        done = evidence["state"] == "ok" and len(evidence["bundles"]) > before
        return str(evidence["bundles"][0]) if done else ""

    folder = f"/var/lib/dshealthd/evidence/{machine.wait(bundle, 'a bundle')}"
    summary = machine.sh(f"cat {folder}/summary.txt")
    assert f"rank-0-{pid}.stacks.txt" in machine.sh(f"ls {folder}").split(), summary
    views = (machine.sh(f"cat {folder}/rank-0-{pid}.{name}.txt") for name in ("stacks", "kernel"))
    return summary, *views


def test_training_and_evidence_of_its_hang(machine: Machine) -> None:
    """A training's heartbeats arrive, again after a restart of the agent, and its hang is recorded
    with Python stacks.
    """
    pid = train(machine, 4711)
    job = "slurm-4711"
    step = steps(machine, job)
    machine.run("systemctl", "restart", "dshealthd")
    assert steps(machine, job, FIRST_STEPS) > step
    assert machine.property("MainPID", "training.service") == str(pid)

    summary, stacks, kernel = evidence_of_a_stop(machine, pid)
    assert "rank 0 is stopped" in summary, summary
    assert "train.py" in stacks, summary
    assert "T (stopped)" in kernel
    assert "+0x" not in kernel, "the kernel's stack takes the drop-in for the curious"
    machine.run("kill", "-CONT", str(pid))
    steps(machine, job)
    machine.run("systemctl", "stop", "training.service")


def test_curious(machine: Machine) -> None:
    """With the drop-in for the curious, evidence has the kernel's stack of a hung rank."""
    link = "/etc/systemd/system/dshealthd.service.d/evidence.conf"
    machine.sh(f"ln -s /usr/lib/dshealthd/evidence.conf {link}; systemctl daemon-reload")
    try:
        machine.run("systemctl", "restart", "dshealthd")
        pid = train(machine, 4712)
        steps(machine, "slurm-4712", FIRST_STEPS)
        _, _, kernel = evidence_of_a_stop(machine, pid)
        assert "+0x" in kernel, kernel
    finally:
        machine.sh(f"systemctl stop training.service; rm {link}; systemctl daemon-reload")
        machine.run("systemctl", "restart", "dshealthd")
