"""The controller slurmctld: its cluster, read and changed with Slurm's own commands, and the state
of a node as these print it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

_WORKING = frozenset(("idle", "allocated", "mixed"))
_HARMLESS = frozenset(
    (
        *("completing", "reserved", "planned", "cloud", "dynamic_norm", "dynamic_future"),
        "not_responding",  # has just been resumed, and the controller has not heard from it yet
    )
)
"""Flags of a node that takes jobs, or soon will."""
PREFIX = "dshealthd: "
"""Prefix of every reason of ours; a reason without it is somebody else's and is left alone."""
TIMEOUT = 2.0
"""Seconds that one command may take, and that a killed one may take to exit: only one in the middle
of a disk access takes any.
"""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/slurm/bin"
_FIELDS = ("NodeList", "StateComplete", "Timestamp", "Gres", "Reason", "Comment")
_NONE = frozenset(("", "none", "(null)", "n/a"))
_GPUS = re.compile(r"(?:^|,)gpu:")
_SECTION = re.compile(r" ?\[dshealthd: ([^\]]*)\]")


class SlurmNodeState(NamedTuple):
    """A base state and its flags, in lower case."""

    base: str
    flags: frozenset[str]

    @classmethod
    def parse(cls, text: str) -> SlurmNodeState:
        """Parse sinfo's `StateComplete`, such as `idle+drain+not_responding`."""
        base, *flags = text.lower().split("+")
        return cls(base or "unknown", frozenset(flags))

    @property
    def drained(self) -> bool:
        """Whether Slurm's state of the node is draining or drained."""
        return "drain" in self.flags

    @property
    def working(self) -> bool:
        """Whether the node takes jobs now: nobody has drained, failed, reserved or stopped it.
        Unknown flags count as somebody's work, with which dshealthd does not interfere.
        """
        return self.base in _WORKING and not self.flags - _HARMLESS


class ControllerError(Exception):
    """Slurm did not answer in time, or gave an unexpected answer."""


@dataclass(frozen=True, slots=True)
class SlurmNode:
    """One node of the cluster."""

    name: str
    state: SlurmNodeState
    reason: str
    """Empty without one."""
    since: float
    """Unix time at which the reason was set, by the controller's clock; 0 without one."""
    comment: str
    """The comment that others wrote, without our note."""
    note: str
    """Our own section of the comment; empty without one."""
    gpus: bool = False
    """Whether slurm.conf has given it GPUs, as GRES."""

    @property
    def ours(self) -> bool:
        """Whether dshealthd set the reason that slurmctld has for a node."""
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
            "TZ": "UTC",  # sinfo prints times in its own time zone
            "SLURM_TIME_FORMAT": "standard",
        }
        if conf := conf_file or environment.get("SLURM_CONF"):
            self._environment["SLURM_CONF"] = str(conf)

    def nodes(self) -> dict[str, SlurmNode]:
        """Return all nodes of all partitions. Raises ControllerError."""
        return self._sinfo()

    def node(self, name: str) -> SlurmNode | None:
        """Return one node, or None if no partition has it. Raises ControllerError."""
        return self._sinfo(f"--nodes={name}").get(name)

    def drain(self, node: SlurmNode, reason: str) -> None:
        """Have slurmctld drain a node and drop our note, in one step. Raises ControllerError."""
        self._update(node.name, "State=DRAIN", f"Reason={reason}", f"Comment={node.comment}")

    def set_note(self, node: SlurmNode, note: str) -> None:
        """Have slurmctld put our note after the node's comment. Raises ControllerError."""
        section = f"[dshealthd: {note}]" if note else ""
        self._update(node.name, f"Comment={' '.join(filter(None, (node.comment, section)))}")

    def _update(self, name: str, *changes: str) -> None:
        self._run("scontrol", "update", f"NodeName={name}", *changes)

    def _sinfo(self, *options: str) -> dict[str, SlurmNode]:
        # Not a digit first, which sinfo takes for the width of a column.
        separator = f"\x1f{secrets.token_hex(8)}"
        columns = ",".join(f"{field}:{separator}" for field in _FIELDS)
        text = self._run("sinfo", "--all", "--noheader", "--Node", *options, f"-O{columns}")
        return parse_nodes(text, separator)

    def _run(self, *command: str) -> str:
        """Return the output of a Slurm command; on return or raise, its processes are gone."""
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
            raise ControllerError(f"{command[0]}: {error.strerror}") from error
        try:
            out, err = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired as error:
            message = f"{command[0]} {command[1]}: no answer within {TIMEOUT:g} s"
            raise ControllerError(message) from error
        finally:
            if process.returncode is None:
                _end(process)
        if process.returncode != 0:
            raise ControllerError(f"{command[0]} {command[1]}: {' '.join(err.split())[:200]}")
        return out


def _end(process: subprocess.Popen[str]) -> None:
    """Kill one of Slurm's commands and its children; do not wait for one stuck in the kernel."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(TIMEOUT)


def parse_nodes(text: str, separator: str) -> dict[str, SlurmNode]:
    """Return the nodes in sinfo's output, in which `separator` ends each field. Raises
    ControllerError for one that is not understood. sinfo lists a node once for each of its
    partitions.
    """
    *fields, end = text.split(separator)
    if len(fields) % len(_FIELDS) or end.strip():
        raise ControllerError(f"sinfo: unexpected output: {text[-80:]!r}")
    nodes = {}
    for row in zip(*[iter(fields)] * len(_FIELDS), strict=True):
        name, state, since, gres, reason, comment = (field.strip() for field in row)
        if not name:
            raise ControllerError(f"sinfo: a node without a name: {row!r}")
        comment = "" if comment.lower() in _NONE else comment
        note = _SECTION.search(comment)
        nodes[name] = SlurmNode(
            name,
            SlurmNodeState.parse(state),
            "" if reason.lower() in _NONE else reason,
            _time(since),
            _SECTION.sub("", comment),
            note[1] if note else "",
            bool(_GPUS.search(gres)),
        )
    return nodes


def _time(text: str) -> float:
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
    except (ValueError, ArithmeticError):
        return 0.0
