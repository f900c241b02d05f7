"""The contract of collectors: how they declare metrics, what they yield, what they receive.

A collector is one module with one `Collector` subclass. Its module-level `Metric` constants are its
declaration: exposition, documentation and lint use them. `collect()` reads the source once and
yields

- `Sample`: a value, made by calling its metric: `TEMPERATURE(54.0, "0", uuid, "core")`;
- `Fault`: one part (a GPU, a port, a path) could not be read; the others continue.

and ends in one of three outcomes: it returns (*ok*), raises `NotAvailable` (this machine has no
such source), or raises `SourceError` or `OSError` (*error*). An unknown value is not yielded; it is
never 0.

Collectors are synchronous: no loop, no sleep, no thread. The scheduler owns interval, deadline and
error handling.
"""

from __future__ import annotations

import bisect
import enum
import functools
import operator
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from dshealthd.core.host import Host, read
from dshealthd.core.options import Duration, constant, option

T = TypeVar("T")
series_of: Callable[[Sample], tuple[Metric, tuple[str, ...]]] = operator.itemgetter(0, 1)
"""Returns a sample's series."""
value_of: Callable[[Sample], float] = operator.itemgetter(2)
"""Returns a sample's value."""
_OF_JOBS = (
    *("job ", "process ", "processes", "checkpoints of ", "master of ", "inspector "),
    *("environment ", "adapter ", "logs of "),  # as a job's rank sees them
)
"""How the parts of sources begin that belong to users.

One that cannot be read says nothing about the node, and a user must not be able to make a node's
state unknown.
"""
_READ_BY = ", read by "
_OF_USER = re.compile(r"process \d+ of user (\d+)")


class MetricKind(enum.StrEnum):
    """Metric types by their Prometheus names."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


class Reason(enum.StrEnum):
    """Why a source or a part of it could not be read: the bounded values of the label `reason`."""

    NOT_FOUND = "not_found"
    PERMISSION_DENIED = "permission_denied"
    IO_ERROR = "io_error"
    MALFORMED = "malformed"
    """The source gave an answer that this version does not understand."""
    TIMEOUT = "timeout"
    """A call did not return within its deadline; its worker was replaced."""
    WAITING = "waiting"
    """No answer yet, but its deadline has not passed; the other parts are read in the meantime."""
    STUCK = "stuck"
    """A call did not return and its worker cannot be killed.

    No second worker is started for that part.
    """
    CANNOT_START = "cannot_start"
    """Its worker cannot be started: out of processes, descriptors or memory.

    Retried after a back-off.
    """
    OUT_OF_MEMORY = "out_of_memory"
    """Reading it needed more memory than a worker may have; the worker was replaced."""
    CRASHED = "crashed"
    """The worker ended during the call."""
    NOT_LOADED = "not_loaded"
    """The driver or its library is not loaded."""
    VERSION_MISMATCH = "version_mismatch"
    """Driver and library are of different versions: reboot, or reload the driver."""
    GPU_LOST = "gpu_lost"
    """The GPU fell off the bus."""
    RESET_REQUIRED = "reset_required"
    UNKNOWN_ERROR = "unknown_error"
    """The driver said "Unknown Error" (NVML 999)."""
    FROZEN = "frozen"
    """The source answers, but its values have stopped changing."""
    EXPIRED = "expired"
    """The last sample is older than three intervals: nothing arrived since."""
    INTERNAL = "internal"
    """A defect of dshealthd; the log has the traceback."""


def reason_in_words(reason: Reason | str) -> str:
    """Return a reason's slug as words."""
    return str(reason).replace("_", " ")


class News(enum.StrEnum):
    """What one collector notices and makes others collect at once, before they are due."""

    GPU_ERROR = "gpu_error"
    """The driver logged an error of a GPU or an NVSwitch."""
    GPU_MEMORY = "gpu_memory"
    """A GPU has more uncorrectable memory errors, or could not replace a row."""
    NVLINK = "nvlink"
    """An NVLink went up or down."""
    HANG_SUSPECTED = "hang_suspected"
    """The heartbeats of a job make a hang likely; the news is about that job."""


class Worker(enum.StrEnum):
    """The worker processes, by what may block in them: a hung call stops only its own worker."""

    DEVICE = "device"
    """NVML, whose calls can hang in the driver. No other process loads it."""
    FABRIC = "fabric"
    """Sysfs of network adapters, whose firmware may not answer."""
    STORAGE = "storage"
    """Configured paths, and other reads that wait for a file system, for `/proc/<pid>/environ` or
    for a network driver.
    """
    JOBS = "jobs"
    """Answers from the NCCL of training jobs."""
    LOGS = "logs"
    """Logs of training jobs, on any file system, and the journal."""


class Sample(NamedTuple):
    """One value of one series; `labels` are values in the order of `metric.dimensions`."""

    metric: Metric
    labels: tuple[str, ...]
    value: float


