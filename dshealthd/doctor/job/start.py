"""What starts a job: one model of scripts, commands, configurations of Accelerate and pods."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dshealthd.doctor.check import Result, critical
from dshealthd.doctor.job.sources.launcher_command import LauncherCommand
from dshealthd.doctor.job.sources.layout import Layout
from dshealthd.jobs.environment import natural

_DEGREES = re.compile(
    r"((tensor|pipeline)_model|context|data|tensor|pipeline)_parallel"
    r"(_(shard|replicate))?_(size|degree)|parallelism_config_(tp|cp|sp|dp_shard|dp_replicate)_size"
)
"""Arguments of Megatron, NeMo, torchtitan and Accelerate that divide the ranks into parts."""
OF_DATA = re.compile("data|_dp_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A command, the nodes or pods on which it starts, and what each of these is given."""

    command: LauncherCommand | None
    layout: Layout
    """What the command starts."""
    variables: Mapping[str, str]
    requested: Mapping[str, str] = field(default_factory=dict)
    """What the job, not its srun, asks of Slurm, by option."""
    nodes: int | None = None
    """Nodes that the job is given."""
    given: str = ""
    """Who gives them, for people."""
    gpus: int | None = None
    """GPUs that each of them has for the job."""
    memory: int | None = None
    """Bytes of memory that each of them gives, if they are limited."""
    copies: int = 1
    """Nodes on which these words start the command."""
    pool: Mapping[str, set[int]] = field(default_factory=dict)
    """Slots of each host, as a hostfile gives them."""
    name: str = ""
    """What starts it, for people: empty for a script's command."""
    strange: Sequence[str] = ()
    """Options in its script that sbatch does not have."""
    unset: Mapping[str, str] = field(default_factory=dict)
    """Variables that its script reads and Slurm does not set, with the option that would."""

    @property
    def chain(self) -> list[LauncherCommand]:
        """The launchers, from the outermost in."""
        return list(self.command.chain()) if self.command else []

    def find(self, program: str) -> LauncherCommand | None:
        """Return the call of a launcher, if there is one."""
        return self.command.find(program) if self.command else None

    @property
    def program(self) -> LauncherCommand:
        """The innermost launcher, or Python."""
        return [LauncherCommand("", {}, ()), *self.chain][-1]

    @property
    def torchrun(self) -> LauncherCommand | None:
        """The call of torchrun, if there is one."""
        return self.find("torchrun")

    def option(self, name: str) -> int | None:
        """Return an option of torchrun as a number; None if it is none."""
        return self.torchrun.number(name) if self.torchrun else None

    @property
    def has_ranks(self) -> bool:
        """Whether what starts is the ranks; a single Python may start others in its own way."""
        return self.program.program != "python" or (self.layout.ranks or 0) > 1

    @property
    def numbers(self) -> dict[str, int]:
        """The arguments of the training that are whole numbers."""
        given = {name.replace("-", "_"): text for name, text in self.program.options.items()}
        stated = {**given, **self.program.stated}
        return {name: int(text) for name, text in stated.items() if natural(text) is not None}

    @property
    def degrees(self) -> dict[str, int]:
        """The parts into which the arguments of the training divide the ranks."""
        numbers = self.numbers.items()
        return {name: value for name, value in numbers if _DEGREES.fullmatch(name) and value}

    @property
    def model_parallel(self) -> int | None:
        """Ranks that share one copy of the model by these arguments; None if only a shell knows."""
        stated = self.program.stated
        if any(_DEGREES.fullmatch(name) and "$" in value for name, value in stated.items()):
            return None
        return math.prod(v for name, v in self.degrees.items() if not OF_DATA.search(name))


class Invariant(NamedTuple):
    """Something in which a start must agree with itself."""

    broken: Callable[[Start], str]
    """What disagrees; empty where all agrees, as far as known."""
    component: str
    source: str = ""
    remedy: str = ""
    """For a script; `{nodes}` and `{program}` are those of the start."""
    is_refused: bool = False
    """Whether nothing then starts as it is stated, so that the rest does not matter."""
    make: Callable[..., Result] = critical
