"""Limits, settings, memory, logs and stuck processes of the host: faults found, and mended."""

from __future__ import annotations

import dataclasses
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from dshealthd.collectors.filesystem import FilesystemOptions
from dshealthd.core.host import Host
from dshealthd.core.options import Bytes
from dshealthd.doctor import path_check as path_checks
from dshealthd.doctor.check import Result
from dshealthd.doctor.node import kernel_log, limits
from dshealthd.doctor.node.limits import LAUNCHERS
from dshealthd.doctor.node_context import NodeContext
from dshealthd.doctor.options import DoctorOptions
from dshealthd.doctor.path_check import path_check
from dshealthd.findings.options import FindingsOptions
from dshealthd.linux import forked
from dshealthd.linux.credentials import capabilities, set_capabilities
from dshealthd.linux.kmsg import KernelLogReader, KernelLogRecord
from tests import frozen
from tests.doctor.looks import look, named, outcomes, results
from tests.doctor.machine import FIXTURES, Machine

NOW = 90_000.0
"""Seconds on the kernel's clock."""


def with_hardware(machine: Machine) -> NodeContext:
    """Return a look at GPUs on the bus and InfiniBand ports."""
    machine.add_infiniband("irdma0", "mlx5_2", "mlx5_3")
    return look("gpu_bus", "infiniband", host=Host(sysfs=machine.sys, dev=machine.dev))


def test_limits_of_open_files_and_locked_memory(
    make_machine: Callable[..., Machine],
) -> None:
    """Low limits are found on a node with GPUs and InfiniBand; raised, they pass. The second also
    holds for root, without the capability that containers do not have.
    """
    context = with_hardware(make_machine())
    held, permitted, inheritable = capabilities()
    set_capabilities(held & ~(1 << limits.CAP_IPC_LOCK), permitted, inheritable)
    before = {
        which: resource.getrlimit(which)
        for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK)
    }
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[resource.RLIMIT_NOFILE][1]))
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 << 20, before[resource.RLIMIT_MEMLOCK][1]))
        low = {one.component: one for one in results(limits.PROCESS_LIMITS, context)}
    finally:
        for which, old in before.items():
            resource.setrlimit(which, old)
        set_capabilities(held, permitted, inheritable)
    assert {one.outcome.value for one in low.values()} == {"warning"}
    assert low["nofile of this shell"].remedy == "ulimit -n $(ulimit -Hn)"
    assert low["nofile of this shell"].value == "1024"
    assert "memlock" in low["memlock of this shell"].remedy
    lifted = dataclasses.replace(
        context.config.section(DoctorOptions), open_files=16, locked_memory_bytes=Bytes(0)
    )
    config = context.config.with_section(lifted)
    assert outcomes(limits.PROCESS_LIMITS, dataclasses.replace(context, config=config)) == ["ok"]


