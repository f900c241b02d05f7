"""The ranks of training jobs on this node, grouped into runs by their rendezvous.

A job may have several runs on its nodes (a sweep within one allocation). A run has the processes
whose launcher gave them the same address, port, size and name. Ranks that differ in one of these
are in different runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from dshealthd.jobs.environment import (
    MPI_JOBS,
    RENDEZVOUS,
    Launch,
    digest,
    is_loopback,
    scheduler_job,
)
from dshealthd.jobs.processes import Key, TrainingProcess


@dataclass(slots=True)
class Run:
    """One node's part of a run."""

    job: str
    name: str
    """Equal on all its nodes; the job's name if no scheduler names the job."""
    world_size: int | None
    """World size according to its ranks."""
    rendezvous: Mapping[str, str]
    """The values of `RENDEZVOUS`."""
    ranks: dict[int, list[TrainingProcess]] = field(default_factory=lambda: defaultdict(list))
    """The processes of each rank, without its children; more than one is a rank used twice."""

    @property
    def processes(self) -> list[TrainingProcess]:
        """All processes of the run."""
        return [process for members in self.ranks.values() for process in members]

    @property
    def whole(self) -> bool:
        """Whether each rank of the run is on this node, exactly once."""
        return (
            self.world_size is not None
            and sorted(self.ranks) == list(range(self.world_size))
            and len(self.processes) == self.world_size
        )

    @property
    def many_nodes(self) -> bool:
        """Whether the run has ranks on other nodes."""
        return self.world_size is not None and len(self.ranks) < self.world_size

    def without(self, machine: str) -> dict[str, int]:
        """Return for each variable of the rendezvous a digest of the others.

        Runs that differ only in one variable have the same digest for it.

        There is none for MASTER_ADDR if it is loopback and rank 0 is on this node: it is correct
        here, and differs from that of other nodes.
        """
        address = self.rendezvous["MASTER_ADDR"]
        if not address:
            return {}
        first, found = self.processes[0], {}
        for variable in RENDEZVOUS[:3]:
            here = ""
            if is_loopback(address):
                if variable != "MASTER_ADDR":
                    here = machine + first.network
                elif 0 in self.ranks:
                    continue
            rest = [
                f"{name}={value}" for name, value in self.rendezvous.items() if name != variable
            ]
            job = scheduler_job(first.environment) or ""
            found[variable] = digest(job, *_user(first), here, *rest)
        return found


def _user(process: TrainingProcess) -> tuple[str, ...]:
    return () if process.user is None else (str(process.user),)


def _rendezvous(process: TrainingProcess) -> dict[str, str]:
    """Return the rendezvous of a rank, with the world size that its launcher set."""
    values = {name: process.environment.get(name, "") for name in RENDEZVOUS}
    values["MASTER_ADDR"] = values["MASTER_ADDR"].strip().lower()
    values["WORLD_SIZE"] = (
        "" if process.launch.world_size is None else str(process.launch.world_size)
    )
    return values


def _name(process: TrainingProcess, values: Mapping[str, str], machine: str) -> str:
    """Return the name of the run that a rank's process belongs to."""
    environment = process.environment
    job = scheduler_job(environment)
    if job is None:
        return process.job
    # With the user, because the name is compared across nodes: a stranger's claim must differ.
    parts = [job, *_user(process), *values.values()]
    # The program finds its rendezvous itself: one scheduler step, or one mpirun, is one run.
    if not values["MASTER_ADDR"]:
        parts += [
            environment.get("SLURM_STEP_ID", ""),
            *(environment.get(name, "") for name in MPI_JOBS),
        ]
    elif is_loopback(values["MASTER_ADDR"]):
        parts += [machine, process.network]
    return f"run-{digest(*parts):012x}"


def _inherits(child: Launch, parent: Launch) -> bool:
    """Return whether a rank has started a process in its own place, as an engine that generates
    rollouts, which may meet elsewhere: a launcher of one rank has no place among those of its node.
    """
    same_place = child == replace(parent, world_size=child.world_size)
    return same_place and child.local_rank is not None


class Ranks:
    """A filter that separates ranks from their children (data loaders) and from their launchers
    (torchrun below srun).

    It remembers children across calls, since their parents may exit first.
    """

    def __init__(self) -> None:
        self._children: set[Key] = set()

    def runs(self, processes: Iterable[TrainingProcess], machine: str) -> list[Run]:
        """Return the runs of these processes, oldest first; each call must pass all processes."""
        places: dict[int, tuple[TrainingProcess, str, dict[str, str]]] = {}
        for process in processes:
            values = _rendezvous(process)
            places[process.pid] = process, _name(process, values, machine), values
        children, launchers = set(), set()
        for process, name, _ in places.values():
            if process.key in self._children:  # it stays one after its parent exits
                children.add(process.key)
            if process.parent not in places:
                continue
            parent, parents, _ = places[process.parent]
            if parent.start > process.start:
                continue  # the parent's pid was reused
            same_run = (parents, parent.launch.rank) == (name, process.launch.rank)
            if same_run or _inherits(process.launch, parent.launch):
                children.add(process.key)
            elif (process.launch.world_size or 0) >= (parent.launch.world_size or 0):
                launchers.add(process.parent)
            else:
                children.add(process.key)  # a smaller run within the rank, such as an evaluation
        for pid in tuple(launchers):  # and the launchers' own parents
            while (pid := places[pid][0].parent) in places and pid not in launchers:
                launchers.add(pid)
        self._children = children
        runs: dict[tuple[str, str], Run] = {}
        for process, name, values in places.values():
            if process.pid in launchers or process.key in children:
                continue
            run = runs.setdefault(
                (process.job, name), Run(process.job, name, process.launch.world_size, values)
            )
            run.ranks[process.launch.rank].append(process)
        return list(runs.values())
