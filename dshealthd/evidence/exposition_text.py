"""The agent's own exposition, read again as text by a collection of evidence.

What it says of a job, and what has moved from one to the next.
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
"""Families that tell of GPUs, fabric and kernel."""
MAX_MOVED = 60


def parse(text: str) -> Series:
    """Return the series of an exposition in Prometheus' text format.

    Lines of another form are left out.
    """
    found: Series = {}
    for name, labels, value in _LINE.findall(text):
        try:
            found.setdefault(name, {})[tuple(_LABEL.findall(labels))] = float(value)
        except ValueError:
            continue
    return found


def of_job(series: Series, name: str, job: str) -> dict[str, float]:
    """Return from an exposition the values of a metric of a job by rank.

    The largest where several series are of one rank.
    """
    found: dict[str, float] = {}
    for labels, value in series.get(name, {}).items():
        known = dict(labels)
        if known.get("job") == job and "rank" in known:
            found[known["rank"]] = max(value, found.get(known["rank"], value))
    return found


def chosen(series: Series, name: str, job: str, label: str) -> dict[str, str]:
    """Return by rank the value of the label for which an exposition's metric is 1."""
    found: dict[str, str] = {}
    for labels, value in series.get(name, {}).items():
        known = dict(labels)
        if value == 1 and known.get("job") == job and "rank" in known:
            found[known["rank"]] = known.get(label, "")
    return found


def moved(before: Series, after: Series) -> list[str]:
    """Return what is different in the second exposition, of GPUs, fabric and kernel.

    One line a series, a bounded number of them.
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
    """Write labels as they stand in an exposition."""
    pairs = labels.items() if isinstance(labels, Mapping) else labels
    return "{" + ",".join(f'{name}="{value}"' for name, value in pairs) + "}" if labels else ""
