"""A real Slurm cluster (Debian's slurmctld, slurmd and munge) on the machines of a lab.

`slurmctld` runs on the lab's services machine, one `slurmd` on every node. Slurm's own state, logs
and sockets are in the lab's directory; nothing of this machine's Slurm is used.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

import pytest

from tests.lab.lab import Lab
from tests.lab.node import Node
from tests.lab.station import Station
from tests.waiting import until

TOOLS = ("slurmctld", "slurmd", "munged", "scontrol", "sinfo", "sbatch")
CHECK_SECONDS = 10
"""`HealthCheckInterval` of the cluster, in seconds."""
START_SECONDS = 300.0
_CONF = """
ClusterName=lab
SlurmctldHost={controller}({controller_address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={munge}
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
StateSaveLocation={directory}/state
SlurmdSpoolDir={spool}/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
SlurmctldDebug=info
SlurmdDebug=verbose
SlurmctldPort=6817
SlurmdPort=6818
ReturnToService=0
InactiveLimit=0
KillWait=5
MinJobAge=600
SlurmctldTimeout=30
SlurmdTimeout=600
MessageTimeout=60
PrologFlags=Alloc
{programs}
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def require() -> None:
    """Skip where Slurm is not installed, or this is not root."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)}: ./dev test-slurm has them")
    if os.geteuid() != 0:
        pytest.skip("slurmd runs as root")


class SlurmCluster:
    """Slurm on every node of a lab; a context manager that starts and ends it."""

    def __init__(
        self,
        lab: Lab,
        directory: Path,
        programs: Mapping[str, str] | None = None,
        gpus: Sequence[str] = (),
    ) -> None:
        """Prepare; `programs` are further lines of slurm.conf, such as `HealthCheckProgram`, and
        `gpus` device files that each node takes for its GPUs.
        """
        self.lab, self.directory = lab, directory
        self.conf = directory / "slurm.conf"
        # Sockets of jobs are in it, whose paths have 108 characters at most.
        self._spool = Path(tempfile.mkdtemp(prefix="slurm-"))
        self._programs = dict(programs or {})
        self._gpus = gpus
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        """Start munge, the controller and the nodes, and wait until every node is idle."""
        self.directory.mkdir(parents=True)
        (self.directory / "state").mkdir()
        os.chmod(self.directory, 0o755)
        key = self.directory / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        os.chmod(key, 0o600)
        services = self.lab.services
        gres = ""
        if self._gpus:
            lines = "".join(f"Name=gpu File={file}\n" for file in self._gpus)
            (self.directory / "gres.conf").write_text(lines, encoding="utf-8")
            self._programs["GresTypes"] = "gpu"
            gres = f" Gres=gpu:{len(self._gpus)}"
        self.conf.write_text(
            _CONF.format(
                controller=services.name,
                controller_address=services.address,
                directory=self.directory,
                spool=self._spool,
                munge=self.directory / "munge.socket",
                programs="\n".join(f"{key}={value}" for key, value in self._programs.items()),
                nodes="\n".join(
                    f"NodeName={node.name} NodeAddr={node.address} CPUs=2 RealMemory=100{gres}"
                    for node in self.lab.nodes
                ),
            ),
            encoding="utf-8",
        )
        files = [
            f"--{name}-file={self.directory}/munge.{name}" for name in ("key", "pid", "log", "seed")
        ]
        self._processes["munge"] = subprocess.Popen(
            [
                "munged",
                "--foreground",
                "--force",
                f"--socket={self.directory}/munge.socket",
                *files,
            ],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            self.wait((self.directory / "munge.socket").exists, START_SECONDS, "munge listens")
            self.start_controller()
            for node in self.lab.nodes:
                self._start(node.station, "slurmd", "-N", node.name)
            self.wait(
                lambda: set(self.states().values()) == {"idle"}, START_SECONDS, "all nodes idle"
            )
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End every daemon."""
        self.close()

    def close(self) -> None:
        """End every daemon, the controller last but for munge."""
        for process in reversed(self._processes.values()):
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait(60)
        self._processes.clear()
        shutil.rmtree(self._spool, ignore_errors=True)

    def start_controller(self) -> None:
        """Start slurmctld."""
        self._start(self.lab.services, "slurmctld")

    def stop_controller(self) -> None:
        """Kill slurmctld: connections are refused."""
        controller = self._processes.pop(self.lab.services.name)
        controller.kill()
        controller.wait(60)

    def signal_controller(self, number: signal.Signals) -> None:
        """Stop slurmctld with SIGSTOP: connections are accepted and nothing answers. Or resume
        it.
        """
        self._processes[self.lab.services.name].send_signal(number)

    def _start(self, station: Station, daemon: str, *flags: str) -> None:
        self._processes[station.name] = station.popen(
            [daemon, "-D", "-f", str(self.conf), *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8"},
        )

    def command(self, *command: str) -> str:
        """Return what a Slurm command prints; CalledProcessError shows what it complains about."""
        ended = self.run(*command)
        ended.check_returncode()
        return ended.stdout

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Return how a Slurm command ended, which a user with these variables starts."""
        environment = {"PATH": os.environ["PATH"], "SLURM_CONF": str(self.conf), **variables}

        def run() -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                command, capture_output=True, text=True, check=False, env=environment, timeout=120
            )

        return self.lab.services.inside(run)

    def states(self) -> dict[str, str]:
        """Return the state of every node as sinfo writes it; empty without an answer.

        Without the `*` of a node that has not answered for a moment, as on a busy machine.
        """
        try:
            output = self.command("sinfo", "-h", "-N", "-o", "%N|%T")
        except subprocess.CalledProcessError:
            return {}
        return dict(line.rstrip("*").split("|", 1) for line in output.splitlines())

    def show(self, node: Node) -> dict[str, str]:
        """Return the fields of `scontrol show node`; a reason is without who set it and when."""
        fields = {}
        for line in self.command("scontrol", "show", "node", node.name).splitlines():
            key, _, value = line.strip().partition("=")
            fields[key] = value.split(" ThreadsPerCore=")[0].split(" [")[0]
        return fields

    def wait(self, condition: Callable[[], object], seconds: float, what: str) -> float:
        """Wait for a condition and return after how many seconds it held."""
        begin = time.monotonic()
        until(condition, lambda: f"{what}\n{self.logs()}", seconds)
        return time.monotonic() - begin

    def logs(self) -> str:
        """Return the ends of all logs."""
        return "\n".join(
            f"== {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-25:])
            for log in sorted(self.directory.glob("*.log"))
        )
