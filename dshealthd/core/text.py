"""Plurals in texts with counts: "1 GPU", "2 GPUs", "1 port is up", "2 ports are up"."""

from __future__ import annotations


def plural(number: float, one: str, several: str = "") -> str:
    """Return a number and its noun.

    `several` is for plurals that do not just add an s: `plural(n, "port is", "ports are")`.
    """
    figure = f"{number:,.0f}" if float(number).is_integer() else f"{number:g}"
    return f"{figure} {one if number == 1 else several or one + 's'}"
