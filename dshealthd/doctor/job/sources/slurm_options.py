"""What a job asks of Slurm, by the long names of options."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from dshealthd.jobs.environment import natural

_MEMORY = re.compile(r"(\d{1,12})([KMGTkmgt]?)B?")
_GPUS = re.compile(r"gpu(?::[A-Za-z][\w.-]*)?(?::(\d+))?")


_OF_GPUS = frozenset(
    {"gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres", "ntasks-per-gpu"}
)
"""Options that say how many GPUs a job or step takes."""
PLACES = frozenset({"nodelist", "exclude", "relative", "w", "x", "r"})
"""Options that choose some of the nodes."""


def tasks_per_node(options: Mapping[str, str]) -> int | None:
    """Return the tasks that Slurm starts on the node with the most; None without a number."""
    tasks, nodes = natural(options.get("ntasks")), natural(options.get("nodes"))
    given = natural(options.get("ntasks-per-node"))
    if tasks is not None and nodes and (given is None or tasks != nodes * given):
        # with --ntasks, --ntasks-per-node is only a maximum (srun(1))
        tasks = -(-tasks // nodes)
        return tasks if given is None else min(tasks, given)
    return given


def gpus_per_node(options: Mapping[str, str]) -> int | None:
    """Return the GPUs that Slurm gives a job on each node; None without a request.

    These are `--gpus-per-node`, `--gres`, `--gpus-per-task` and `--gpus` (sbatch(1)).
    """
    if (text := options.get("gpus-per-node")) is not None:
        return _sum(text)
    entries = map(_GPUS.fullmatch, options.get("gres", "").split(","))
    if counts := [match[1] or "1" for match in entries if match]:
        return _sum(",".join(counts))
    if (text := options.get("gpus-per-task")) is not None:
        each, tasks = _sum(text), tasks_per_node(options)
        return None if each is None or tasks is None else each * tasks
    total = _sum(options.get("gpus", ""))
    nodes = natural(options.get("nodes"))
    return total // nodes if total and nodes and total % nodes == 0 else None


def with_nodes(asked: Mapping[str, str]) -> Mapping[str, str]:
    """Return what a job asks of Slurm, with the number of nodes where it follows from tasks."""
    tasks, each = natural(asked.get("ntasks")), natural(asked.get("ntasks-per-node"))
    return {"nodes": str(tasks // each), **asked} if tasks and each and tasks % each == 0 else asked


def nodes_of(job: Mapping[str, str]) -> int | None:
    """Return the nodes of a job; None where Slurm chooses their number."""
    asked = with_nodes(job)
    return natural(asked.get("nodes", "1" if asked.get("ntasks", "1") == "1" else ""))


def nodes_of_step(job: Mapping[str, str], step: Mapping[str, str]) -> int | None:
    """Return the nodes of a step: without an option those of its job, but none without a task
    (srun(1), --nodes); None if unknown.
    """
    tasks = natural(step.get("ntasks"))
    nodes = natural(step["nodes"]) if "nodes" in step else nodes_of(job)
    if "nodes" not in step and step.keys() & PLACES:
        nodes = 1 if tasks == 1 else None
    return min(nodes, tasks) if nodes and tasks else nodes


def gpus_of_step(job: Mapping[str, str], step: Mapping[str, str]) -> int | None:
    """Return the GPUs that a step takes of all its nodes; None if unknown.

    It takes all of its job's there unless it asks for some (srun(1), --gres).
    """
    own, nodes = step.keys() & _OF_GPUS, nodes_of_step(job, step)
    if step.get("gres") == "none":
        return 0
    if own == {"gpus"}:
        return _sum(step["gpus"])
    if nodes is None:
        return None
    rest = {name: value for name, value in job.items() if name not in _OF_GPUS}
    each = gpus_per_node({**rest, **step, "nodes": str(nodes)} if own else job)
    return None if each is None else nodes * each


def together(components: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return what components of a heterogeneous job are given together: their nodes, and options
    that are the same in all.
    """
    first, *others = [with_nodes(one) for one in components] or [{}]
    common = {name: value for name, value in first.items() if name != "nodes" or not others}
    for one in others:
        common = {name: value for name, value in common.items() if one.get(name) == value}
    counts = [natural(one.get("nodes", "1")) or 0 for one in (first, *others)]
    return {**common, "nodes": str(sum(counts))} if others and all(counts) else common


def _sum(text: str) -> int | None:
    """Return the sum of the numbers in `[TYPE:]NUMBER,...`; None if one is none."""
    counts = [natural(one.rpartition(":")[2]) for one in text.split(",")]
    return None if None in counts else sum(filter(None, counts))


def memory(options: Mapping[str, str]) -> int | None:
    """Return the bytes of memory that Slurm gives a job on each node; None for all, or unknown."""
    per_cpu = (natural(options.get("cpus-per-task", "1")) or 0) * (tasks_per_node(options) or 0)
    shares = {"mem": 1, "mem-per-gpu": gpus_per_node(options) or 0, "mem-per-cpu": per_cpu}
    for name, count in shares.items():
        if match := _MEMORY.fullmatch(options.get(name, "")):
            unit = 1 << 10 * " KMGT".index((match[2] or "M").upper())
            return int(match[1]) * unit * count or None
    return None


def seconds(limit: str) -> int | None:
    """Return the seconds of Slurm's [DAYS-][[HOURS:]MINUTES[:SECONDS]]; None if it is none."""
    days, dash, rest = limit.rpartition("-")
    parts = [natural(part) for part in rest.split(":")]
    if None in parts or (dash and natural(days) is None):
        return None
    numbers = [part or 0 for part in parts]
    has_hours = dash or len(numbers) == len(("hours", "minutes", "seconds"))
    hours = [*(numbers if has_hours else [0, *numbers]), 0, 0][:3]
    return (natural(days) or 0) * 86_400 + hours[0] * 3_600 + hours[1] * 60 + hours[2]
