"""What NCCL's Inspector plugin writes for Prometheus: its files by name, owner and age, and the
parser of their text.
"""

from __future__ import annotations

import enum
import itertools
import math
import os
import re
import stat
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dshealthd.core import documents
from dshealthd.linux.credentials import assumed
from dshealthd.linux.process_root import rights_of
from dshealthd.linux.regular_files import Irregular, open_entry
from dshealthd.linux.regular_files import read as read_bytes

OPERATIONS = frozenset((
    "AllGather", "AllGatherV", "AllReduce", "All2All", "Broadcast", "Recv", "Reduce",
    "ReduceScatter", "Send", "SendRecv",
))  # fmt: skip
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
_FASTEST, _SLOWEST = 1e5, 1e-9
"""Gigabytes per second: fifty times a B200's NVLink bandwidth, and a byte per second."""
_SHORTEST, _LONGEST = 1e-3, 1e13
"""Microseconds: a nanosecond, the resolution of the plugin's clock, and four months."""
_SIZE = re.compile(r"(\d{1,7}(?:\.\d{1,2})?)(?:-\d{1,7})?(B|KB|MB|GB|TB)")
_UNITS = {unit: 1024**power for power, unit in enumerate(("B", "KB", "MB", "GB", "TB"))}
_CLASSES = (
    (1 << 28, "256MiB-"),
    (1 << 24, "16MiB-256MiB"),
    (1 << 20, "1MiB-16MiB"),
    (1 << 16, "64KiB-1MiB"),
    (0, "0-64KiB"),
)
"""Size classes of messages: below 1 MiB they show latency, from 16 MiB the bandwidth of links."""
_NATURAL = re.compile(r"[1-9][0-9]{0,18}")
"""As many digits as 2^63 has."""
_LARGEST = 1 << 20
"""Largest valid number of ranks or nodes of a communicator."""
MAX_ENTRIES = 20_000
"""Most entries of a directory that are read."""
_NAME = re.compile(r"nccl_inspector_metrics_([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\.prom")


class MeasuredOperation(NamedTuple):
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
    """The content of one file of NCCL's Inspector."""

    operations: dict[MeasuredOperation, Figures]
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

    values: dict[MeasuredOperation, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
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
        except documents.MISSHAPEN:  # the parser raises IndexError at some
            malformed += 1
            continue
        if number > 0:
            values[operation][name in _TIMES].append(number)
    return Content(
        {operation: _figures(*numbers) for operation, numbers in values.items()}, malformed
    )


def _number(name: str, value: float) -> float:
    """Return a value in base units; ValueError if its metric or number is invalid.

    The plugin writes 0 if it has measured nothing.
    """
    least, most = (_SLOWEST, _FASTEST) if name in _BANDWIDTHS else (_SHORTEST, _LONGEST)
    if name not in _BANDWIDTHS | _TIMES or not (value == 0.0 or least <= value <= most):
        raise ValueError(f"{name} {value} is not an Inspector measurement")
    return value * _GIGABYTE if name in _BANDWIDTHS else value / _MICROSECONDS


def _operation(labels: Mapping[str, str]) -> MeasuredOperation:
    """Return the labels that are kept; ValueError if one is missing or invalid."""
    name = labels.get("collective") or labels.get("p2p_operation")
    if name not in OPERATIONS:
        raise ValueError(f"{name!r} is not an NCCL operation")
    job = labels.get("slurm_job_id", "")
    return MeasuredOperation(
        job=job if _NATURAL.fullmatch(job) else None,
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
        raise ValueError(f"{text!r} is not a message size")
    size = float(match[1]) * _UNITS[match[2]]
    return next(name for least, name in _CLASSES if size >= least)


def _natural(text: str) -> str:
    if not _NATURAL.fullmatch(text) or int(text) > _LARGEST:
        raise ValueError(f"{text!r} is not a number of ranks or nodes")
    return text


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


class InspectorFileState(enum.StrEnum):
    """Whether an Inspector file is taken, or why not."""

    TAKEN = "taken"
    STALE = "stale"
    """It was last written too long ago, or in the future: its numbers are not current."""
    ELSEWHERE = "elsewhere"
    """It is another node's, in a directory that nodes share."""
    FOREIGN = "foreign"
    """Its owner may not write there for the job."""
    IRREGULAR = "irregular"
    """It is a link, a FIFO, a device or a directory."""
    TOO_LARGE = "too_large"
    UNREADABLE = "unreadable"
    LEFT_OUT = "left_out"
    """It exceeds MAX_FILES."""


class FileRefused(Exception):
    """A file that is not taken; `state` says why."""

    def __init__(self, state: InspectorFileState) -> None:
        super().__init__(state)
        self.state = state


@dataclass(slots=True)
class Directory:
    """An open directory, and whose files are taken from it."""

    descriptor: int
    part: str
    """Its name as a part that the collector enters."""
    owners: set[int] = field(default_factory=set)
    """Users whose files are taken."""
    jobs: set[str] = field(default_factory=set)
    """Jobs whose processes name it."""


class Directories(dict[tuple[int, int], Directory]):
    """Directories by device and inode, so that each occurs once, whatever its paths."""

    def add(self, descriptor: int, part: str) -> Directory:
        """Return the entry of an open Inspector directory.

        If it is known under another path, that entry stays and this descriptor is closed.
        """
        status = os.fstat(descriptor)
        known = self.get((status.st_dev, status.st_ino))
        if known is not None:
            os.close(descriptor)
            return known
        return self.setdefault((status.st_dev, status.st_ino), Directory(descriptor, part))


@dataclass(frozen=True, slots=True)
class File:
    """An Inspector file that was read."""

    uuid: str
    """UUID of the GPU, in NVML's form."""
    owner: int
    """User id of the file's owner."""
    written: float
    """Unix time of the file's last change."""
    text: str


def file_names(directory: int) -> dict[str, str]:
    """Return the names of the Inspector files in an open directory, in order, each with the UUID of
    its GPU in NVML's form.
    """
    with os.scandir(directory) as entries:
        names = (entry.name for entry in itertools.islice(entries, MAX_ENTRIES))
        found = (match for name in names if (match := _NAME.fullmatch(name)))
        return dict(sorted((match[0], f"GPU-{match[1]}") for match in found))


def read(
    directory: int,
    name: str,
    uuid: str,
    owners: Collection[int],
    oldest: float,
    newest: float,
    limit: int,
) -> File:
    """Read the Inspector file of a GPU, if it belongs to one of `owners` and was written between
    `oldest` and `newest`, in Unix time.

    Raises FileRefused, and OSError if it cannot be read. `limit` is in bytes.
    """
    found = os.stat(name, dir_fd=directory, follow_symlinks=False)
    _admit(found, owners, oldest, newest)
    try:
        with assumed(rights_of(found)):
            descriptor = open_entry(directory, name)
    except Irregular as error:
        raise FileRefused(InspectorFileState.IRREGULAR) from error
    try:
        status = os.fstat(descriptor)
        _admit(status, owners, oldest, newest)
        data = read_bytes(descriptor, limit + 1)
    finally:
        os.close(descriptor)
    if len(data) > limit:
        raise FileRefused(InspectorFileState.TOO_LARGE)
    return File(uuid, status.st_uid, status.st_mtime, data.decode(errors="replace"))


def _admit(status: os.stat_result, owners: Collection[int], oldest: float, newest: float) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise FileRefused(InspectorFileState.IRREGULAR)
    if status.st_uid not in owners:
        raise FileRefused(InspectorFileState.FOREIGN)
    if not oldest <= status.st_mtime <= newest:
        raise FileRefused(InspectorFileState.STALE)
