"""Programs that may hang, in a driver or on the way to another node, run with a deadline."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from dshealthd.doctor import ssh
from dshealthd.linux.forked import run as run_forked

SECONDS = 30.0
"""For a program that only reads; nvidia-smi takes some seconds where no one keeps the driver
loaded."""


@dataclass(frozen=True, slots=True)
class Ran:
    """How a program ended."""

    status: int = -1
    output: str = ""
    errors: str = ""
    """The last line of its standard error."""
    problem: str = ""
    """Why it has no exit status; empty where it has one."""
    hung: bool = False

    @property
    def failure(self) -> str:
        """Why there is no good answer; empty where there is one."""
        return self.problem or (f"exit status {self.status}: {self.errors}" if self.status else "")


def run(arguments: Sequence[str], seconds: float = SECONDS) -> Ran:
    """Run a program to its end, or kill it and all that it has started at its deadline."""
    if shutil.which(arguments[0]) is None:
        return Ran(problem=f"{arguments[0]} is not in the PATH")
    program = functools.partial(ssh.run, arguments=list(arguments))
    ended = run_forked(arguments[0], program, seconds)
    if ended.problem:
        return Ran(problem=ended.problem, hung=ended.hung)
    status, output, errors = ended.value
    return Ran(status, output, ssh.last_line(errors) if errors.strip() else "no message")
