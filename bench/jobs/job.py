"""A training of four ranks over two nodes, and what can be done to it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.jobs.servers import Node
from bench.processes import free_port

ROOT = Path(__file__).parents[2]
RANKS = 4
UNIT = 0.05
"""Seconds of a layer's forward pass; a step takes 0.6 s and what gloo costs."""
PIPELINE_UNIT = 0.02
"""The same in pipelines, of which a step has four micro-batches."""
STARTING = 19
"""Niceness of ranks that start, so that they do not disturb those that train."""


class Job:
    """A training."""

    def __init__(
        self,
        directory: Path,
        mode: str,
        nodes: Sequence[Node],
        name: str,
        *,
        site: str = "",
        unchanged: bool,
        burn: int | None = None,
        side: bool = False,
        start: dict[str, Any] | None = None,
    ) -> None:
        """Start it; the rank `burn` computes instead of sleeping, and `start` is there from its
        first step on (`training.py`). `site` is the archive that a site's switch adds to the path.
        """
        self.name = f"slurm-{name}"
        self._number = name
        self._directory = directory
        self._fault = directory / "fault"
        self._group: Path | None = None
        self._ranks: dict[int, int] = {}
        self._burn = burn
        if start is not None:
            self.strike(**start)
        script = [str(Path(__file__).with_name("training.py")), mode]
        if unchanged and not site:
            script = ["-m", "dshealthd.training", *script]
        each = RANKS // len(nodes)
        launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={each}"]
        launcher += [f"--nnodes={len(nodes)}", "--master-addr=127.0.0.1"]
        launcher += [f"--master-port={free_port()}"]
        self._out = (directory / "out").open("wb")
        self._launchers = []
        for number, node in enumerate(nodes):
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(
                    (site or str(ROOT), os.environ.get("PYTHONPATH", ""))
                ),
                "PYTHONWARNINGS": "ignore",
                "DS_ACCELERATOR": "cpu",
                "FAULT": str(self._fault),
                "LOG": str(directory / "log"),
                "UNIT": str(PIPELINE_UNIT if mode.startswith("pipeline") else UNIT),
                "BURN": "" if burn is None else str(burn),
                "SIDE": "1" if side else "",
                "SITE": "1" if site else "",
                "SLURM_JOB_ID": name,
            }
            command = ["nice", "-n", str(STARTING), *node.inside, *launcher]
            self._launchers.append(
                subprocess.Popen(
                    [*command, f"--node-rank={number}", *script],
                    env=environment,
                    cwd=directory,
                    stdin=subprocess.DEVNULL,
                    stdout=self._out,
                    stderr=subprocess.STDOUT,
                )
            )

    def runs(self) -> bool:
        """Return whether no launcher has ended."""
        return all(launcher.poll() is None for launcher in self._launchers)

    def steps(self) -> list[int]:
        """Return how many steps each rank has made; none of a rank that has made none."""
        found = []
        for rank in range(RANKS):
            with contextlib.suppress(FileNotFoundError):
                found.append((self._directory / f"log.{rank}").read_text().count("\n"))
        return found

    def started(self) -> None:
        """Give the ranks, all of which make steps, a CPU whenever they want one.

        Real-time priority where it is permitted: other work must not look like a rank's own. Not to
        a rank that computes, which would never yield and which no quota would limit.
        """
        usual = os.getpriority(os.PRIO_PROCESS, 0)
        for pid, rank in self._processes():
            if rank is not None:
                self._ranks[rank] = pid
            for thread in map(int, os.listdir(f"/proc/{pid}/task")):
                with contextlib.suppress(ProcessLookupError):
                    os.setpriority(os.PRIO_PROCESS, thread, usual)
                if rank not in {None, self._burn}:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(1))

    def starved(self) -> dict[int, float]:
        """Return for how many seconds each rank, its main thread, has waited for a CPU so far."""
        found = {}
        for rank, pid in self._ranks.items():
            with contextlib.suppress(OSError):
                found[rank] = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
        return found

    def strike(
        self,
        ranks: Sequence[int] = (),
        factor: float = 1.0,
        do: str = "",
        pause: str = "",
        seconds: float = 0.0,
        at: int = 0,
    ) -> None:
        """Have something happen from the next step on, and nothing else (`training.py`)."""
        what = {
            "ranks": list(ranks), "factor": factor, "do": do, "pause": pause, "seconds": seconds,
            "at": at,
        }  # fmt: skip
        part = self._fault.with_suffix(".new")
        part.write_text(json.dumps(what), encoding="ascii")
        part.rename(self._fault)

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank."""
        os.kill(self._ranks[rank], number)

    def limit(self, rank: int, factor: float) -> None:
        """Give a rank a control group whose quota is 1/`factor` of what it has used until now."""
        pid = self._ranks[rank]
        used, began = _used(pid), time.monotonic()
        time.sleep(5.0)
        rate = (_used(pid) - used) / (time.monotonic() - began)
        period = 50_000
        quota = int(rate / factor * period)
        unified = Path("/sys/fs/cgroup/cgroup.controllers").exists()
        parent = Path("/sys/fs/cgroup") if unified else _own_group()
        self._group = parent / f"dshealthd-bench-{pid}"
        self._group.mkdir()
        if unified:
            (self._group / "cpu.max").write_text(f"{quota} {period}")
        else:
            (self._group / "cpu.cfs_period_us").write_text(str(period))
            (self._group / "cpu.cfs_quota_us").write_text(str(quota))
        (self._group / "cgroup.procs").write_text(str(pid))

    def end(self) -> str:
        """End all its processes, and return the last lines that they printed."""
        for _ in range(3):  # a launcher may be starting another
            for pid, _rank in self._processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.2)
        for launcher in self._launchers:
            launcher.kill()
            launcher.wait()
        self._out.close()
        if self._group is not None:
            for _ in range(50):
                with contextlib.suppress(OSError):
                    self._group.rmdir()
                    break
                time.sleep(0.1)
        return (self._directory / "out").read_text(errors="replace")[-3000:]

    def _processes(self) -> Iterator[tuple[int, int | None]]:
        """Yield its processes, each with its rank if it is one."""
        mark = b"SLURM_JOB_ID=" + self._number.encode()
        for entry in os.listdir("/proc"):
            if not entry.isdecimal():
                continue
            with contextlib.suppress(OSError):
                variables = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
                if mark in variables:
                    ranks = [int(text[5:]) for text in variables if text.startswith(b"RANK=")]
                    yield int(entry), ranks[0] if ranks else None


def _own_group() -> Path:
    """Return this process's control group of the controller `cpu`, in the first version's tree."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(","):
            return Path("/sys/fs/cgroup/cpu", path.strip("/"))
    return Path("/sys/fs/cgroup/cpu")


def _used(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
