"""Slow ranks in real trainings, and whether the shipped rules name them: `python -m bench.jobs`.

    python -m bench.jobs [--modes zero3,fsdp2,…] [--faults middle-1.3,…] [--times 1]

Four ranks over gloo train small models on this machine; an agent receives their heartbeats, and a
Prometheus with the shipped rules scrapes it. In each cell rank 2 becomes slow (`middle`) or is slow
from its first step (`start`), by a factor, asleep or, as `quota`, by a CPU quota of its own. A cell
is right if DshealthdRankSlow names rank 2 and nobody else. Under `healthy` nobody may be named.
Modes whose packages are not installed are left out, and said.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http
import http.client
import importlib.util
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from bench.processes import agent, free_port, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/prometheus"
RANKS, SLOW = 4, 2
UNIT = 0.02
"""Seconds of a layer's forward pass; a step takes a third of a second and what gloo costs."""
SETTLE = 30.0
"""Seconds after which a training is taken as usual, before a rank becomes slow in its middle."""
AWAKE = 240.0
"""Most seconds until all ranks make steps."""
HEALTHY = 180.0
ALERT = "DshealthdRankSlow"
MODES = {
    "ddp": (),
    "zero1": ("deepspeed",),
    "zero2": ("deepspeed",),
    "zero3": ("deepspeed",),
    "zero3-no-prefetch": ("deepspeed",),
    "fsdp2": (),
    "pipeline-2x2": ("deepspeed",),
    "pipeline-4x1": ("deepspeed",),
    "trainer": ("transformers", "accelerate"),
    "trainer-zero2": ("transformers", "accelerate", "deepspeed"),
    "trainer-zero3": ("transformers", "accelerate", "deepspeed"),
    "accelerate": ("accelerate",),
    "lightning": ("lightning",),
}
"""Each mode, and the packages that it takes besides torch."""
UNCHANGED = frozenset(("trainer", "trainer-zero2", "trainer-zero3", "accelerate", "lightning"))
"""Modes without a line of ours: they run with DSHEALTHD_HEARTBEAT=1."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens to a rank."""

    name: str
    factor: float = 1.0
    from_start: bool = False
    quota: bool = False
    limit: float = HEALTHY
    """Seconds within which the rank must be named; for a healthy job, those of the observation."""


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("middle-1.3", 1.3, limit=90.0),
        Fault("middle-2", 2.0, limit=60.0),
        Fault("start-1.3", 1.3, from_start=True, limit=400.0),
        Fault("start-2", 2.0, from_start=True, limit=400.0),
        Fault("quota-middle-2", 2.0, quota=True, limit=60.0),
        Fault("healthy"),
    )
}


class Prometheus:
    """A Prometheus with the shipped rules that scrapes one agent."""

    def __init__(self, port: int) -> None:
        self._port = port

    def query(self, text: str) -> list[dict[str, Any]]:
        """Return the samples of an instant query; none while it does not answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.request("GET", f"/api/v1/query?{urllib.parse.urlencode({'query': text})}")
            response = connection.getresponse()
            body = response.read()
            if response.status == http.HTTPStatus.OK:  # else it is still starting
                found: list[dict[str, Any]] = json.loads(body)["data"]["result"]
                return found
        return []

    def named(self, job: str) -> set[int]:
        """Return the ranks of a job that the alert names."""
        text = f'ALERTS{{alertname="{ALERT}", alertstate="firing", training_job="{job}"}}'
        return {int(sample["metric"]["rank"]) for sample in self.query(text)}

    def ratio(self, job: str, rank: int) -> float | None:
        """Return the ratio of a rank's own work to that of its peers."""
        samples = self.query(f'dshealthd:job:work_ratio{{training_job="{job}", rank="{rank}"}}')
        return float(samples[0]["value"][1]) if samples else None

    def working(self) -> set[str]:
        """Return the jobs of which all ranks tell of their own work."""
        samples = self.query("count by (training_job) (dshealthd_job_step_work_seconds)")
        return {
            sample["metric"]["training_job"]
            for sample in samples
            if float(sample["value"][1]) >= RANKS
        }


