"""What a job asks of Slurm, by the long names of options."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dshealthd.jobs.environment import natural

_MEMORY = re.compile(r"(\d{1,12})([KMGTkmgt]?)B?")
_GPUS = re.compile(r"gpu(?::[A-Za-z][\w.-]*)?(?::(\d+))?")


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
