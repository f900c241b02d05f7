"""The parser of the text that NCCL's Inspector plugin writes for Prometheus.

It reduces bandwidth and time of operations by GPU to few series.

The format is that of `inspector_prom.cc` in NCCL 2.30.3 to 2.30.7, and of its predecessor in 2.29.3
to 2.29.7, which writes the last operation of each communicator. Both write label values without
escapes: a line with a quote in a communicator's name cannot be read.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

OPERATIONS = frozenset(
    (
        "AllGather",
        "AllGatherV",
        "AllReduce",
        "All2All",
        "Broadcast",
        "Recv",
        "Reduce",
        "ReduceScatter",
        "Send",
        "SendRecv",
    )
)
"""The values of the labels `collective` and `p2p_operation`; ncclFuncToString in `inspector.cc`."""
MAX_LINE = 2048
"""Characters.

The plugin's buffer of this size holds two lines; a longer line is not the plugin's and would waste
the parser's time.
"""
MAX_MALFORMED = 100
"""Malformed lines after which the rest of a file is skipped: garbage costs as much parser time as
numbers.
"""
_BANDWIDTHS = frozenset(("nccl_bus_bandwidth_gbs", "nccl_p2p_bus_bandwidth_gbs"))
_TIMES = frozenset(("nccl_collective_exec_time_microseconds", "nccl_p2p_exec_time_microseconds"))
_UNUSED = frozenset(("nccl_algorithm_bandwidth_gbs",))  # of 2.29; follows from the bus bandwidth
_GIGABYTE = 1e9  # trafficSize / 1.0E9 / timeInSec, inspectorComputeOpBw
_MICROSECONDS = 1e6
_SIZE = re.compile(r"(\d{1,7}(?:\.\d{1,2})?)(?:-\d{1,7})?(B|KB|MB|GB|TB)")
_UNITS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}
_CLASSES = (
    (1 << 28, "256MiB-"),
    (1 << 24, "16MiB-256MiB"),
    (1 << 20, "1MiB-16MiB"),
    (1 << 16, "64KiB-1MiB"),
    (0, "0-64KiB"),
)
"""Size classes of messages: below 1 MiB they show latency, from 16 MiB the bandwidth of links."""
_LARGEST = 1 << 20
"""Largest valid number of ranks or nodes of a communicator."""


class Operation(NamedTuple):
    """The operations that a number is about: the labels that are kept, each from a bounded set or a
    natural number.
    """

    job: str | None
    """The number of the Slurm job, if present."""
    node: str | None
    """Host name in the job's container."""
    name: str
    ranks: str
    nodes: str
    message: str


@dataclass(slots=True)
class Figures:
    """The figures of one operation; each may be missing."""

    bandwidth: float | None = None
    """Bytes per second on the bus, as nccl-tests counts them: geometric mean."""
    seconds: float | None = None
    """Duration: arithmetic mean."""


@dataclass(slots=True)
class Content:
    """The content of one file."""

    operations: dict[Operation, Figures]
    malformed: int = 0
    """Lines that are not the plugin's or hold no number, up to MAX_MALFORMED.

    An unfinished last line does not count.
    """


def parse(text: str) -> Content:
    """Return the content of an Inspector file.

    A line that is still being written is left for the next read. Malformed lines are counted.
    """
    # Costs 13 MiB, so it is imported only on a node with such files.
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[Operation, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    malformed = 0
    for line in text.split("\n")[:-1]:
        if malformed >= MAX_MALFORMED:
            break
        try:
            if len(line) > MAX_LINE:
                malformed += 1
                continue
            # Line by line, because the parser stops at the first line that is not a sample.
            ((name, labels, value),) = (
                sample[:3]
                for family in text_string_to_metric_families(line + "\n")
                for sample in family.samples
            )
            if name in _UNUSED:
                continue
            operation = _operation(labels)
            number = _number(name, value)
        except ValueError:
            malformed += 1
            continue
        if number > 0:  # the plugin writes 0 if it has measured nothing
            values[operation][name in _TIMES].append(number)
    return Content(
        {operation: _figures(*numbers) for operation, numbers in values.items()}, malformed
    )


def _number(name: str, value: float) -> float:
    """Return a value in base units; ValueError if its metric or number is invalid."""
    if name not in _BANDWIDTHS | _TIMES or not 0 <= value < math.inf:
        message = f"{name} {value} is not an Inspector measurement"
        raise ValueError(message)
    return value * _GIGABYTE if name in _BANDWIDTHS else value / _MICROSECONDS


def _operation(labels: Mapping[str, str]) -> Operation:
    """Return the labels that are kept; ValueError if one is missing or invalid."""
    name = labels.get("collective") or labels.get("p2p_operation")
    if name not in OPERATIONS:
        message = f"{name!r} is not an NCCL operation"
        raise ValueError(message)
    job = labels.get("slurm_job_id", "")
    return Operation(
        job=job if _is_natural(job, 1 << 62) else None,
        node=labels.get("node") or labels.get("hostname"),
        name=str(name),
        ranks=_natural(labels.get("nranks", "")),
        nodes=_natural(labels.get("n_nodes", "")),
        message=message_class(labels.get("message_size", "")),
    )


def message_class(text: str) -> str:
    """Return the size class of a message size such as `4-5GB` or `4.00GB`, with units of 1024.

    ValueError if it has another form.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        message = f"{text!r} is not a message size"
        raise ValueError(message)
    size = float(match[1]) * _UNITS[match[2]]
    return next(name for least, name in _CLASSES if size >= least)


def _natural(text: str) -> str:
    if not _is_natural(text, _LARGEST):
        message = f"{text!r} is not a number of ranks or nodes"
        raise ValueError(message)
    return str(int(text))


def _is_natural(text: str, largest: int) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 19 and 0 < int(text) <= largest  # noqa: PLR2004 - digits of 2^62


def _figures(bandwidths: list[float], times: list[float]) -> Figures:
    """Return the means over communicators, algorithms and sizes of one class.

    They are of the same kinds as the plugin's own means.
    """
    return Figures(
        _six_digits(math.exp(_mean([*map(math.log, bandwidths)]))) if bandwidths else None,
        _six_digits(_mean(times)) if times else None,
    )


def _mean(values: list[float]) -> float:
    """Return the mean, without the 0.4 MiB that `statistics` loads."""
    return math.fsum(values) / len(values)


def _six_digits(value: float) -> float:
    """Round to the Inspector's precision, so that 400 does not become 400.00000000000006."""
    return float(f"{value:.6g}")
