"""With the shipped hardening every function works: GPUs, kernel log, jobs of users, probes."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dshealthd.jobs.hangs.silence import FIRST_STEPS
from tests.deploy.machine import LONGEST, booted
from tests.deploy.test_package import CONFIG, install, main_pid
from tests.nvml.simulator import Simulator

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.deploy.machine import Machine

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
MEMORY_GROUPS = ("/sys/fs/cgroup/memory", "/sys/fs/cgroup")
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
    rank = "RANK={0} LOCAL_RANK={0} exec python3 train.py /run/dshealthd/heartbeat.sock <orders-{0}"
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


def test_hung_nvml_is_not_restarted(machine: Machine, gpus: Simulator) -> None:
    """A driver call that never returns costs a GPU, not the agent, whose watchdog is fed on."""
    before, restarts = main_pid(machine), machine.property("NRestarts")
    gpus.fault("hang", gpu=3)
    machine.write("/etc/nvml-scenario", gpus.scenario.read_text())
    try:
        failures = "dshealthd_worker_failures_total"
        machine.wait(
            lambda: machine.scrape().value(failures, worker="device", reason="timeout"),
            "a hung worker",
        )
        machine.sh("sleep 9")  # two periods of the watchdog
        assert main_pid(machine) == before
        assert machine.property("NRestarts") == restarts
        assert len(machine.scrape().all("dshealthd_gpu_temperature_celsius", sensor="core")) == 7
    finally:
        gpus.clear_faults()
        machine.write("/etc/nvml-scenario", gpus.scenario.read_text())


def test_a_finding_outlives_a_restart(machine: Machine, gpus: Simulator) -> None:
    """The judge may write and read its file: a restarted agent knows since when a GPU is lost."""

    def lost() -> float:
        found = (item for item in machine.status()["findings"] if item["slug"] == "gpu-lost")
        return float(next(found, {"since": 0})["since"])

    gpus.fault("fail", NVML_ERROR_GPU_IS_LOST, gpu=5)
    machine.write("/etc/nvml-scenario", gpus.scenario.read_text())
    try:
        since = machine.wait(lost, "the finding")
        began = time.time()
        machine.run("systemctl", "restart", "dshealthd")
        assert machine.wait(lost, "the finding again") == pytest.approx(since, abs=0.1)
        assert since < began
        assert machine.scrape().value("dshealthd_state_write_failures_total", file="findings") == 0
        assert "begins without a past" not in machine.log(began)
    finally:
        gpus.clear_faults()
        machine.write("/etc/nvml-scenario", gpus.scenario.read_text())


def test_kernel_log(machine: Machine) -> None:
    """A line that the kernel itself writes is counted, where dmesg_restrict refuses others."""
    group = None
    for place in MEMORY_GROUPS:
        if os.path.exists(f"{place}/memory.usage_in_bytes") or "memory" in _controllers(place):
            group = Path(place) / f"dshealthd-oom-{os.getpid()}"
            break
    if group is None:
        pytest.skip("no memory cgroup here to run out of memory in")
    limit = "memory.limit_in_bytes" if "fs/cgroup/memory" in str(group) else "memory.max"
    machine.wait(
        lambda: machine.scrape().value("dshealthd_collector_up", collector="kernel_log") == 1,
        "the kernel log",
    )
    event = "dshealthd_kernel_events_total"
    before = machine.scrape().value(event, event="oom_kill") or 0
    group.mkdir()
    try:
        (group / limit).write_text(str(40 << 20))
        done = subprocess.run(["sh", "-c", HOG.format(group)], check=False, timeout=60)
        assert done.returncode == -9
        machine.wait(
            lambda: (machine.scrape().value(event, event="oom_kill") or 0) > before, "the OOM"
        )
    finally:
        group.rmdir()


def _controllers(place: str) -> str:
    with contextlib.suppress(OSError):
        return Path(place, "cgroup.subtree_control").read_text()
    return ""


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
    """The heartbeats of a user's training arrive; its hang is recorded with its Python stacks.

    The training outlives a restart of the agent, and its heartbeats come again.
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


@pytest.fixture
def wire() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable between them."""
    names = tuple(f"dshealthd-{os.getpid()}-{end}" for end in "ab")
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        first, second = names
        command = ["ip", "-n", first, "link", "add", "eth0", "type", "veth"]
        subprocess.run([*command, "peer", "name", "eth0", "netns", second], check=True)
        for number, name in enumerate(names, 1):
            for words in (
                f"address add 10.77.0.{number}/24 dev eth0",
                "link set eth0 up",
                "link set lo up",
            ):
                subprocess.run(["ip", "-n", name, *words.split()], check=True)
        yield first, second
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False)


def good_rounds(node: Machine) -> float:
    """Return how many rounds of a node went well."""
    return sum(node.scrape().all("dshealthd_probe_rounds_total", outcome="ok"))


def refused_keys(node: Machine) -> float:
    """Return how many rounds and calls failed by their key.

    A loaded machine may time out others.
    """
    scrape = node.scrape()
    refused = scrape.all("dshealthd_probe_peer_requests_refused_total", reason="key")
    return sum([*scrape.all("dshealthd_probe_rounds_total", outcome="unauthorized"), *refused])


def more(node: Machine, count: int) -> None:
    """Wait until a node has had so many more good rounds."""
    before = good_rounds(node)
    node.wait(lambda: good_rounds(node) >= before + count, f"{count} more rounds")


def test_probes_and_a_rotation_of_the_key(package: Path, wire: tuple[str, str]) -> None:
    """Two nodes probe each other; while the key is rotated no round fails by it.

    One node has each file seconds before the other, as when files are distributed.
    """
    config = """
[probe]
period = "1s"
[probe.members]
nodes = ["10.77.0.1", "10.77.0.2"]
[probe.peer]
listen_address = "10.77.0.{}:10062"
key_file = "/etc/dshealthd/probe.key"
"""
    with contextlib.ExitStack() as stack:
        nodes = [
            stack.enter_context(booted(f"probe-{number}", namespace=wire[number - 1]))
            for number in (1, 2)
        ]
        for number, node in enumerate(nodes, 1):
            install(node, package)
            node.write(CONFIG, config.format(number))
        place = "/etc/dshealthd/probe.key"
        nodes[0].run("dshealthd", "keys", "new")

        def distribute() -> None:
            text = nodes[0].sh(f"cat {place}")
            nodes[1].write(f"{place}.new", text, 0o600)
            nodes[1].sh(f"mv {place}.new {place}")

        distribute()
        for node in nodes:
            node.run("systemctl", "reload", "dshealthd")

        for node in nodes:
            more(node, 3)
        bad = [refused_keys(node) for node in nodes]
        first = nodes[0].sh("dshealthd keys show")
        for _ in range(3):
            nodes[0].run("dshealthd", "keys", "rotate")
            for node in nodes:
                more(node, 4)
            distribute()
            for node in nodes:
                more(node, 4)
        last = nodes[0].sh("dshealthd keys show")
        assert len(first.splitlines()) == len(last.splitlines()) == 1
        assert first != last
        for node in nodes:
            reload = "dshealthd_probe_peer_credentials_last_reload_successful"
            assert node.scrape().value(reload) == 1
        assert [refused_keys(node) for node in nodes] == bad