def test_limits_of_slurmd(
    make_machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Jobs inherit the limits of slurmd, which are judged whatever those of root's shell are."""
    machine = make_machine()
    machine.add_infiniband("irdma0", "mlx5_2", "mlx5_3")
    monkeypatch.setattr(limits, "LAUNCHERS", LAUNCHERS)
    limited = ["bash", "-c", "ulimit -S -l 64 -n 1024; cat /proc/self/limits"]
    shown = subprocess.run(limited, check=True, capture_output=True, timeout=60).stdout
    for pid, name in ((4711, "slurmd"), (4712, "slurmdbd")):
        (tmp_path / f"proc/{pid}").mkdir(parents=True)
        (tmp_path / f"proc/{pid}/comm").write_text(f"{name}\n", encoding="ascii")
        (tmp_path / f"proc/{pid}/limits").write_bytes(shown)
    host = Host(sysfs=machine.sys, dev=machine.dev, procfs=tmp_path / "proc")
    found = {
        one.component: one
        for one in results(limits.PROCESS_LIMITS, look("gpu_bus", "infiniband", host=host))
        if not one.component.endswith(" of this shell")
    }
    assert {name: one.value for name, one in found.items()} == {
        "memlock of slurmd": "64KiB",
        "nofile of slurmd": "1024",
    }
    assert all(one.remedy.startswith("systemctl edit slurmd") for one in found.values())


def look_at_memory(
    directory: Path, *, requests: int = 0, waits: float = 0.0, **lines: int
) -> NodeContext:
    """Return a look at a host with other lines of meminfo, asynchronous requests in use, and a
    share of the time in which some tasks wait for memory.
    """
    proc = directory / "proc"
    for name in ("kernel", "memory", "pressure"):
        shutil.copytree(FIXTURES / name / "proc", proc, dirs_exist_ok=True)
    some = f"some avg10={100 * waits:.2f} avg60=0.00 avg300=0.00 total=0\n"
    none = "full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
    (proc / "pressure/memory").write_text(some + none)
    text = (proc / "meminfo").read_text()
    for name, value in lines.items():
        text = re.sub(rf"(?m)^({name}:\s+)\d+", rf"\g<1>{value}", text)
    (proc / "meminfo").write_text(text)
    (proc / "sys/fs/aio-nr").write_text(f"{requests}\n")
    return look("memory", "pressure", "kernel", host=Host(procfs=proc))


def test_memory_that_runs_out(tmp_path: Path) -> None:
    """Little memory that tasks wait for is found; more of it passes."""
    context = look_at_memory(tmp_path, waits=0.9, MemAvailable=100_000)
    assert {one.limit for one in results(named("host-memory"), context)} == {"0.05"}
    assert outcomes(named("host-memory"), look_at_memory(tmp_path)) == ["ok"]


def test_asynchronous_requests_that_run_out(tmp_path: Path) -> None:
    """Requests near their limit are found, and not far below it."""
    for requests, remedies in ((1_040_000, 1), (1000, 0)):
        found = results(named("open-files"), look_at_memory(tmp_path, requests=requests))
        found = [one for one in found if one.limit]
        assert ["fs.aio-max-nr" in one.remedy for one in found] == remedies * [True]


def judged_log(
    dev: Path, lines: Iterable[tuple[int, float, str]], document: Mapping[str, str] | None = None
) -> dict[str, Result]:
    """Return what is found in a log of lines with a priority and how many seconds ago they were."""
    dev.mkdir()
    read, write = os.pipe2(os.O_DIRECT | os.O_NONBLOCK)  # a read is a record, as of /dev/kmsg
    try:
        for number, (priority, ago, text) in enumerate(lines):
            at = int((NOW - ago) * 1e6)
            os.write(write, f"{priority},{number},{at},-;{text}\n".encode())
        (dev / "kmsg").symlink_to(f"/proc/self/fd/{read}")
        context = dataclasses.replace(look(host=Host(dev=dev)), document=document or {})
        return {one.component: one for one in kernel_log.last_hour(context)}
    finally:
        os.close(write)
        os.close(read)


def test_kernel_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an agent would have found in the last hour is found, in its words and by its limits."""
    monkeypatch.setattr(kernel_log, "kernel_clock", lambda: NOW)
    slow = "INFO: task python3:4711 blocked for more than 120 seconds."
    lines = (
        (4, 3601.0, "nvme nvme1: I/O 1 QID 2 timeout, aborting"),
        (4, 3599.0, "nvme nvme0: I/O 1 QID 2 timeout, aborting"),
        (12, 1.0, "nvme nvme2: I/O 1 QID 2 timeout, aborting"),
        (3, 2.0, slow),
        (3, 1.0, slow),
    )
    found = judged_log(tmp_path / "now", lines)
    assert found.keys() == {"nvme0"}, "two tasks may be those of a checkpoint"
    assert found["nvme0"].outcome.value == "warning"
    assert "journalctl" in found["nvme0"].remedy
    assert found["nvme0"].slug == "checkpoint-path", "not that of the check, host-errors"
    assert judged_log(tmp_path / "three", [*lines, (3, 0.5, slow)]).keys() == {
        "nvme0",
        "the kernel",
    }
    assert judged_log(tmp_path / "agent", lines, {"source": "agent"}) == {}, "which watches the log"


def test_a_kernel_log_that_is_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 MiB is read what takes three seconds, of the five that the check has."""
    asked = []

    def read(_reader: KernelLogReader, *limits: float) -> Iterator[KernelLogRecord]:
        asked.append(limits)
        return iter(())

    monkeypatch.setattr(KernelLogReader, "read", read)
    (tmp_path / "kmsg").touch()
    (found,) = kernel_log.last_hour(look(host=Host(dev=tmp_path)))
    assert found.text == "the log was not read to its end within 3 s"
    assert asked == [(200_000, 3.0)]


def test_paths_of_the_command_line(mount: frozen.Mount) -> None:
    """A directory that hangs, is read-only or absent is found; thawed, it is left clean."""
    context = look()
    path = str(mount.directory)
    assert path_check(path).deadline == FilesystemOptions().deadline, "as for configured paths"
    hung = dataclasses.replace(path_check(path), deadline=1.0)
    mount.freeze()
    try:
        ended = forked.run(path, lambda _emit: list(map(str, hung.run(context))), hung.deadline)
    finally:
        mount.thaw()
    assert ended.hung
    os.waitpid(ended.left, 0)
    for left in mount.directory.glob(".dshealthd-*"):
        left.unlink()  # of the process that was killed in its write
    assert outcomes(path_check(path), context) == ["ok"]
    assert [one.name for one in mount.directory.iterdir()] == ["lost+found"]
    subprocess.run(["mount", "-o", "remount,ro", path], check=True, timeout=60)
    (read_only,) = results(path_check(path), context)
    assert read_only.outcome.value == "critical"
    assert "Read-only file system" in read_only.text
    subprocess.run(["mount", "-o", "remount,rw", path], check=True, timeout=60)
    assert outcomes(path_check(path), context) == ["ok"]
    (absent,) = results(path_check(f"{path}/absent"), context)
    assert absent.outcome.value == "critical"


def test_path_of_several_words() -> None:
    """A path stays one word of each command of its remedy."""
    (absent,) = results(path_check("/absent; it"), look())
    assert absent.remedy == (
        "df -h '/absent; it'; mount | grep -F '/absent; it'; ls -ld '/absent; it'"
    )


@pytest.mark.parametrize(
    ("gigabytes", "left", "seconds", "outcome"),
    [
        (1000, 0.5, 0.1, "ok"),
        (1000, 0.02, 0.1, "critical"),
        (1000, 0.08, 0.1, "warning"),
        (10_000_000, 0.02, 0.1, "ok"),  # room for thousands of checkpoints
        (1000, 0.5, 1.1, "warning"),
    ],
)
def test_path_that_is_full_or_slow(
    gigabytes: int, left: float, seconds: float, outcome: str
) -> None:
    """A path is full or slow as for the finding: by its share, unless what is left holds a
    checkpoint.
    """
    blocks = gigabytes * 10**9 // 4096
    free = int(blocks * left)
    status = os.statvfs_result((4096, 4096, blocks, free, free, 100, 100, 100, 0, 255))
    limits = look().config.section(FindingsOptions).limits
    (found,) = path_checks._judge("/checkpoints", status, seconds, limits)
    assert found.outcome.value == outcome, found.text
