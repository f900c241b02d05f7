"""Starts `training.py`, under torchrun or alone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

from bench.processes import free_port
from tests.nccl.job import LOOPBACK
from tests.nccl.pytorch.wheel import Wheel
from tests.waiting import until

SCRIPT = Path(__file__).with_name("training.py")
PUBLIC_PYTHON = "/usr/bin/python3"
"""An interpreter within every user's reach, which that of the tests need not be."""
PATIENCE = 600.0
"""Seconds in which anything that is to happen does, beside other work."""


class Training:
    """One training of some ranks on this machine, each line of which goes to a file."""

    def __init__(
        self,
        wheel: Wheel,
        folder: Path,
        *,
        fault: str,
        culprit: int = 0,
        timeout: float = 10,
        size: int = 4,
        torchrun: bool = False,
        environment: Mapping[str, str] | None = None,
        user: int | None = None,
    ) -> None:
        """Start it, as another user if one is given; `timeout` is that of collectives, in
        seconds.
        """
        self.folder, self.size, self.user = folder, size, user
        script = [str(SCRIPT), "--folder", str(folder), "--fault", fault]
        script += ["--culprit", str(culprit), "--timeout", str(timeout)]
        address, port = "127.0.0.1", free_port()
        shared = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            **wheel.environment(),
            # What the wheel needs of other packages, for an interpreter that is not theirs.
            "PYTHONPATH": f"{wheel.folder}:{sysconfig.get_path('purelib')}",
            **LOOPBACK,
            "NCCL_RAS_ENABLE": "0",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            # How long torch waits for a dump before it ends a process, in milliseconds.
            "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "2000",
            # And how long its monitor waits, in seconds, for a watchdog that is about to end one.
            "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "30",
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "SLURM_JOB_ID": str(os.getpid()),
            **(environment or {}),
        }
        self.name = f"slurm-{shared['SLURM_JOB_ID']}"
        self.processes: list[subprocess.Popen[bytes]] = []
        if torchrun:
            command = ["-m", "torch.distributed.run", f"--nproc-per-node={size}"]
            command += [f"--master-addr={address}", f"--master-port={port}", *script]
            self._start("torchrun", command, shared)
            return
        for rank in range(size):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
            self._start(f"rank{rank}", script, {**shared, **own})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def logs(self) -> list[Path]:
        """Return what the processes print to."""
        return sorted(self.folder.glob("*.log"))

    def text(self) -> str:
        """Return all that was printed."""
        return "".join(log.read_text(errors="replace") for log in self.logs)

    def pids(self) -> list[int]:
        """Return the processes of the ranks, which have trained for some steps by then."""
        files = [self.folder / f"pid-{rank}" for rank in range(self.size)]
        self.wait(lambda: all(file.is_file() and file.stat().st_size for file in files))
        return [int(file.read_text()) for file in files]

    def wait(self, condition: Callable[[], object]) -> None:
        """Wait for something to be so; AssertionError where it does not come to be."""
        until(condition, lambda: self.text()[-20_000:], PATIENCE)

    def wait_for_end(self, *left: int) -> None:
        """Wait for all processes to end but those of some ranks, which cannot."""
        others = [process for number, process in enumerate(self.processes) if number not in left]
        self.wait(lambda: all(process.poll() is not None for process in others))

    def close(self) -> None:
        """End all that is left."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)
        for file in self.folder.glob("pid-*"):
            # torchrun gives each rank a session of its own; a number is reused late, if at all
            pid = int(file.read_text() or 0)
            with contextlib.suppress(OSError):
                if str(SCRIPT).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)

    def _start(self, name: str, arguments: list[str], environment: Mapping[str, str]) -> None:
        python = sys.executable if self.user is None else PUBLIC_PYTHON
        other = self.user is not None
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes.append(
                subprocess.Popen(
                    [python, *arguments],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    user=self.user,
                    group=self.user,
                    extra_groups=[] if other else None,
                )
            )
