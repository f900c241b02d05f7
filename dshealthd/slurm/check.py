"""One check of this node for Slurm: what the agent has found, and whether to drain or refuse.

The check does nothing if the agent does not answer or has just started, if the findings differ
between checks, if somebody else has set a reason or taken the node out of service, or if Slurm does
not answer.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, NamedTuple

from dshealthd.core import documents, schema, state_file
from dshealthd.core.host import read
from dshealthd.slurm import budget
from dshealthd.slurm.agent import AgentSilent, AgentVerdict
from dshealthd.slurm.controller import PREFIX, Controller, ControllerError

if TYPE_CHECKING:
    from pathlib import Path

    from dshealthd.slurm.options import SlurmOptions

LOOK_AGAIN = 6.0
"""Seconds from one check to the next that counts: longer than the agent's 5 s interval for GPUs, so
that it sees a new reading. The prolog waits so long, of a job on a node with a finding; epilogs of
jobs that end together count once."""
MAX_LOOKS = 5
"""Most checks of one prolog; more would add up to more than a job should wait."""
_NAMED = 3
"""Most findings that a reason names; one is enough to find the others."""


class NodeCheckResult(enum.Enum):
    """The result of a check of this node for Slurm."""

    CLEAN = "clean"
    UNKNOWN = "unknown"
    BAD = "bad"
    """Not confirmed, over the budget, or Slurm did not answer: the node stays in service."""
    DRAINED = "drained"
    """Drained by us or somebody else, now or before."""


class CheckReport(NamedTuple):
    """A check's result, with one line for the log; empty if there is nothing to report."""

    result: NodeCheckResult
    text: str


