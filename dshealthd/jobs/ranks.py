"""The ranks of training jobs on this node, put together into runs by their rendezvous.

Which processes are ranks, and which rendezvous they share.

A job may run several times over on its nodes (a sweep within one allocation), so that what belongs
together is the run: the processes whose launcher gave them the same address, port, size and name.
Ranks that disagree about one of these are in different runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dshealthd.jobs.environment import is_loopback, scheduled
from dshealthd.jobs.processes import TrainingProcess

if TYPE_CHECKING:
    from collections.abc import Iterable

RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")
"""What all ranks of a run must have in common."""
_MPI = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
Key = tuple[int, int]
"""Pid and start time, which make a process unique."""


def digest(*parts: str) -> int:
    """Return 48 bits of a digest of a run: a number that a float holds exactly."""
    import hashlib  # with OpenSSL behind it: half a MiB in each worker that reads ranks

    return int.from_bytes(
        hashlib.blake2b("\0".join(parts).encode(errors="replace"), digest_size=6).digest(), "big"
    )


@dataclass(slots=True)
class Run:
    """What one node has of a run."""

    job: str
    name: str
    """Equal on all its nodes; that of the job, where no scheduler names it."""
    world_size: int | None
    """What its ranks say that it is."""
    rendezvous: Mapping[str, str]
    """The values of `RENDEZVOUS`."""
    ranks: dict[int, list[TrainingProcess]] = field(default_factory=lambda: defaultdict(list))
    """The processes of each rank, without those that a rank has started.

    More than one is a rank used twice.
    """

    @property
    def processes(self) -> list[TrainingProcess]:
        """All processes of the run."""
        return [process for members in self.ranks.values() for process in members]

    @property
    def whole(self) -> bool:
        """Whether each rank of the run is here, once."""
        return (
            self.world_size is not None
            and sorted(self.ranks) == list(range(self.world_size))
            and len(self.processes) == self.world_size
        )

    @property
    def many_nodes(self) -> bool:
        """Whether the run has ranks elsewhere."""
        return self.world_size is not None and len(self.ranks) < self.world_size

    def without(self, machine: str) -> dict[str, int]:
        """Return a digest of the rendezvous without each of its variables.

        That of runs which disagree about this one alone is equal.

        The address is left in where it is the loopback of the node that has rank 0: it is right
        there, and differs from the others'.
        """
        address = _address(self.rendezvous)
        if not address:
            return {}
        found = {}
        for variable in RENDEZVOUS[:3]:
            if variable == "MASTER_ADDR" and is_loopback(address) and 0 in self.ranks:
                continue
            rest = [
                f"{name}={value}"
                for name, value in sorted(self.rendezvous.items())
                if name != variable
            ]
            first = self.processes[0]
            here = (
                machine + first.network
                if is_loopback(address) and variable != "MASTER_ADDR"
                else ""
            )
            found[variable] = digest(scheduled(first.environment) or "", *_user(first), here, *rest)
        return found


def _address(values: Mapping[str, str]) -> str:
    return values.get("MASTER_ADDR", "").strip().lower()


def _user(process: TrainingProcess) -> tuple[str, ...]:
    return () if process.user is None else (str(process.user),)


def _rendezvous(process: TrainingProcess) -> dict[str, str]:
    """Return the values of its rendezvous by which a rank finds the others.

    Of the size, that which its launcher names so.
    """
    values = {name: process.environment.get(name, "") for name in RENDEZVOUS}
    values["MASTER_ADDR"] = _address(values)
    values["WORLD_SIZE"] = (
        "" if process.launch.world_size is None else str(process.launch.world_size)
    )
    return values


def _name(process: TrainingProcess, values: Mapping[str, str], machine: str) -> str:
    """Return the name of the run that a rank's process belongs to."""
    environment = process.environment
    job = scheduled(environment)
    if job is None:
        return process.job
    # With its user, as the name is compared across nodes: a stranger's claim elsewhere is another.
    parts = [job, *_user(process), *values.values()]
    # The program finds out by itself: one step of the scheduler's, or one mpirun, is one run.
    if not values["MASTER_ADDR"]:
        parts += [
            environment.get("SLURM_STEP_ID", ""),
            *(environment.get(name, "") for name in _MPI),
        ]
    elif is_loopback(values["MASTER_ADDR"]):
        parts += [machine, process.network]
    return f"run-{digest(*parts):012x}"


class Ranks:
    """Tells ranks from what they start (data loaders) and from what starts them (torchrun below
    srun), over the lives of processes.
    """

    def __init__(self) -> None:
        """Know no process yet."""
        self._children: set[Key] = set()

    def runs(self, processes: Iterable[TrainingProcess], machine: str) -> list[Run]:
        """Return the runs of these processes, the oldest first, of which all are given at each
        call.
        """
        places: dict[int, tuple[TrainingProcess, str, dict[str, str]]] = {}
        for process in processes:
            values = _rendezvous(process)
            places[process.pid] = process, _name(process, values, machine), values
        children, launchers = set(), set()
        for process, name, _ in places.values():
            key = process.pid, process.start
            if key in self._children:  # and stays one, when its parent is gone
                children.add(key)
            if process.parent not in places:
                continue
            parent, parents, _ = places[process.parent]
            if parent.start > process.start:
                continue  # the parent's pid is another's by now
            if (parents, parent.launch.rank) == (name, process.launch.rank):
                children.add(key)
            elif (process.launch.world_size or 0) >= (parent.launch.world_size or 0):
                launchers.add(process.parent)
            else:
                children.add(key)  # a smaller run within the rank, such as an evaluation
        for pid in tuple(launchers):  # and what has started the launcher
            while (pid := places[pid][0].parent) in places and pid not in launchers:
                launchers.add(pid)
        self._children = children
        runs: dict[tuple[str, str], Run] = {}
        for process, name, values in places.values():
            if process.pid in launchers or (process.pid, process.start) in children:
                continue
            run = runs.setdefault(
                (process.job, name), Run(process.job, name, process.launch.world_size, values)
            )
            run.ranks[process.launch.rank].append(process)
        return list(runs.values())
