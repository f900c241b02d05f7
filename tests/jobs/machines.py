"""Small machines as directory trees.

Processes that look like those of `/proc`, made by the tests that need many or odd ones.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dshealthd.core.collector import Context, Fault
from dshealthd.core.host import Host
from dshealthd.jobs.environment import launch
from dshealthd.jobs.processes import TrainingProcess, read_stat

TORCH = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "16",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
"""What torchrun sets."""


class Clock:
    """A monotonic clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Return seconds."""
        return self.now


def started(pid: int) -> int:
    """Return the ticks at which a process of this machine has started."""
    return read_stat(Host(), pid).start


def training_process(
    pid: int, variables: Mapping[str, str] = TORCH, *, start: int = 1, **fields: Any
) -> TrainingProcess:
    """Return a process of `run-1`, if `fields` have no other, with a launcher's variables."""
    place = launch(variables)
    assert place is not None
    of_process = {"parent": 1, "job": "run-1", **fields}
    return TrainingProcess(pid, start, launch=place, environment=variables, **of_process)


def stat_line(
    pid: int,
    *,
    comm: bytes = b"python",
    state: str = "S",
    parent: int = 1,
    flags: int = 0,
    start: int = 100,
    image: int = 7,
    terminal: int = 0,
    ticks: int = 13,
    waited: int = 15,
) -> bytes:
    """Return a `/proc/<pid>/stat` of 52 fields, with so many ticks of the CPU in user mode."""
    fields: list[object] = list(range(52))
    fields[2:4], fields[6], fields[8] = (state, parent), terminal, flags
    fields[13], fields[15], fields[21], fields[49] = ticks, waited, start, image
    return b"%d (%b) %b\n" % (pid, comm, " ".join(map(str, fields[2:])).encode())


def environ(variables: Mapping[str, str]) -> bytes:
    """Return a `/proc/<pid>/environ`."""
    return b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in variables.items())


class Machine:
    """A `/proc` of files; process 1 is there from the start, and the machine is up for 10,000 s."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "sys/kernel/random").mkdir(parents=True)
        (root / "sys/kernel/random/boot_id").write_text("8c0e2f0a-1111-2222-3333-444455556666\n")
        (root / "sys/fs").mkdir()
        (root / "sys/fs/file-nr").write_text("1024\t0\t500000\n")
        (root / "uptime").write_text("10000.00 20000.00\n")
        self.clock = Clock()
        self.process(1, {"PATH": "/bin"}, comm=b"systemd", parent=0)

    def process(
        self,
        pid: int,
        variables: Mapping[str, str] | bytes = b"",
        *,
        descriptors: int = 0,
        soft: str = "1024",
        **stat: Any,
    ) -> Path:
        """Add or replace a process."""
        directory = self.root / str(pid)
        directory.mkdir(exist_ok=True)
        (directory / "stat").write_bytes(stat_line(pid, **stat))
        (directory / "environ").write_bytes(
            variables if isinstance(variables, bytes) else environ(variables)
        )
        (directory / "limits").write_text(
            "Limit                     Soft Limit           Hard Limit           Units     \n"
            f"Max open files            {soft:<20} 1048576              files     \n"
            "Max locked memory         8388608              8388608              bytes     \n"
        )
        (directory / "status").write_text(
            "Name:\tpython\nVmLck:\t      16 kB\nVmPin:\t    2048 kB\n"
        )
        (directory / "fd").mkdir(exist_ok=True)
        for number in range(descriptors):
            (directory / "fd" / str(number)).touch()
        return directory

    def process_quickly(self, pid: int) -> None:
        """Add a process that does not train, with the two files that the table reads.

        For crowds.
        """
        directory = f"{self.root}/{pid}"
        os.mkdir(directory)
        for name, data in (("stat", stat_line(pid)), ("environ", b"PATH=/bin\0")):
            descriptor = os.open(f"{directory}/{name}", os.O_WRONLY | os.O_CREAT)
            os.write(descriptor, data)
            os.close(descriptor)

    def end(self, pid: int) -> None:
        """Remove a process."""
        shutil.rmtree(self.root / str(pid))

    def context(self, entering: Callable[[str], Fault | None] | None = None) -> Context:
        """Return a context on this machine."""
        host = Host(procfs=self.root, sysfs=self.root / "no-sys", rootfs=self.root / "no-root")
        context = Context(host=host, monotonic=self.clock, wall=self.clock)
        if entering is not None:
            context.entering = entering
        return context
