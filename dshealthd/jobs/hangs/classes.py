"""The classes of standstills and the problems of culprits, as every page words them."""

from __future__ import annotations

import enum
from typing import Self


class _Worded(enum.StrEnum):
    """A word of metrics and documents, and the same in words."""

    words: str

    def __new__(cls, name: str, words: str = "") -> Self:
        """Return the member of this name."""
        member = str.__new__(cls, name)
        member._value_, member.words = name, words
        return member


class HangClass(_Worded):
    """Why a job stands still, as this node sees it."""

    NONE = "none", "it does not"
    PROCESS = "process", "a rank's process is stopped or has ended"
    CHECKPOINT = "checkpoint", "a checkpoint"
    INPUT = "input", "work between steps, or I/O, of a rank"
    DESYNC = "desync", "ranks are at different places"
    WAITING = (
        "waiting",
        (
            "not on this node: its ranks wait at the same place for a rank on another node, or for "
            "the network"
        ),
    )
    BETWEEN_STEPS = "between_steps", "between two steps"
    """Perhaps an unmarked checkpoint or evaluation."""
    IDLE = "idle", "idle between two steps, in no collective"
    """If ranks elsewhere are in one, they wait for these."""
    COLLECTIVE = (
        "collective",
        (
            "hung unless a rank on another node is at work, which this node does not see: in "
            "collectives between two steps"
        ),
    )
    STARTING = "starting", "in its first steps, and nothing shows whether it compiles or waits"
    WORKING = "working", "no step, but its processes are at work"
    SUSPENDED = "suspended", "suspended: all its processes here are stopped"
    DEBUGGER = "debugger", "a rank is stopped in a debugger, or waits at a prompt"


HANGS = frozenset(
    (HangClass.PROCESS, HangClass.CHECKPOINT, HangClass.INPUT, HangClass.DESYNC, HangClass.WAITING)
)
"""Classes of a standstill that is a hang; the others are pauses."""


class Culprit(_Worded):
    """The problem of the rank that the others wait for; its words follow the rank."""

    STOPPED = "stopped", "is stopped (SIGSTOP)"
    TRACED = "traced", "is stopped in a debugger"
    PROMPT = "prompt", "waits for input from a terminal"
    GONE = "gone", "has ended"
    BLOCKED = "blocked", "hangs in kernel I/O"
    CHECKPOINT = "checkpoint", "does not return from a checkpoint"
    PAUSED = "paused", "is in a pause that the others are not in"
    INPUT = "input", "has not begun its next forward pass (data, logging, a barrier, or the like)"
    LAGGING = "behind", "is behind the others"
    AHEAD = "ahead", "is ahead: it skipped a collective that the others wait in"
    APART = "apart", "waits in another collective than the others, between two steps"
