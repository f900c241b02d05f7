"""The plural in texts with counts: "1 GPU", "2 GPUs", "1 port is up", "2 ports are up"."""

from __future__ import annotations


def plural(number: float, one: str, several: str = "") -> str:
    """Return a number and what it counts.

    `several` is for what does not take an s at its end: `plural(n, "port is", "ports are")`.
    """
    figure = f"{number:,.0f}" if float(number).is_integer() else f"{number:g}"
    return f"{figure} {one if number == 1 else several or one + 's'}"
