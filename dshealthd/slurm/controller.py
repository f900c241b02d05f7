"""The controller slurmctld: its cluster, read and changed by Slurm's own commands.

Every call has a deadline, after which its processes are killed: before slurmd has registered, and
while slurmctld is down, they hang for minutes (LBNL Node Health Check, #159 and #161).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Protocol

from dshealthd.slurm.node_state import NodeState

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

PREFIX = "dshealthd: "
"""Begins every reason of ours; a reason without it is somebody else's and stays."""
TIMEOUT = 2.0
"""Seconds that one command may take."""
_END = 0.5
"""Seconds for a killed command to go; only one in the middle of a disk access takes longer."""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/slurm/bin"
_SEPARATOR = "\x1f"
_FIELDS = ("NodeList", "StateComplete", "Timestamp", "Reason", "Comment")
_COLUMNS = f"-O{','.join(f'{field}:{_SEPARATOR}' for field in _FIELDS)}"
_NONE = frozenset(("", "none", "(null)", "n/a"))
_JOB_NODES = re.compile(r"(?:^|\s)NodeList=(\S+)")
_SECTION = re.compile(r" ?\[dshealthd: ([^\]]*)\]")


class Slurm(Protocol):
    """What a check asks of a `Controller`."""

    def nodes(self) -> dict[str, SlurmNode]:
        """Return every node that slurmctld, the controller, has."""

    def drain(self, node: SlurmNode, reason: str) -> None:
        """Have slurmctld, the controller, drain a node."""

    def undrain(self, node: SlurmNode) -> None:
        """Have slurmctld, the controller, take a drain back."""

    def note(self, node: SlurmNode, note: str) -> None:
        """Have slurmctld, the controller, change our note on a node."""


class ControllerError(Exception):
    """Slurm does not answer in time, or not as it should."""


@dataclass(frozen=True, slots=True)
class SlurmNode:
    """One node of the cluster."""

    name: str
    state: NodeState
    reason: str
    """Empty without one."""
    since: float
    """Unix time at which the reason was set, by the controller's clock; 0 without one."""
    comment: str
    """What others wrote; ours is in `note`."""
    note: str
    """Our own section of the comment; empty without one."""

    @property
    def ours(self) -> bool:
        """Whether the reason that slurmctld has for a node is one of ours."""
        return self.reason.startswith(PREFIX)


class Controller:
    """Slurm's commands."""

    def __init__(
        self,
        *,
        conf_file: Path | None = None,
        bin_directory: Path | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """Prepare; nothing is called yet."""
        path = environment.get("PATH") or _PATH
        self._environment = {
            "PATH": f"{bin_directory}:{path}" if bin_directory is not None else path,
            "LC_ALL": "C",
            "TZ": "UTC",  # sinfo writes times as its own time zone has them
            "SLURM_TIME_FORMAT": "standard",
        }
        conf = str(conf_file) if conf_file is not None else environment.get("SLURM_CONF")
        if conf:
            self._environment["SLURM_CONF"] = conf

    def nodes(self) -> dict[str, SlurmNode]:
        """Return every node that slurmctld has in a partition; ControllerError."""
        return parse_nodes(self._run("sinfo", "--all", "--noheader", "--Node", _COLUMNS))

    def node(self, name: str) -> SlurmNode | None:
        """Return one node of slurmctld, None where no partition has it; ControllerError."""
        found = self._run("sinfo", "--all", "--noheader", "--Node", f"--nodes={name}", _COLUMNS)
        return parse_nodes(found).get(name)

    def nodes_of_job(self, job: str) -> str:
        """Return the nodes that slurmctld gave a job, in Slurm's notation; ControllerError."""
        text = self._run("scontrol", "show", "job", job, "--oneliner")
        found = _JOB_NODES.search(text)
        if found is None or found[1] in _NONE:
            message = f"scontrol: no nodes of job {job}"
            raise ControllerError(message)
        return found[1]

    def drain(self, node: SlurmNode, reason: str) -> None:
        """Have slurmctld drain a node and drop our note, in one step; ControllerError."""
        self._update(node.name, "State=DRAIN", f"Reason={reason}", f"Comment={node.comment}")

    def undrain(self, node: SlurmNode) -> None:
        """Have slurmctld take a drain back; its reason goes with it. ControllerError."""
        self._update(node.name, "State=UNDRAIN")

    def note(self, node: SlurmNode, note: str) -> None:
        """Have slurmctld put our note behind what a node's comment says; ControllerError."""
        section = f"[dshealthd: {note}]" if note else ""
        self._update(node.name, f"Comment={' '.join(filter(None, (node.comment, section)))}")

    def _update(self, name: str, *changes: str) -> None:
        self._run("scontrol", "update", f"NodeName={name}", *changes)

    def _run(self, *command: str) -> str:
        """Return what a command of Slurm prints; what it started is gone on return or raise."""
        try:
            process = subprocess.Popen(  # noqa: S603 - found in root's own PATH
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._environment,
                start_new_session=True,
                text=True,
                errors="replace",
            )
        except OSError as error:
            message = f"{command[0]}: {error.strerror}"
            raise ControllerError(message) from error
        try:
            out, err = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired as error:
            message = f"{command[0]} {command[1]}: no answer within {TIMEOUT:g} s"
            raise ControllerError(message) from error
        finally:
            if process.returncode is None:
                _end(process)
        if process.returncode != 0:
            message = f"{command[0]} {command[1]}: {' '.join(err.split())[:200]}"
            raise ControllerError(message)
        return out


def _end(process: subprocess.Popen[str]) -> None:
    """Kill one of Slurm's commands and its children; one that the kernel holds is left to it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END)


def parse_nodes(text: str) -> dict[str, SlurmNode]:
    """Return the nodes of sinfo's lines; ControllerError for a line that is no node.

    A node is listed once for each of its partitions.
    """
    nodes = {}
    for line in text.splitlines():
        fields = line.split(_SEPARATOR)
        if len(fields) != len(_FIELDS) + 1 or not fields[0].strip():
            message = f"sinfo: not a node: {line[:80]!r}"
            raise ControllerError(message)
        name, state, since, reason, comment = (field.strip() for field in fields[:-1])
        comment = "" if comment.lower() in _NONE else comment
        note = _SECTION.search(comment)
        nodes[name] = SlurmNode(
            name,
            NodeState.parse(state),
            "" if reason.lower() in _NONE else reason,
            _time(since),
            _SECTION.sub("", comment),
            note[1] if note else "",
        )
    return nodes


def _time(text: str) -> float:
    """Return a Unix time of sinfo's; 0 where it has none."""
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return 0.0
