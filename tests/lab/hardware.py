"""Faults of a node's hardware and files, each a context manager.

In force inside it, undone when it is left.

What stands for the hardware is laid out by `equip`, before the node's agent starts: a kernel log,
two InfiniBand adapters without errors, a small file system at DATA that can be filled, and one at
CHECKPOINTS that can be frozen. GPUs are those of the simulated NVML.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.kernel_log import KernelLog
from tests.lab.node import Node
from tests.lab.station import NotPermitted
from tests.netns import leave_time_wait, listener
from tests.nvml.simulator import Value

DATA, CHECKPOINTS = "/mnt", "/media"
"""Directories that every Debian has and nobody uses; mounted over on the node alone."""
DATA_BYTES = 16 << 20
RENDEZVOUS_PORTS = range(29500, 29601)
JOB = {
    "SLURM_JOB_ID": "4711",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29400",
}
"""What makes a process one of a training job: that of JOB_NAME."""
JOB_NAME = "slurm-4711"
ADAPTERS = ("mlx5_0", "mlx5_1")
PORT = "ports/1"
THAW_SECONDS = 240
"""After which a frozen file system is thawed whatever happened to the lab.

Longer than any test waits for the page of a fault.
"""
_INFINIBAND = Path(__file__).parents[1] / "collectors" / "fixtures" / "infiniband" / "sys"
_HOLD_FILES = (
    "import sys; held = [open('/dev/null') for _ in range(int(sys.argv[1]))]; "
    "print(flush=True); sys.stdin.read()"
)


def equip(node: Node) -> KernelLog:
    """Lay out what the faults need, and return the node's kernel log.

    Its agent takes `node.directory / "dev"` for /dev.

    NotPermitted where file systems cannot be mounted.
    """
    for adapter in ADAPTERS:
        link = _INFINIBAND / "class" / "infiniband" / adapter
        device = os.path.normpath(os.path.join(link.parent, os.readlink(link)))
        target = node.sysfs / os.path.relpath(device, _INFINIBAND)
        shutil.copytree(device, target, symlinks=True)
        place = node.sysfs / "class" / "infiniband" / adapter
        place.parent.mkdir(exist_ok=True)
        place.symlink_to(os.path.relpath(target, place.parent))
        for counter in target.glob(f"{PORT}/*counters/*"):
            if not counter.name.endswith(("_data", "_packets", "lifespan")):
                counter.write_text("0\n", encoding="ascii")
    node.gpus.set(None, "remapped_correctable", 0)  # a new GPU's, as the ports are a new adapter's
    image = node.directory / "checkpoints"
    with image.open("wb") as file:
        file.truncate(16 << 20)
    node.station.tool("mkfs.ext4", "-q", str(image))
    try:
        node.station.tool("mount", "-t", "tmpfs", "-o", f"size={DATA_BYTES}", "lab", DATA)
        node.station.tool("mount", "-o", "loop", str(image), CHECKPOINTS)
    except RuntimeError as error:
        raise NotPermitted(str(error)) from error
    return KernelLog(node.directory / "dev" / "kmsg")


@contextlib.contextmanager
def _said_by_nvml(
    node: Node, what: str, gpu: int | None, values: dict[str, Value]
) -> Iterator[None]:
    """Have NVML say other things of one GPU, or of all."""
    with node.lab.injected(f"{what} on {node.name}" + (f" GPU {gpu}" if gpu is not None else "")):
        for key, value in values.items():
            node.gpus.set(gpu, key, value)
        try:
            yield
        finally:
            for key in values:
                node.gpus.unset(gpu, key)


def gpu_lost(node: Node, gpu: int) -> contextlib.AbstractContextManager[None]:
    """Every call for the GPU says that it is lost."""
    return _said_by_nvml(node, "GPU lost", gpu, {"fail": 15})


def nvml_hangs(node: Node) -> contextlib.AbstractContextManager[None]:
    """No call to NVML returns."""
    return _said_by_nvml(node, "NVML hangs", None, {"hang": 1})


def gpu_missing(node: Node, gpu: int) -> contextlib.AbstractContextManager[None]:
    """NVML does not list a GPU that is on the PCI bus."""
    rest = [str(other) for other in range(int(node.gpus.value(None, "gpus"))) if other != gpu]
    return _said_by_nvml(node, f"GPU {gpu} missing", None, {"order": ",".join(rest)})


def ecc_uncorrectable(node: Node, gpu: int) -> contextlib.AbstractContextManager[None]:
    """A double-bit error in the GPU's memory."""
    counts: dict[str, Value] = {
        f"ecc_{kind}_uncorrected_dram": 1 for kind in ("volatile", "aggregate")
    }
    return _said_by_nvml(node, "uncorrectable ECC error", gpu, counts)


def row_remap_failure(node: Node, gpu: int) -> contextlib.AbstractContextManager[None]:
    """A row of the GPU's memory that could not be replaced."""
    return _said_by_nvml(node, "row remap failure", gpu, {"remapped_failure": 1})


def thermal_slowdown(node: Node, gpu: int) -> contextlib.AbstractContextManager[None]:
    """A GPU at its slowdown point, whose hardware holds the clocks down."""
    hot: dict[str, Value] = {"temperature": 90, "margin_temperature": -3, "clock_sm": 600}
    hot |= {"throttle_reasons": "0x48", "violation_hw_thermal": "0~1000000000"}
    return _said_by_nvml(node, "thermal slowdown", gpu, hot)