sample_of: Callable[[tuple[Metric, tuple[str, ...], float]], Sample] = functools.partial(
    tuple.__new__, Sample
)
"""Makes a sample from a tuple of its three parts, cheaper than `Sample`: thousands are made."""


def is_of_job(part: str) -> bool:
    """Return whether a part of a collector's source belongs to users, by its name."""
    return part.startswith(_OF_JOBS)


def read_by(part: str, collector: str) -> str:
    """Return the name under which a collector enters a part that others read without it.

    What happens there is blamed on this collector's readings of the part, not on the part.
    """
    return f"{part}{_READ_BY}{collector}"


def shared_part(part: str) -> str:
    """Return the part that a name from `read_by` is about; "" for any other part."""
    return part.rpartition(_READ_BY)[0]


def process_part(pid: int, user: int | None) -> str:
    """Return the name under which collectors enter a process, given its real uid, if that is known.

    A user can make what reads a process hang, and start any number of processes: of one user whose
    processes hang, a worker enters no others.
    """
    return f"process {pid}" if user is None else f"process {pid} of user {user}"


def user_part(part: str) -> str:
    """Return what a name from `process_part` shares with the user's others; "" for any other part.

    Only the whole name counts: users name their jobs, and so the parts of these.
    """
    match = _OF_USER.fullmatch(part)
    return "" if match is None else f"processes of user {match[1]}"


class Fault(NamedTuple):
    """The failure of one part of a source.

    `part` and `detail` go to the status page and the log, never into a label.
    """

    part: str
    reason: Reason
    detail: str

    @property
    def of_job(self) -> bool:
        """Whether the part is a job's own: what its user's files cause is no fault of the node."""
        return is_of_job(self.part)


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity: samples are grouped by it
class Metric:
    """A metric family as data.

    Names are complete and in base units; `help` adds what the name does not say.
    """

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    dimensions: tuple[str, ...] = field(init=False)
    """The names of the label values in a sample of the metric.

    A histogram's last one is `le`, whose value is `count` or `sum` if the sample is not a bucket.
    """

    def __post_init__(self) -> None:
        """Cache the dimensions, which every sample needs."""
        histogram = self.kind is MetricKind.HISTOGRAM
        dimensions = (*self.labels, "le") if histogram else self.labels
        object.__setattr__(self, "dimensions", dimensions)

    def __call__(self, value: float, *labels: str) -> Sample:
        """Return a sample of this metric; `labels` are in the order of `self.dimensions`."""
        if len(labels) != len(self.dimensions):
            raise TypeError(f"{self.name} takes the labels {self.dimensions}, not {labels}")
        return sample_of((self, labels, +value))  # a bool would be `true` in a document


def gauge(name: str, help: str, *labels: str) -> Metric:
    """Declare a metric whose value goes up and down."""
    return Metric(name, MetricKind.GAUGE, help, labels)


def counter(name: str, help: str, *labels: str) -> Metric:
    """Declare a metric that only grows, and restarts from 0 with its source or the agent.

    Its name ends in `_total`.
    """
    return Metric(name, MetricKind.COUNTER, help, labels)


def histogram(name: str, help: str, *labels: str) -> Metric:
    """Declare a metric of a value's distribution; `Buckets` counts it."""
    return Metric(name, MetricKind.HISTOGRAM, help, labels)


