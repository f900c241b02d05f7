"""The layout of a job: how many ranks it has, and on which nodes, from the first source that
says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dshealthd.doctor.job.sources.slurm_options import gpus_per_node, tasks_per_node
from dshealthd.jobs.environment import natural

if TYPE_CHECKING:
    from dshealthd.doctor.job.sources.launcher_command import LauncherCommand
    from dshealthd.probe.members.membership import Member

HERE = "GPUs of this node"
"""Where the layout of `deepspeed` comes from without a hostfile."""
_PARTS = frozenset({"include", "exclude", "num-nodes", "num-gpus", "num-accelerators"})
"""Options of `deepspeed` that take a part of a hostfile."""
_PER_GPU = frozenset({"gpu", "auto"})
"""Values with which torchrun starts one rank on each GPU that it sees."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks and nodes of a job; None if unknown."""

    ranks: int | None = None
    nodes: int | None = None
    ranks_per_node: int | None = None
    """Ranks of the node with the most."""
    hosts: tuple[tuple[str, int], ...] = ()
    """Names and ranks, from a hostfile."""
    source: str = ""
    """Where the layout comes from, for people."""


def layout(
    *,
    ranks: int | None,
    command: LauncherCommand | None,
    requested: Mapping[str, str],
    members: Sequence[Member],
    variables: Mapping[str, str],
    gpus: int | None,
) -> Layout:
    """Return the layout from all sources.

    `ranks` is what the user says, and takes precedence; `requested` is what the job asks of Slurm.
    """
    found = _launched(command, requested, members, gpus)
    if found.ranks is None and (size := natural(variables.get("WORLD_SIZE"))) is not None:
        per_node = natural(variables.get("LOCAL_WORLD_SIZE"))
        found = Layout(size, found.nodes, per_node, source="WORLD_SIZE")
    return found if ranks is None else replace(found, ranks=ranks, source="--ranks")


def _launched(
    command: LauncherCommand | None,
    requested: Mapping[str, str],
    members: Sequence[Member],
    gpus: int | None,
) -> Layout:
    nodes, ranks = natural(requested.get("nodes")), natural(requested.get("ntasks"))
    if command is None and not members:
        return Layout(nodes=nodes, source="Slurm")
    if command is None:
        return _deepspeed(None, members, gpus)
    if (inner := command.find("deepspeed")) is not None:
        is_whole = not members and _takes_all(inner)
        return _allocated(requested) if is_whole else _deepspeed(inner, members, gpus)
    if (inner := command.find("torchrun")) is not None:
        found = torchrun(inner, gpus)
        return found if found.nodes or not inner.is_partial else replace(found, nodes=nodes)
    if command.inner is None:  # a program that may launch the ranks itself
        return Layout(nodes=nodes, source="srun")
    per_node = tasks_per_node(requested)
    if ranks is None and nodes is not None and per_node is not None:
        ranks = nodes * per_node
    return Layout(ranks, nodes, per_node, source="srun")


def _takes_all(command: LauncherCommand) -> bool:
    """Return whether `deepspeed` uses all of a hostfile."""
    return "hostfile" in command.options and not (command.is_partial or _PARTS & {*command.options})


def _allocated(requested: Mapping[str, str]) -> Layout:
    """Return the layout of a hostfile that the job is yet to write: all that Slurm gives it."""
    nodes, gpus = natural(requested.get("nodes")), gpus_per_node(requested)
    return Layout(nodes * gpus, nodes, gpus, source="GPUs of Slurm") if nodes and gpus else Layout()


def torchrun(command: LauncherCommand, gpus: int | None) -> Layout:
    """Return what torchrun starts on nodes with so many GPUs."""
    default = "" if command.is_partial else "1"
    nodes = natural(command.options.get("nnodes", default))
    text = command.options.get("nproc-per-node", default)
    per_node = gpus if text in _PER_GPU else natural(text)
    ranks = None if nodes is None or per_node is None else nodes * per_node
    return Layout(ranks, nodes, per_node, source="torchrun")


def _deepspeed(
    command: LauncherCommand | None, members: Iterable[Member], gpus: int | None
) -> Layout:
    options = command.options if command else {}
    count = natural(options.get("num-gpus", options.get("num-accelerators")))
    if not members and "num-nodes" in options:
        return Layout(None, natural(options["num-nodes"]), count, source="options of deepspeed")
    pool = slots(command, members, count or gpus)
    source = "hostfile" if members else HERE
    filtered = _filtered(pool, options)
    if not filtered or (command is not None and command.is_partial):
        return Layout()
    if (nodes := natural(options.get("num-nodes"))) is not None:
        filtered = dict(list(filtered.items())[:nodes])
    hosts = tuple(
        (name, len(slots) if count is None else count) for name, slots in filtered.items()
    )
    if options.keys() & _PARTS:
        source += " and options of deepspeed"
    per_node = max((slots for _, slots in hosts), default=0)
    is_local = source.startswith(HERE)
    return Layout(
        sum(slots for _, slots in hosts), len(hosts), per_node, () if is_local else hosts, source
    )


def slots(
    command: LauncherCommand | None, members: Iterable[Member], gpus: int | None
) -> dict[str, set[int]]:
    """Return the slots of each host: of the hostfile, without one the GPUs of this node."""
    found = {member.name: set(range(member.slots or 0)) for member in members}
    if found or command is None or not gpus or "hostfile" in command.options:
        return found  # a hostfile may not be written yet, or be on another machine
    return {"localhost": set(range(gpus))}


def refusal(pool: Mapping[str, set[int]], options: Mapping[str, str]) -> str:
    """Return why DeepSpeed refuses `--include` or `--exclude`; "$" if only a shell knows."""
    if options.get("include") and options.get("exclude"):
        return "--include and --exclude exclude each other"
    for name, slots in _specified(pool, options):
        if "$" in name or None in slots:
            return "$"
        if name not in pool:  # a hostfile may be where the job runs
            return "$" if "localhost" in pool else f"{name} is not in the hostfile"
        if missing := {slot for slot in slots if slot is not None} - pool[name]:
            giver = "the job" if name == "localhost" else "the hostfile"
            return f"{name} has no slot {min(missing)}: {giver} gives it {len(pool[name])}"
    return ""


def _specified(
    pool: Mapping[str, set[int]], options: Mapping[str, str]
) -> Iterator[tuple[str, set[int | None]]]:
    """Yield the hosts of `--include` or `--exclude` with their slots."""
    for spec in filter(None, (options.get("include") or options.get("exclude", "")).split("@")):
        name, colon, text = spec.partition(":")
        slots = map(natural, text.split(",")) if colon else pool.get(name, ())
        yield name, {*slots}


def _filtered(pool: dict[str, set[int]], options: Mapping[str, str]) -> dict[str, set[int]]:
    """Apply `--include` or `--exclude` to the hosts as DeepSpeed does (launcher/runner.py).

    Return none where it names what is not there, which DeepSpeed itself refuses.
    """
    include = options.get("include", "")
    if refusal(pool, options):
        return {}
    chosen: dict[str, set[int]] = {}
    for name, slots in _specified(pool, options):
        chosen.setdefault(name, set()).update(slot for slot in slots if slot is not None)
    if include:
        return {name: chosen[name] for name in pool if name in chosen}
    left = {name: slots - chosen.get(name, set()) for name, slots in pool.items()}
    return {name: slots for name, slots in left.items() if slots}