def nvlink_down(node: Node, gpu: int, link: int) -> contextlib.AbstractContextManager[None]:
    """An NVLink of the GPU that is not active."""
    return _said_by_nvml(node, f"NVLink {link} down", gpu, {f"nvlink{link}_state": 0})


@contextlib.contextmanager
def xid(node: Node, log: KernelLog, gpu: int, code: int, text: str) -> Iterator[None]:
    """The driver reports an Xid, once. Then the GPU is reset, which restarts its energy counter."""
    bus = node.gpus.value(gpu, "pci")[4:-2].lower()
    with node.lab.injected(f"Xid {code} on {node.name} GPU {gpu}"):
        log.say(f"NVRM: Xid (PCI:{bus}): {code}, {text}")
        try:
            yield
        finally:
            node.gpus.set(gpu, "energy", int(node.gpus.value(gpu, "energy")) // 2)


@contextlib.contextmanager
def infiniband_down(node: Node, adapter: str) -> Iterator[None]:
    """An InfiniBand port whose cable is out."""
    port = node.sysfs / "class" / "infiniband" / adapter / PORT
    before = {name: (port / name).read_text(encoding="ascii") for name in ("state", "phys_state")}
    with node.lab.injected(f"InfiniBand {adapter} down on {node.name}"):
        for name, text in {"state": "1: DOWN\n", "phys_state": "2: Polling\n"}.items():
            (port / name).write_text(text, encoding="ascii")
        try:
            yield
        finally:
            for name, text in before.items():
                (port / name).write_text(text, encoding="ascii")


@contextlib.contextmanager
def time_wait_flood(node: Node) -> Iterator[None]:
    """Connections to all rendezvous ports that are closed again and again, as by a launch that
    fails and restarts.

    The last ones go by themselves, a minute later.
    """

    def flood() -> None:
        for port in RENDEZVOUS_PORTS:
            with listener("127.0.0.1", port) as master:
                leave_time_wait(master, 3, server=True, counted=False)

    over = threading.Event()

    def restart() -> None:
        while not over.wait(20):
            node.station.inside(flood)

    with (
        node.lab.injected(f"{3 * len(RENDEZVOUS_PORTS)} sockets in TIME_WAIT on {node.name}"),
        ThreadPoolExecutor(1) as again,
    ):
        node.station.inside(flood)
        restarts = again.submit(restart)
        try:
            yield
        finally:
            over.set()
            restarts.result()


@contextlib.contextmanager
def training(node: Node, number: int) -> Iterator[None]:
    """A training job of one rank on all GPUs of the node, which does nothing: faults there are
    pages.
    """
    job = {**JOB, "SLURM_JOB_ID": str(4800 + number)}
    process = node.station.popen(["sleep", "infinity"], env=job)
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
    inside = re.findall(r"^NSpid:.*\t(\d+)$", status, re.MULTILINE)
    node.gpus.set(None, "processes", f"{inside[0]}:4096")
    try:
        yield
    finally:
        node.gpus.unset(None, "processes")
        process.kill()
        process.wait(timeout=60)


@contextlib.contextmanager
def open_files(node: Node, number: int, limit: int) -> Iterator[None]:
    """A process of a training job with so many open files of as many as its limit allows."""
    script = f'ulimit -n {limit}; exec "$0" -I -S -c "$1" "$2"'
    command = ["sh", "-c", script, sys.executable, _HOLD_FILES, str(number - 3)]
    with node.lab.injected(f"{number} of {limit} open files on {node.name}"):
        process = node.station.popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=JOB
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n"
            yield
        finally:
            process.communicate(timeout=60)


@contextlib.contextmanager
def disk_full(node: Node, ratio: float) -> Iterator[None]:
    """Fill DATA to this share."""

    def fill() -> None:
        with open(f"{DATA}/filling", "wb") as file:
            file.write(bytes(int(ratio * DATA_BYTES)))

    with node.lab.injected(f"{DATA} of {node.name} at {ratio:.0%}"):
        try:
            node.station.inside(fill)
            yield
        finally:
            node.station.inside(lambda: os.unlink(f"{DATA}/filling"))


@contextlib.contextmanager
def path_hangs(node: Node) -> Iterator[None]:
    """Freeze CHECKPOINTS: who writes there sleeps in the kernel and cannot be killed."""
    enter = ["nsenter", f"--mount=/proc/{node.station.pid}/ns/mnt"]
    with node.lab.injected(f"{CHECKPOINTS} of {node.name} hangs"):
        # Not of the node's processes, so that it survives them: nothing but a thaw ends what sleeps
        # there, and with it the node.
        guard = subprocess.Popen(
            [*enter, "sh", "-c", f"sleep {THAW_SECONDS}; fsfreeze --unfreeze {CHECKPOINTS}"],
            start_new_session=True,
            stderr=subprocess.DEVNULL,
        )
        try:
            node.station.tool("fsfreeze", "--freeze", CHECKPOINTS)
            try:
                yield
            finally:
                if guard.poll() is None:  # otherwise it has thawed it
                    node.station.tool("fsfreeze", "--unfreeze", CHECKPOINTS)
        finally:
            if guard.poll() is None:
                os.killpg(guard.pid, 9)
                guard.wait()
