"""What starts a job: one model of scripts, commands, configurations of Accelerate and pods."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dshealthd.core.text import plural
from dshealthd.doctor.check import Result, critical
from dshealthd.doctor.job.sources.calls import Call
from dshealthd.doctor.job.sources.launcher_command import LauncherCommand
from dshealthd.doctor.job.sources.layout import HERE, Layout
from dshealthd.doctor.job.sources.slurm_options import gpus_per_node
from dshealthd.jobs.environment import natural

LEAST_MEMORY = 256
"""MiB of a process that trains, at least: `import torch` alone has 219 (2.13)."""

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
    more: Mapping[str, int | None] = field(default_factory=dict)
    """More quantities, by name."""
    groups: int = 1
    """Jobs that it is the same in."""
    deadline: int | None = None
    """Seconds after which Kubernetes ends it."""
    strange: Sequence[str] = ()
    """Options in its script that sbatch does not have."""
    calls: Sequence[Call] = ()
    """Calls of other programs in its script."""
    script: str = ""
    """The text of the training's program, if that is there."""
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

    @property
    def stated(self) -> dict[str, tuple[str, str]]:
        """What options and, for a Python without a launcher, variables and arguments state: by the
        name of the option, how it is written, and the value.
        """
        program = self.program
        if program.program != "python":
            options = dict(program.options)
            if self.is_static and not program.is_partial:
                options = {"node-rank": "0", **options}
            return {name: (program.spelled(name), value) for name, value in options.items()}
        both = {**self.variables, **program.stated}
        return {name.lower().replace("_", "-"): (name, value) for name, value in both.items()}

    @property
    def is_static(self) -> bool:
        """Whether its ranks meet at a fixed rank 0, so that each node needs a rank of its own."""
        inner = self.torchrun
        default = "" if inner is None or inner.is_partial else "static"
        return inner is not None and inner.options.get("rdzv-backend", default) == "static"

    @property
    def several(self) -> dict[str, bool]:
        """Of what the job has several: nodes, tasks on a node, copies of the command."""
        one_node = self.torchrun is not None and self.layout.nodes == 1
        tasks = self.program.program == "python" and (self.layout.ranks_per_node or 1) > 1
        copies = self.copies > 1 and not one_node
        return {
            "": True,
            "nodes": (self.nodes or self.layout.nodes or 1) > 1,
            "tasks": tasks,
            "copies": copies,
            "static copies": copies and self.is_static,
            "groups": self.groups > 1,
            "processes": (self.more.get("processes of a pod") or 1) > 1,
        }

    @property
    def counts(self) -> dict[str, Count]:
        """The quantities of the start that are known, by name."""
        job, outer = self.requested, self.find("srun")
        step = outer.options if outer else {}
        nodes, numbers, layout = job.get("nodes", ""), self.numbers, self.layout
        is_python, has_ranks = self.program.program == "python", self.has_ranks
        processes = layout.ranks_per_node
        for one in self.chain:
            if processes and self.gpus and processes <= self.gpus:  # else one has too many
                processes = one.at_once and min(self.gpus, processes * one.at_once)
        # a hostfile may be where the job runs
        is_known = not is_python and not layout.source.startswith(HERE)
        found = {
            "nodes of the job": natural(nodes),
            "tasks of the job": natural(job.get("ntasks")),
            "GPUs of the job": gpus_per_node(job),
            "nodes of srun": natural(step.get("nodes")),
            "GPUs of srun": gpus_per_node({"nodes": nodes, **step}) or None,
            "tasks": natural({**job, **step}.get("ntasks-per-node")) if outer else None,
            "devices": numbers.get("devices") or None if is_python else None,  # 0 is an index
            "nodes": self.nodes or None,
            "nodes that it waits for": layout.nodes or None if is_known else None,
            # Lightning and NeMo compare it with Slurm's when they start
            "num_nodes": numbers.get("num_nodes") or None if is_python and has_ranks else None,
            "node": self.option("node-rank"),
            "nodes of the launcher": layout.nodes or None,
            "num_processes": self.option("num-processes"),
            "ranks": layout.ranks if has_ranks else None,
            "WORLD_SIZE": self._world_size if is_python else None,
            "processes": processes or None,
            "GPUs": self.gpus or None,
            "processes of mpirun": self._of_mpirun,
            "GPUs of workers": (self.gpus_requested or 0) * (natural(nodes or "1") or 0) or None,
            "memory": None if self.memory is None else self.memory >> 20,
            "least memory": (layout.ranks_per_node or 1) * LEAST_MEMORY,
            **self._parts,
            **self.more,
        }
        return {name: Count(value) for name, value in found.items() if value is not None}

    @property
    def _of_mpirun(self) -> int | None:
        """Ranks that mpirun starts at most; None where one on each node may start others."""
        most = max((one.processes or 0 for one in self.calls), default=0)
        is_one = most <= (natural(self.requested.get("nodes")) or 1)
        return most if most and not (is_one and self.requested) else None

    @property
    def _world_size(self) -> int | None:
        """WORLD_SIZE; None where it counts a process for each GPU of tasks with several, which such
        a task may start itself.
        """
        size, layout = natural(self.variables.get("WORLD_SIZE")), self.layout
        is_of_gpus = layout.ranks_per_node == 1 and size == (self.gpus or 0) * (layout.ranks or 0)
        return None if is_of_gpus else size

    @property
    def _parts(self) -> dict[str, int]:
        """The parts into which the arguments of the training divide ranks and batches."""
        degrees, ranks, numbers = self.degrees, self.layout.ranks, self.numbers
        whole = math.prod(degrees.values())
        micro = numbers.get("micro_batch_size", numbers.get("local_batch_size"))
        found = {"parts": whole} if degrees else {}
        if micro and not degrees:  # a configuration may have some
            found |= {"micro batch": micro, "global batch": numbers.get("global_batch_size", 0)}
        is_data = any(map(OF_DATA.search, degrees))
        if ranks and degrees and micro and self.has_ranks and not is_data and ranks % whole == 0:
            found["batch of all copies"] = micro * (ranks // whole)
            found["global batch"] = numbers.get("global_batch_size", 0)
        return found

    @property
    def gpus_requested(self) -> int | None:
        """GPUs that the job, or its srun, asks of Slurm for each node."""
        outer = self.find("srun")
        return gpus_per_node({**self.requested, **(outer.options if outer else {})})

    @property
    def of_all(self) -> str:
        """What processes of a node are a part of, for people, where their sum is what is stated."""
        total = self.option("num-processes")
        is_part = (self.layout.nodes or 1) > 1 and total
        return f" of num_processes {total}, the sum of all nodes," if is_part else ""

    @property
    def product(self) -> str:
        """The degrees of parallelism, for people."""
        return " x ".join(f"{name} {value}" for name, value in self.degrees.items())


class Count(int):
    """A quantity, to which a format gives its noun: `{0:node}` is `4 nodes`."""

    def __format__(self, noun: str) -> str:
        """Return the number, with the noun that the format names, if one."""
        return plural(int(self), *noun.split("/")) if noun else str(int(self))


class Invariant(NamedTuple):
    """Something in which a start must agree with itself."""

    broken: Callable[[Any], Iterable[str]]
    """What disagrees in a start; nothing where all agrees, as far as known."""
    component: str
    source: str = ""
    remedy: str = ""
    """For a script; `{nodes}` and `{program}` are those of the start."""
    is_refused: bool = False
    """Whether nothing then starts as it is stated, so that the rest does not matter."""
    make: Callable[..., Result] = critical


def within(
    one: str, relation: Callable[[int, int], bool], other: str, text: str
) -> Callable[[Start], Iterator[str]]:
    """Return the invariant that two quantities of a start, if they are known, have a relation."""

    def broken(start: Start) -> Iterator[str]:
        counts = start.counts
        if one in counts and other in counts and not relation(counts[one], counts[other]):
            yield text.format(counts[one], counts[other], start=start)

    return broken


def unlike(
    names: Iterable[str], pattern: str, several: str, text: str
) -> Callable[[Start], Iterator[str]]:
    """Return the invariant that what these options state is not of a kind that they cannot take,
    where the job has several of something.
    """
    search = re.compile(pattern).search

    def broken(start: Start) -> Iterator[str]:
        stated = start.stated
        for name in names:
            shown, value = stated.get(name, ("", ""))
            if (found := search(value)) and start.several[several]:
                yield text.format(f"{shown} {value[:80]}", found[1])

    return broken


def broken(start: Start, rows: Iterable[Invariant]) -> Iterator[tuple[Invariant, str]]:
    """Yield the rows in which a start disagrees with itself, and what disagrees."""
    for row in rows:
        texts = list(row.broken(start))
        yield from ((row, text) for text in texts[:1])
        if texts and row.is_refused:
            return