class Buckets:
    """The observations of one series of a histogram."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """Count in a bucket up to each of `bounds`, in ascending order, and one above."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one observation of a histogram."""
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def samples(self, metric: Metric, *labels: str) -> Iterator[Sample]:
        """Yield the series of the histogram `metric` with these labels, in exposition order."""
        total = 0
        for bound, count in zip((*map(float, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            yield metric(float(total), *labels, str(bound))
        yield metric(float(total), *labels, "count")
        yield metric(self._sum, *labels, "sum")


class NotAvailable(Exception):
    """This machine has no such source.

    An ordinary outcome: nothing is exported and nothing alerts.
    """


class SourceError(Exception):
    """The source exists but could not be read.

    `replace_worker` requests a new worker process, for sources whose library must be reloaded.
    """

    def __init__(self, reason: Reason, detail: str, *, replace_worker: bool = False) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.replace_worker = replace_worker


@dataclass(frozen=True, kw_only=True)
class CollectorOptions:
    """Options of every collector; a collector with options of its own derives from this."""

    enabled: bool = option(True, "Whether this collector runs.")
    interval: Duration = option("5s", "Time from one sample to the next.", minimum="100ms")
    deadline: Duration = constant("2s")
    """Timeout for one source or device: what the kernel answers from memory takes milliseconds."""


def every(period: str, *, within: str = "2s") -> type[CollectorOptions]:
    """Return the options of a collector that differ only in its default interval and deadline."""

    @dataclass(frozen=True, kw_only=True)
    class Options(CollectorOptions):
        interval: Duration = option(period, "Time from one sample to the next.", minimum="100ms")
        deadline: Duration = constant(within)

    return Options


@dataclass(kw_only=True)
class Context:
    """What a collector receives: the host, the clocks, and its process."""

    host: Host
    monotonic: Callable[[], float] = time.monotonic
    """Seconds, unaffected by clock changes; for ages and durations."""
    wall: Callable[[], float] = time.time
    """Unix time in seconds; for timestamps only."""
    entering: Callable[[str], Fault | None] = field(default=lambda _part: None)
    """Announces that the next calls touch this part, which may hang.

    If it returns a fault, the part hung before and is in quarantine: yield the fault and skip the
    part. In a worker, call it before everything that can hang; in the agent nothing can hang. See
    `read_by` for a part that several collectors read, `process_part` for a user's process.
    """
    tell: Callable[[News], None] = field(default=lambda _news: None)
    """Makes the collectors that wait for this news collect at once; see `Collector.wakes_on`."""
    heard: frozenset[tuple[News, str]] = frozenset()
    """News since the last collection of the current collectors, each with the job that it is about,
    or "" if it is about the node.
    """
    state: Path | None = None
    """Directory for state that must outlive the agent; None if there is none."""
    memory: dict[str, Any] = field(default_factory=dict)
    """Data that a worker hands on to its replacement, as JSON; small.

    Empty in the agent's first worker. It may be out of date.
    """
    read_state: Callable[[str], str] = read
    """Returns the content of a file below `state`, or raises OSError.

    In the agent, files are read beforehand, as their disk may hang.
    """
    sweep: int = 0
    """Counts the sweeps in this process, so that shared data is refreshed once per sweep."""
    services: tuple[object, ...] = ()
    """The agent's services that some collectors read.

    Empty in a worker, and in a collection without an agent.
    """
    _shared: dict[Any, Any] = field(default_factory=dict)

    def service(self, kind: type[T], absence: str) -> T:
        """Return the agent's service of this class, or raise NotAvailable with `absence`."""
        for service in self.services:
            if isinstance(service, kind):
                return service
        raise NotAvailable(absence)

    def shared(self, factory: Callable[[Context], T]) -> T:
        """Return this process's one instance of `factory` for all collectors; create it if needed.

        For example, one NVML for all GPU collectors.
        """
        if factory not in self._shared:
            self._shared[factory] = factory(self)
        return self._shared[factory]  # type: ignore[no-any-return] # keyed by its own factory

    def close(self) -> None:
        """Release what collectors share; instances that hold a resource have a `close()`."""
        for instance in self._shared.values():
            if hasattr(instance, "close"):
                instance.close()
        self._shared.clear()


class Collector(ABC):
    """One source of samples.

    The module's name is the collector's name, in the config and in every label.
    """

    name: ClassVar[str]
    Options: ClassVar[type[CollectorOptions]] = CollectorOptions
    worker: ClassVar[Worker | None] = None
    """The worker process it runs in, for sources whose calls can hang.

    None for sources that cannot hang, which are read in the agent itself.
    """

    @classmethod
    def runs_in(cls, options: Any) -> Worker | None:  # noqa: ARG003 - for the subclass
        """Return the worker process for these options, where they decide whether it can hang."""
        return cls.worker

    @classmethod
    def pace(cls, options: Any, samples: Sequence[Sample]) -> float:  # noqa: ARG003 - as above
        """Return the seconds until the next collection, given the samples of the last one."""
        return float(options.interval)

    parallel: ClassVar[bool] = False
    """Whether several processes may read its parts at once.

    When one part hangs, scouts then find out which others hang.
    """

    wakes_on: ClassVar[frozenset[News]] = frozenset()
    """News on which it collects at once, at most every `scheduler.WAKE_SPACING` seconds."""

    keeps_state: ClassVar[bool] = False
    """Whether it keeps a file with its name and `.json` below `Context.state`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.name = cls.__module__.rpartition(".")[2]

    def __init__(self, options: Any, context: Context) -> None:
        """Keep the options and the context; touch no source yet.

        `options` is an instance of `self.Options`.
        """
        self.options = options
        self.context = context
        self.host = context.host

    @classmethod
    def absent(cls, options: Any, host: Host) -> str | None:  # noqa: ARG003 - for the subclass
        """Return why this machine cannot have the collector's source, or None if it may.

        Called in the agent before each collection: it must be cheap and must not hang. A worker
        whose collectors are all absent is ended.
        """
        return None

    @abstractmethod
    def collect(self) -> Iterator[Sample | Fault]:
        """Read the collector's source once."""

    @property
    def descriptor(self) -> int | None:
        """A descriptor that is readable once there is something new to collect; None without one.

        For collectors in the agent: while it is not readable, they are collected every
        `scheduler.RESTING` seconds only. It may change with each collection.
        """
        return None

    def close(self) -> None:  # noqa: B027 - most collectors hold nothing
        """Release what the collector holds open."""
