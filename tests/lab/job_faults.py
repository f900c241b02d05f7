"""The faults of training jobs: how each is brought into a real job, and the one page or ticket that
it is to lead to.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from tests.cgroups import remove
from tests.lab import faults, jobs
from tests.lab.catalogue import OWNER, PAGE, TICKET
from tests.lab.jobs import Job
from tests.lab.node import Node
from tests.lab.receiver import Alert
from tests.processes import children
from tests.waiting import until

CGROUPS = Path("/sys/fs/cgroup/memory")
ROOM = 64 << 20
"""Bytes that a rank may take in addition before the kernel kills it."""


@dataclass(frozen=True, kw_only=True)
class JobFault:
    """One fault, and what is to be told of it."""

    symptom: str
    rank: int | None = None
    """The rank at fault, where the page names one; its node is the one at fault."""
    node: int | None = None
    """The node at fault, counted from 0 in its job, where that is not the one of the rank."""
    receiver: str = PAGE
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the alert beside node and rank."""
    says: str = ""
    """What the description says; a regular expression."""
    inject: Callable[[Job], AbstractContextManager[None]] | None = None
    """None where the job is at fault as it is started."""
    ends: bool = False
    """Whether the job does not survive it; else it goes on when the fault is undone."""
    restarts: bool = False
    """Whether it is only over when the job runs again."""
    follows: Callable[[Alert], bool] = lambda _: False
    """What else may be told, and why."""
    seconds: float = 180.0
    """In which it is told."""
    over: float = 330.0
    """In which, after it, that is over."""

    def at(self, nodes: Sequence[Node]) -> str | None:
        """Return the name of the node at fault, of those of the job; None where no node is."""
        if self.node is not None:
            return nodes[self.node].name
        return None if self.rank is None else nodes[self.rank // jobs.RANKS].name

    def names(self, alert: Alert, nodes: Sequence[Node]) -> bool:
        """Tell whether an alert is the one that this fault is to lead to, in a job on these
        nodes.
        """
        expected = {"symptom": self.symptom, **self.labels}
        description, node = alert.annotations["description"], self.at(nodes)
        if node is not None and "node" in alert.labels:  # else only its text names the node
            expected["node"] = node
        if self.rank is not None and not self.says:
            expected["rank"] = str(self.rank)
        return (
            alert.receiver == self.receiver
            and expected.items() <= alert.labels.items()
            and (node or "") in description
            and re.search(self.says, description) is not None
        )


def mishap(name: str, rank: int) -> Callable[[Job], AbstractContextManager[None]]:
    """Return what has a mishap happen to a rank."""
    return lambda job: job.mishap(name, rank)


@contextlib.contextmanager
def out_of_memory(job: Job, rank: int) -> Iterator[None]:
    """Have a rank use up the memory of a cgroup that it alone is in, until the kernel kills it."""
    pid = job.pids()[rank]
    group = CGROUPS / f"lab-{pid}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(ROOM), encoding="ascii")
        # What it has by now stays charged to where it was.
        (group / "cgroup.procs").write_text(str(pid), encoding="ascii")
        with job.mishap("memory-leaks", rank):
            yield
    finally:
        remove(group)


@contextlib.contextmanager
def orphan(directory: Path, nodes: Sequence[Node], port: int) -> Iterator[Job]:
    """Leave the rank 0 of a run behind that was ended before its other ranks came.

    It still holds the port.
    """
    directory.mkdir()
    node = nodes[0]
    place = [f"{name}={value}" for name, value in jobs.place(0, 4, node.member, port).items()]
    script = [sys.executable, str(jobs.HERE / "script_ddp.py"), "10", str(directory)]
    rank = shlex.join(["env", *place, *script])
    with (directory / "std-rank-0.log").open("wb") as log:
        launcher = node.station.popen(
            ["sh", "-c", f"{rank} & wait"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=jobs.environment(directory),
        )
    until(
        lambda: f":{port}" in node.station.tool("ss", "-tlnH"),
        (directory / "std-rank-0.log").read_text,
    )
    time.sleep(3.0)  # an agent sees it with its launcher
    (pid,) = children(launcher.pid)
    with node.lab.injected(f"port {port} held by an orphan on {node.name}"):
        launcher.kill()
        launcher.wait()
        try:
            yield Job(directory, nodes, [launcher])
        finally:
            os.kill(pid, signal.SIGKILL)


def _oom_kill(alert: Alert) -> bool:
    """The kernel's count of kills is the machine's, so that all nodes of the lab tell of it. The
    node of the rank may notice its end later than another the error that follows, which is told
    until then: here at once.
    """
    labels = alert.labels
    return labels["alertname"] == "DshealthdHostMemoryPressure" or (
        labels["alertname"] == "DshealthdJobFailed"
        and labels.get("reason", "").endswith(" ended with an error")
    )


def _link(alert: Alert) -> bool:
    """The probes tell of the way between two nodes whether a job uses it or not."""
    return alert.labels.get("kind") == "link"


FAULTS: dict[str, JobFault] = {
    "stopped": JobFault(
        symptom="training-hang",
        rank=3,
        labels={"class": "process", "reason": "stopped"},
        inject=lambda job: faults.pause(job.pids()[3]),
    ),
    "collective-skipped": JobFault(
        symptom="training-hang",
        rank=2,
        labels={"class": "desync", "reason": "ahead"},
        inject=mishap("collective-skipped", 2),
        ends=True,
    ),
    "input-stalls": JobFault(
        symptom="training-hang",
        rank=1,
        labels={"class": "input", "reason": "input"},
        inject=mishap("input-stalls", 1),
    ),
    "slow": JobFault(
        symptom="straggler",
        receiver=TICKET,
        rank=2,
        says=r"\brank 2 on ",
        inject=mishap("slow", 2),
        seconds=420.0,
        over=300.0,
    ),
    "network": JobFault(
        symptom="training-hang",
        labels={"class": "network"},
        inject=lambda job: faults.drop(*job.nodes),
        follows=_link,
        over=240.0,
    ),
    "not-a-number": JobFault(
        symptom="loss-nan",
        receiver=OWNER,
        rank=1,
        says=r"on rank 1\b",
        inject=mishap("not-a-number", 1),
        ends=True,
    ),
    "overflow": JobFault(
        symptom="loss-scale-collapse",
        receiver=OWNER,
        inject=mishap("overflow", 0),
        ends=True,
    ),
    "out-of-memory": JobFault(
        symptom="child-failed",
        receiver=OWNER,
        rank=3,
        says=r"rank 3 was killed, and the kernel reports an OOM kill",
        inject=lambda job: out_of_memory(job, 3),
        ends=True,
        restarts=True,
        follows=_oom_kill,
    ),
    "rank-twice": JobFault(
        symptom="ranks-stuck-at-init",
        receiver=OWNER,
        labels={"alertname": "DshealthdRanksDoNotMeet"},
        node=1,
        says=r"rank 2\b",
        ends=True,
    ),
    "world-size": JobFault(
        symptom="ranks-stuck-at-init",
        receiver=OWNER,
        labels={"alertname": "DshealthdRanksDoNotMeet"},
        node=1,
        says=r"another WORLD_SIZE than rank 0",
        ends=True,
    ),
    "interface": JobFault(
        symptom="nccl-environment",
        receiver=OWNER,
        node=1,
        says=r"NCCL_SOCKET_IFNAME names nothing",
        ends=True,
    ),
    "port-held": JobFault(
        symptom="address-in-use",
        receiver=TICKET,
        node=0,
        ends=True,
    ),
    "open-files": JobFault(
        symptom="open-files",
        receiver=TICKET,
        node=0,
        inject=mishap("files-leak", 0),
    ),
}