class NodeCheck:
    """Checks one node."""

    def __init__(
        self,
        options: SlurmOptions,
        node: str,
        ask: Callable[[], AgentVerdict],
        slurm: Controller,
        streaks: Streaks,
        sleep: Callable[[float], object] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ask` returns the agent's verdict or raises AgentSilent; `node` is Slurm's name."""
        self._options, self._node, self._ask = options, node, ask
        self._slurm, self._streaks = slurm, streaks
        self._sleep, self._monotonic = sleep, monotonic

    def once(self) -> CheckReport:
        """Check the node once, as Slurm's health check and epilog do."""
        try:
            verdict = self._ask()
        except AgentSilent as error:
            self._streaks.bad = {}
            return CheckReport(NodeCheckResult.UNKNOWN, f"nothing done: {error}")
        return self._judge(verdict)

    def insistently(self) -> CheckReport:
        """Check the node until a finding is confirmed or gone, as Slurm's prolog does."""
        looks = min(self._options.bad_checks, MAX_LOOKS)
        outcome = self.once()
        while outcome.result is NodeCheckResult.BAD and not self._confirmed() and looks > 1:
            looks -= 1
            self._sleep(LOOK_AGAIN)
            outcome = self.once()
        return outcome

    def _confirmed(self) -> bool:
        return self._streaks.longest >= self._options.bad_checks

    def _judge(self, verdict: AgentVerdict) -> CheckReport:
        if not verdict.critical:
            if not verdict.ready:
                text = "nothing done: the agent has not judged all sources yet"
                return CheckReport(NodeCheckResult.UNKNOWN, text)
            if not verdict.clean:
                self._streaks.bad = {}
                return CheckReport(NodeCheckResult.UNKNOWN, "")
            return self._clean()
        self._streaks.count_bad(verdict.critical, self._monotonic())
        named = list(verdict.critical.values())
        reason = PREFIX + ", ".join(named[:_NAMED])
        if len(named) > _NAMED:
            reason += f", and {len(named) - _NAMED} more"
        if not self._confirmed():
            text = f"{reason} (check {self._streaks.longest} of {self._options.bad_checks})"
            return CheckReport(NodeCheckResult.BAD, text)
        try:
            return self._drain(reason)
        except ControllerError as error:
            return CheckReport(
                NodeCheckResult.BAD, f"{reason}; nothing done: Slurm does not answer: {error}"
            )

    def _drain(self, reason: str) -> CheckReport:
        me = self._slurm.nodes().get(self._node)
        if me is None:
            return CheckReport(NodeCheckResult.BAD, f"{reason}; Slurm has no node {self._node}")
        if me.state.drained:
            return CheckReport(NodeCheckResult.DRAINED, f"{reason}; already drained: {me.reason}")
        if me.reason or not me.state.working:
            state = "+".join((me.state.base, *sorted(me.state.flags)))
            text = f"{reason}; not drained: its state is {state} {me.reason}".rstrip()
            return CheckReport(NodeCheckResult.BAD, text)
        self._streaks.noted = True  # set first, in case this is interrupted half-way
        ratios = self._options.budget_ratio, self._options.daily_budget_ratio
        refused = budget.drain(self._slurm, self._node, reason, *ratios)
        self._streaks.noted = bool(refused)
        if refused:
            return CheckReport(NodeCheckResult.BAD, f"{reason}; {refused}")
        return CheckReport(NodeCheckResult.DRAINED, f"{reason}; drained")

    def _clean(self) -> CheckReport:
        self._streaks.bad = {}
        if not self._streaks.noted:
            return CheckReport(NodeCheckResult.CLEAN, "")
        try:
            me = self._slurm.nodes().get(self._node)
            if me is None:
                return CheckReport(NodeCheckResult.CLEAN, f"Slurm has no node {self._node}")
            if me.note:
                self._slurm.set_note(me, "")
            self._streaks.noted = False
        except ControllerError as error:
            return CheckReport(
                NodeCheckResult.CLEAN, f"its comment is kept: Slurm does not answer: {error}"
            )
        return CheckReport(NodeCheckResult.CLEAN, "")


class Busy(Exception):
    """Another check of this node is running."""


@dataclass(slots=True)
class Streaks:
    """How many consecutive checks of this node for Slurm had each finding."""

    bad: dict[str, Annotated[int, schema.Integer()]] = field(default_factory=dict)
    """Checks in a row with each finding."""
    counted: Annotated[float, schema.FIGURE] = 0.0
    """When the last check counted, by the monotonic clock."""
    noted: bool = False
    """Whether we have left a note in the comment of the node."""
    said: str = ""
    """What the last check had to report."""

    @property
    def longest(self) -> int:
        """Checks in a row with the same finding; 0 without one."""
        return max(self.bad.values(), default=0)

    def count_bad(self, keys: Iterable[str], now: float) -> None:
        """Extend the streaks of these findings, and end all others. A check at the time of the last
        one has the same reading of the agent, and extends none.
        """
        again = 0 <= now - self.counted < LOOK_AGAIN
        self.bad = {key: max(1, self.bad.get(key, 0) + (not again)) for key in keys}
        if not again:
            self.counted = now


@contextlib.contextmanager
def locked_streaks(directory: Path, patience: float) -> Iterator[Streaks]:
    """Lock the streaks of this node, and write them at the end. Raises Busy if another check holds
    them for longer than `patience` seconds, OSError if the directory cannot be used or belongs to
    somebody else.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, 0o700)
    status = os.lstat(directory)
    if status.st_uid != os.geteuid() or status.st_mode & 0o22:
        raise PermissionError("belongs to another user, or others may write to it")
    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _lock(lock, patience)
        path = directory / "streaks.json"
        streaks = _read(path)
        yield streaks
        # Not durable: findings from before a reboot confirm nothing.
        state_file.replace(path, documents.dumps(streaks).encode(), durable=False)
    finally:
        os.close(lock)


def _lock(descriptor: int, patience: float) -> None:
    end = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() >= end:
                raise Busy("another check of this node is running") from error
            time.sleep(budget.POLL)
        else:
            return


def _read(path: Path) -> Streaks:
    """Return the saved streaks; empty ones if there are none or they cannot be parsed."""
    try:
        found: Streaks = schema.of(Streaks).read(schema.document(read(str(path))), str(path))
    except (FileNotFoundError, schema.SchemaError):
        return Streaks()  # writes are atomic, so another version wrote this: start counting again
    return found
