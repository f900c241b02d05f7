"""NVML's values as plain numbers, and the fields to read. Imports no pynvml."""

from __future__ import annotations

from dshealthd.core.collector import Metric, Sample, counter, gauge

SENTINELS = frozenset({0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF})
"""All bits set: NVML's "not available", in 32 and in 64 bits."""
ALL_LINKS = 0xFFFFFFFF
"""Scope of a field for the sum over a GPU's links."""

# The most that a count may be. A driver's number is never a loop's bound without one: a field that
# a driver reuses, or does not know, holds any 32 or 64 bits.
MAX_GPUS = 32
"""NV_MAX_DEVICES of NVIDIA's kernel module (nvlimits.h)."""
MAX_LINKS = 36
"""NVML_NVLINK_MAX_LINKS of nvml.h, NVML 13; 6 to 18 in earlier versions."""
MAX_MIG_DEVICES = 64
"""NVML names no maximum; the driver has at most 8 GPU instances of 8 compute instances each."""
MAX_PROCESSES = 4096
"""NVML names no maximum. Each context takes some 300 MiB, so 192 GB hold about 600."""


def gpu_gauge(name: str, text: str, *labels: str) -> Metric:
    """Return a gauge of each GPU, by its index and UUID."""
    return gauge(name, text, "gpu", "uuid", *labels)


def gpu_counter(name: str, text: str, *labels: str) -> Metric:
    """Return a counter of each GPU, by its index and UUID."""
    return counter(name, text, "gpu", "uuid", *labels)


def number(value: int | None) -> int | None:
    """Return a number from NVML, None for "not available"."""
    return None if value in SENTINELS else value


def told(metric: Metric, value: float | None, *labels: str, scale: float = 1) -> tuple[Sample, ...]:
    """Return a sample if NVML gave a value, else nothing; `scale` converts to the metric's unit."""
    return () if value is None else (metric(value * scale, *labels),)


class Fields:
    """Fields read together: names of pynvml constants, or pairs of a name and a link."""

    def __init__(self, *fields: str | tuple[str, int]) -> None:
        """Keep the names; they are looked up in the worker."""
        self.fields = tuple((field, 0) if isinstance(field, str) else field for field in fields)