@contextlib.contextmanager
def prometheus(directory: Path, target: int) -> Iterator[Prometheus]:
    """Run Prometheus on the shipped rules, with one agent as its target."""
    config = {
        "rule_files": [
            str(RULES / f"{name}.yml") for name in ("thresholds", "recording", "alerts")
        ],
        "scrape_configs": [
            {
                "job_name": "dshealthd",
                "scrape_interval": "5s",
                "static_configs": [
                    {
                        "targets": [f"127.0.0.1:{target}"],
                        "labels": {"node": "node-1", "exporter": "dshealthd"},
                    }
                ],
            }
        ],
    }
    file = directory / "prometheus.yml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    port = free_port()
    command = ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={directory / 'tsdb'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield Prometheus(port)
        finally:
            process.terminate()


class Job:
    """A training of four ranks."""

    def __init__(self, directory: Path, mode: str, fault: Fault, socket: Path, name: str) -> None:
        self._directory = directory
        self._fault = directory / "fault"
        self._group: Path | None = None
        if fault.from_start and not fault.quota:
            self.strike(fault)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "ignore",
            "DS_ACCELERATOR": "cpu",
            "FAULT": str(self._fault),
            "LOG": str(directory / "log"),
            "UNIT": str(UNIT),
            "BURN": "1" if fault.quota else "",
            "SLURM_JOB_ID": name,
            "DSHEALTHD_HEARTBEAT_SOCKET": str(socket),
        }
        script = [str(Path(__file__).with_name("training.py")), mode]
        if mode in UNCHANGED:
            script = ["-m", "dshealthd.training", *script]
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}"]
        command += [f"--master-port={free_port()}", *script]
        self._out = (directory / "out").open("wb")
        self.process = subprocess.Popen(
            command, env=environment, cwd=directory, stdout=self._out, stderr=subprocess.STDOUT
        )

    def steps(self) -> list[int]:
        """Return how many steps each rank has made."""
        found = []
        for rank in range(RANKS):
            with contextlib.suppress(FileNotFoundError):
                found.append((self._directory / f"log.{rank}").read_text().count("\n"))
        return found

    def strike(self, fault: Fault) -> None:
        """Make the rank slow."""
        if fault.quota:
            self._limit(1.0 / fault.factor)
        else:
            part = self._fault.with_suffix(".new")
            part.write_text(f"{SLOW} {fault.factor}", encoding="ascii")
            part.rename(self._fault)

    def _limit(self, share: float) -> None:
        """Give the rank a control group whose quota is a share of what it has used until now."""
        pid = self._ranks()[SLOW]
        used, began = _used(pid), time.monotonic()
        time.sleep(5.0)
        rate = (_used(pid) - used) / (time.monotonic() - began)
        period = 50_000
        quota = int(rate * share * period)
        unified = Path("/sys/fs/cgroup/cgroup.controllers").exists()
        self._group = Path("/sys/fs/cgroup", "" if unified else "cpu", f"dshealthd-bench-{pid}")
        self._group.mkdir()
        if unified:
            (self._group / "cpu.max").write_text(f"{quota} {period}")
        else:
            (self._group / "cpu.cfs_period_us").write_text(str(period))
            (self._group / "cpu.cfs_quota_us").write_text(str(quota))
        (self._group / "cgroup.procs").write_text(str(pid))

    def _ranks(self) -> dict[int, int]:
        """Return the process of each rank."""
        listing = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        found = {}
        for child in listing.split():
            for entry in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                if entry.startswith(b"RANK="):
                    found[int(entry[5:])] = int(child)
        return found

    def end(self) -> str:
        """End all ranks, and return the last lines that they printed."""
        with contextlib.suppress(OSError):
            for pid in self._ranks().values():
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self._out.close()
        if self._group is not None:
            for _ in range(50):
                with contextlib.suppress(OSError):
                    self._group.rmdir()
                    break
                time.sleep(0.1)
        return (self._directory / "out").read_text(errors="replace")[-2000:]


def _used(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cell(
    server: Prometheus, directory: Path, mode: str, fault: Fault, socket: Path, number: int
) -> tuple[object, ...]:
    """Run one training, and return its row of the table."""
    name = f"{number}{os.getpid()}"
    job, place = f"slurm-{name}", directory / name
    place.mkdir()
    running = Job(place, mode, fault, socket, name)
    innocent: set[int] = set()
    seconds = ratio = None
    try:
        end = time.monotonic() + AWAKE
        while job not in server.working():
            if time.monotonic() > end or running.process.poll() is not None:
                print(running.end(), file=sys.stderr)
                return (mode, fault.name, "did not start", "-", "-", "-")
            time.sleep(1.0)
        began = time.monotonic()
        while not fault.from_start and time.monotonic() < began + SETTLE:
            innocent |= server.named(job)
            time.sleep(1.0)
        if fault.factor > 1.0 and not fault.from_start:
            running.strike(fault)
        began = time.monotonic()
        # Half as long again, so that a rank that is named late is told from one that never is.
        while time.monotonic() < began + fault.limit * (1.5 if fault.factor > 1.0 else 1.0):
            named = server.named(job)
            innocent |= named - {SLOW} if fault.factor > 1.0 else named
            if SLOW in named and fault.factor > 1.0:
                seconds, ratio = time.monotonic() - began, server.ratio(job, SLOW)
                break
            time.sleep(1.0)
    finally:
        running.end()
    verdict = "never" if seconds is None else "yes" if seconds <= fault.limit else "late"
    told = "-" if seconds is None else f"{seconds:.0f}"
    return (
        mode,
        fault.name,
        verdict if fault.factor > 1.0 else "-",
        told,
        "-" if ratio is None else f"{ratio:.2f}",
        ", ".join(f"rank {rank}" for rank in sorted(innocent)) or "none",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the cells, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--times", type=int, default=1, help="how often each cell runs")
    options = parser.parse_args(arguments)
    rows: list[tuple[object, ...]] = []
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        socket = directory / "heartbeat.sock"
        config = f'[collectors.training]\nsocket = "{socket}"\n'
        with (
            agent(config) as receiver,
            prometheus(directory, receiver.connection.port) as server,
        ):
            cells = itertools.product(
                options.modes.split(","), options.faults.split(","), range(options.times)
            )
            for number, (mode, fault, _) in enumerate(cells):
                missing = [name for name in MODES[mode] if importlib.util.find_spec(name) is None]
                if missing:
                    row: tuple[object, ...] = (mode, fault, f"no {missing[0]}", "-", "-", "-")
                else:
                    row = cell(server, directory, mode, FAULTS[fault], socket, number)
                rows.append(row)
                print(*row, sep="  ", file=sys.stderr, flush=True)
    head = ("mode", "rank 2", "named in time", "seconds", "factor", "innocent ranks named")
    print(table(head, rows))
    took = [float(str(row[3])) for row in rows if row[3] != "-"]
    if took:
        print(
            f"Named after {statistics.median(took):.0f} s in the median, {max(took):.0f} s at most."
        )


if __name__ == "__main__":
    main()
