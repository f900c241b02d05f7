"""The agent's own exposition, parsed by a collection of evidence.

It gives the values of a job, and the changes from one exposition to the next.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeAlias

Labels: TypeAlias = "tuple[tuple[str, str], ...]"
Series: TypeAlias = "dict[str, dict[Labels, float]]"

_LINE = re.compile(
    r'^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})? (\S+)$', re.MULTILINE
)
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
COUNTED = re.compile(
    r"dshealthd_(gpu|nvlink|infiniband|pcie|xid|sxid|kernel_events|network|tcp)_\w+"
)
"""Metric families of GPUs, fabric and kernel."""
MAX_MOVED = 60


def parse(text: str) -> Series:
    """Return the series of an exposition in Prometheus' text format; other lines are skipped."""
    found: Series = {}
    for name, labels, value in _LINE.findall(text):
        try:
            found.setdefault(name, {})[tuple(_LABEL.findall(labels))] = float(value)
        except ValueError:
            continue
    return found


def of_job(series: Series, name: str, job: str) -> dict[str, float]:
    """Return a job's values of a metric by rank; the largest if a rank has several series."""
    found: dict[str, float] = {}
    for labels, value in series.get(name, {}).items():
        known = dict(labels)
        if known.get("training_job") == job and "rank" in known:
            found[known["rank"]] = max(value, found.get(known["rank"], value))
    return found


def chosen(series: Series, name: str, job: str, label: str) -> dict[str, str]:
    """Return by rank the value of the label for which a metric of the job is 1."""
    found: dict[str, str] = {}
    for labels, value in series.get(name, {}).items():
        known = dict(labels)
        if value == 1 and known.get("training_job") == job and "rank" in known:
            found[known["rank"]] = known.get(label, "")
    return found


def moved(before: Series, after: Series) -> list[str]:
    """Return the changes of GPU, fabric and kernel metrics between two expositions.

    One line per series, a bounded number of them.
    """
    lines = []
    for name, values in sorted(after.items()):
        if not COUNTED.fullmatch(name):
            continue
        for labels, value in values.items():
            old = before.get(name, {}).get(labels)
            if old is not None and old != value:
                lines.append(
                    f"{name}{write(labels)} {old:g} -> {value:g}"
                    + (f" (+{value - old:g})" if name.endswith("_total") else "")
                )
    rest = len(lines) - MAX_MOVED
    return lines[:MAX_MOVED] + ([f"and {rest} more"] if rest > 0 else [])


def write(labels: Mapping[str, str] | Labels) -> str:
    """Format labels as in an exposition."""
    pairs = labels.items() if isinstance(labels, Mapping) else labels
    return "{" + ",".join(f'{name}="{value}"' for name, value in pairs) + "}" if labels else ""
