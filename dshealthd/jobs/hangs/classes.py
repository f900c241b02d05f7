"""The classes of standstills and the problems of culprits, and how every page words them."""

from __future__ import annotations

import enum
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_NONE_NAMED = (
    (
        "ranks here are at different places; ranks on other nodes are not seen from this node, so "
        "none is named"
    ),
    "ranks are at different places, as many ahead as behind, so none is named",
)


class HangClass(enum.StrEnum):
    """Why a job stands still, as this node sees it."""

    NONE = "none"
    """It does not."""
    PROCESS = "process"
    """A rank's process is stopped, or has ended while the others wait for it."""
    CHECKPOINT = "checkpoint"
    """A rank does not return from a checkpoint."""
    INPUT = "input"
    """A rank does not begin the step that the others are in, or hangs in I/O."""
    DESYNC = "desync"
    """Ranks are at different points of the training, and none of them moves."""
    WAITING = "waiting"
    """No cause on this node: the ranks wait for a rank elsewhere, or for the network."""
    BETWEEN_STEPS = "between_steps"
    """All ranks here are between the same two steps: perhaps an unmarked checkpoint or
    evaluation.
    """
    IDLE = "idle"
    """The same, and none is at work, nor in a collective: if ranks elsewhere are in one, they wait
    for these.
    """
    COLLECTIVE = "collective"
    """Ranks here wait in collectives between the same two steps, and none is at work: a rank
    elsewhere may be, or none is, which is a hang.
    """
    STARTING = "starting"
    """In its first steps, which compile and allocate, and nothing shows what a rank here does."""
    WORKING = "working"
    """GPUs, CPUs, NCCL, files or sockets show that the job is at work: an unmarked pause."""
    SUSPENDED = "suspended"
    """All its processes here are stopped, as by `scontrol suspend`."""
    DEBUGGER = "debugger"
    """A debugger holds one of its processes."""


class Culprit(enum.StrEnum):
    """The problem of the rank that the others wait for; `PROBLEMS` says it in words."""

    STOPPED = "stopped"
    TRACED = "traced"
    GONE = "gone"
    BLOCKED = "blocked"
    CHECKPOINT = "checkpoint"
    PAUSED = "paused"
    INPUT = "input"
    LAGGING = "behind"
    AHEAD = "ahead"
    APART = "apart"


HANGS = frozenset(
    (HangClass.PROCESS, HangClass.CHECKPOINT, HangClass.INPUT, HangClass.DESYNC, HangClass.WAITING)
)
"""Classes of a standstill that is a hang; the others are pauses."""
PROBLEMS: Mapping[str, str] = MappingProxyType(
    {
        Culprit.STOPPED: "is stopped (SIGSTOP)",
        Culprit.TRACED: "is stopped in a debugger",
        Culprit.GONE: "has ended",
        Culprit.BLOCKED: "hangs in kernel I/O",
        Culprit.CHECKPOINT: "does not return from a checkpoint",
        Culprit.PAUSED: "is in a pause that the others are not in",
        Culprit.INPUT: "has not begun its next forward pass (data, logging, a barrier, or the "
        "like)",
        Culprit.LAGGING: "is behind the others",
        Culprit.AHEAD: "is ahead: it skipped a collective that the others wait in",
        Culprit.APART: "waits in another collective than the others, between two steps",
    }
)
"""The problem of a culprit as every page, command and file words it, after its rank."""
_EXPLANATIONS: Mapping[str, str] = {
    HangClass.PROCESS: "a rank's process is stopped or has ended",
    HangClass.CHECKPOINT: "a checkpoint",
    HangClass.INPUT: "work between steps, or I/O, of a rank",
    HangClass.DESYNC: "ranks are at different places",
    HangClass.WAITING: "not on this node: its ranks wait at the same place for a rank on another "
    "node, or for the network",
    HangClass.BETWEEN_STEPS: "between two steps",
    HangClass.IDLE: "idle between two steps, in no collective",
    HangClass.COLLECTIVE: "hung unless a rank on another node is at work, which this node does not "
    "see: in collectives between two steps",
    HangClass.STARTING: "in its first steps, and nothing shows whether it compiles or waits",
    HangClass.WORKING: "no step, but its processes are at work",
    HangClass.SUSPENDED: "suspended: all its processes here are stopped",
    HangClass.DEBUGGER: "a rank is stopped in a debugger",
}
_WHOLE: Mapping[str, str] = {
    HangClass.WAITING: "unknown: all ranks wait at the same place",
    HangClass.SUSPENDED: "suspended: all its processes are stopped",
}


def explain(cause: str, *, named: bool, whole: bool) -> str:
    """Return the class of a hang in words.

    `named` says whether a culprit is known, `whole` whether all ranks of the job are on this node.
    """
    if cause == HangClass.DESYNC and not named:
        return _NONE_NAMED[whole]
    return (whole and _WHOLE.get(cause)) or _EXPLANATIONS.get(cause, cause)
