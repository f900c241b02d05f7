"""The layout of a job: how many ranks it has, and on which nodes, from the first source that
says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dshealthd.doctor.job.sources.slurm_script import requested, tasks_per_node
from dshealthd.jobs.environment import natural

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dshealthd.doctor.job.sources.launcher_command import LauncherCommand
    from dshealthd.doctor.job.sources.slurm_script import SlurmScript
    from dshealthd.probe.members.membership import Member

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


class FilterError(ValueError):
    """`--include` or `--exclude` of `deepspeed` cannot be applied to the hostfile."""


def layout(
    *,
    ranks: int | None,
    command: LauncherCommand | None,
    script: SlurmScript | None,
    members: Iterable[Member],
    variables: Mapping[str, str],
    gpus: int | None,
) -> Layout:
    """Return the layout from all sources; `ranks` is what the user says, and takes precedence.

    FilterError if a filter of the launcher cannot be applied.
    """
    found = _launched(command, script, members, gpus)
    if found.ranks is None and (size := natural(variables.get("WORLD_SIZE"))) is not None:
        found = Layout(size, None, natural(variables.get("LOCAL_WORLD_SIZE")), source="WORLD_SIZE")
    if ranks is not None:
        return Layout(ranks, found.nodes, found.ranks_per_node, found.hosts, "--ranks")
    return found


def _launched(
    command: LauncherCommand | None,
    script: SlurmScript | None,
    members: Iterable[Member],
    gpus: int | None,
) -> Layout:
    asked = requested(command, script)
    nodes = natural(asked.get("nodes", "1" if script else None))
    if command is None or (inner := command.find("deepspeed")) is not None:
        return _deepspeed(inner if command else None, members, gpus)
    if (inner := command.find("torchrun")) is not None:
        return _torchrun(inner, gpus)
    if command.inner is None:  # a program that may launch the ranks itself
        return Layout(None, nodes, None, source="srun")
    per_node = tasks_per_node(asked)
    ranks = natural(asked.get("ntasks"))
    if ranks is None and nodes is not None and per_node is not None:
        ranks = nodes * per_node
    return Layout(ranks, nodes, per_node, source="srun")


def _torchrun(command: LauncherCommand, gpus: int | None) -> Layout:
    standalone = "standalone" in command.options
    default = "" if command.is_partial else "1"
    nodes = 1 if standalone else natural(command.options.get("nnodes", default))
    text = command.options.get("nproc-per-node", default)
    per_node = gpus if text in _PER_GPU else natural(text)
    ranks = None if nodes is None or per_node is None else nodes * per_node
    return Layout(ranks, nodes, per_node, source="torchrun")


def _deepspeed(
    command: LauncherCommand | None, members: Iterable[Member], gpus: int | None
) -> Layout:
    pool = {member.name: list(range(member.slots or 0)) for member in members}
    if command is not None and command.is_partial:
        return Layout()
    options = command.options if command else {}
    source = "hostfile"
    if not pool:
        if command is None or gpus is None:
            count = natural(options.get("num-gpus", options.get("num-accelerators")))
            if command is None or count is None or "num-nodes" in options:
                return Layout()
            gpus = count
        pool, source = {"localhost": list(range(gpus))}, "GPUs of this node"
    pool = _filtered(pool, options)
    if (count := natural(options.get("num-nodes"))) is not None:
        pool = dict(list(pool.items())[:count])
    if (count := natural(options.get("num-gpus", options.get("num-accelerators")))) is not None:
        pool = {name: list(range(count)) for name in pool}
    if options.keys() & {"include", "exclude", "num-nodes", "num-gpus", "num-accelerators"}:
        source += " and options of deepspeed"
    hosts = tuple((name, len(slots)) for name, slots in pool.items())
    return Layout(
        sum(slots for _, slots in hosts),
        len(hosts),
        max((slots for _, slots in hosts), default=0),
        hosts if source.startswith("hostfile") else (),
        source,
    )


def _filtered(pool: dict[str, list[int]], options: Mapping[str, str]) -> dict[str, list[int]]:
    """Apply `--include` and `--exclude` to the hosts as DeepSpeed does (launcher/runner.py)."""
    include, exclude = options.get("include", ""), options.get("exclude", "")
    if include and exclude:
        message = "--include and --exclude are mutually exclusive"
        raise FilterError(message)
    chosen: dict[str, list[int]] = {}
    for spec in (include or exclude).split("@"):
        if not spec:
            continue
        name, colon, text = spec.partition(":")
        if name not in pool:
            message = f"{name} is not in the hostfile"
            raise FilterError(message)
        slots = [natural(slot) for slot in text.split(",")] if colon else [*pool[name]]
        for slot in slots:
            if slot not in pool[name]:
                message = f"{spec}: {name} has slots 0 to {len(pool[name]) - 1}"
                raise FilterError(message)
        chosen[name] = sorted(
            {*chosen.get(name, []), *(slot for slot in slots if slot is not None)}
        )
    if include:
        return {name: chosen[name] for name in pool if name in chosen}
    left = {
        name: [slot for slot in slots if slot not in chosen.get(name, ())]
        for name, slots in pool.items()
    }
    return {name: slots for name, slots in left.items() if slots}


def count_gpus() -> int:
    """Return how many GPUs this node has; ValueError if NVML fails."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError as error:
        raise ValueError(str(error)) from error
