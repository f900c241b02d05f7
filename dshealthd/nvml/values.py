"""NVML's values as plain numbers, and the fields to read. Imports no pynvml."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dshealthd.core.collector import Metric, Sample

SENTINELS = frozenset({0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF})
"""All bits set: NVML's "not available", in 32 and in 64 bits."""
ALL_LINKS = 0xFFFFFFFF
"""Scope of a field for the sum over a GPU's links."""


def number(value: int | None) -> int | None:
    """Return a number from NVML, None for "not available"."""
    return None if value in SENTINELS else value


def told(metric: Metric, value: float | None, *labels: str, scale: float = 1) -> tuple[Sample, ...]:
    """Return a sample if NVML gave a value, else nothing; `scale` converts to the metric's unit."""
    return () if value is None else (metric(value * scale, *labels),)


class Fields:
    """Fields that are read together: names of pynvml constants, or pairs of a name and a scope (a
    link's number).
    """

    def __init__(self, *fields: str | tuple[str, int]) -> None:
        """Keep the names; they are looked up in the worker."""
        self.fields = tuple((field, 0) if isinstance(field, str) else field for field in fields)
