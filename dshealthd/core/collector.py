"""The contract of collectors: how their metrics are declared, what they yield, what they are given.

A collector is one module with one `Collector` subclass. Its module-level `Metric` constants are its
declaration: exposition, documentation and lint are made from them. `collect()` reads the source
once and yields

- `Sample`: a value, made by calling its metric: `TEMPERATURE(54.0, "0", uuid, "core")`;
- `Fault`: one part (a GPU, a port, a path) could not be read; the others go on.

and ends in one of three outcomes: it returns (*ok*), raises `NotAvailable` (this machine has no
such thing), or raises `SourceError` or `OSError` (*error*). What cannot be known is not yielded; it
is never 0.

Collectors are synchronous: no loop, no sleep, no thread. The scheduler owns interval, deadline and
error handling.
"""

from __future__ import annotations

import bisect
import enum
import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from dshealthd.core.host import Host, read
from dshealthd.core.options import Duration, option

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


T = TypeVar("T")


class MetricKind(enum.StrEnum):
    """Metric types, as Prometheus names them."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


class Reason(enum.StrEnum):
    """Why a source or a part of it could not be read: the bounded values of the label `reason`."""

    NOT_FOUND = "not_found"
    PERMISSION_DENIED = "permission_denied"
    IO_ERROR = "io_error"
    MALFORMED = "malformed"
    """The source answered with something this version does not understand."""
    TIMEOUT = "timeout"
    """A call did not return within its deadline; its worker was replaced."""
    WAITING = "waiting"
    """No answer yet, and its deadline is not over; the other parts are read meanwhile."""
    STUCK = "stuck"
    """A call did not return and its worker cannot be killed.

    No second one is started for that part.
    """
    CANNOT_START = "cannot_start"
    """Its worker cannot be started: out of processes, descriptors or memory.

    Tried again after a back-off.
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
    """The source answers, but with values that no longer move."""
    EXPIRED = "expired"
    """The last sample is older than three intervals: nothing arrived since."""
    INTERNAL = "internal"
    """A defect of dshealthd; the log has the traceback."""


class News(enum.StrEnum):
    """What one collector notices and others look into at once, not only when they are next due."""

    GPU_ERROR = "gpu_error"
    """The driver logged an error of a GPU or an NVSwitch."""
    GPU_MEMORY = "gpu_memory"
    """A GPU counts more uncorrectable memory errors, or could not replace a row."""
    NVLINK = "nvlink"
    """An NVLink went up or down."""
    HANG_SUSPECTED = "hang_suspected"
    """The heartbeats of a job, which the news is about, make a hang likely."""


class Worker(enum.StrEnum):
    """The worker processes, by what may block in them: a call that does stops its own one alone."""

    DEVICE = "device"
    """NVML, whose calls can hang in the driver. No other process loads it."""
    FABRIC = "fabric"
    """Sysfs of network adapters, behind which their firmware answers or does not."""
    STORAGE = "storage"
    """Configured paths, and what else waits for a file system, for `/proc/<pid>/environ` or for a
    network driver.
    """
    JOBS = "jobs"
    """What the NCCL of training jobs answers."""
    MASTERS = "masters"
    """Addresses at which jobs meet: name servers and networks that may not answer."""
    LOGS = "logs"
    """Logs of training jobs, on any file system."""


class Sample(NamedTuple):
    """One value of one series; `labels` are values in the order of `metric.dimensions`."""

    metric: Metric
    labels: tuple[str, ...]
    value: float


sample_of: Callable[[tuple[Metric, tuple[str, ...], float]], Sample] = functools.partial(
    tuple.__new__, Sample
)
"""Makes a sample of a tuple of its three parts, for less than `Sample` takes: thousands are made."""
series_of: Callable[[Sample], tuple[Metric, tuple[str, ...]]] = operator.itemgetter(0, 1)
"""Tells which series a sample is of."""
value_of: Callable[[Sample], float] = operator.itemgetter(2)
"""Tells the value of a sample."""


class Fault(NamedTuple):
    """One part of a source failed.

    `part` and `detail` go to the status page and the log, never into a label.
    """

    part: str
    reason: Reason
    detail: str


@dataclass(
    frozen=True, slots=True, eq=False
)  # compared by identity: it is the key that every sample is grouped by
class Metric:
    """A metric family as data.

    Names are complete and in base units; `help` says what the name does not.
    """

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    dimensions: tuple[str, ...] = field(init=False)
    """The names of the label values that a sample of the metric holds.

    Those of a histogram end with `le`, which is `count` or `sum` where the sample is no bucket.
    """

    def __post_init__(self) -> None:
        """Keep the dimensions: every sample that is made asks for them."""
        histogram = self.kind is MetricKind.HISTOGRAM
        dimensions = (*self.labels, "le") if histogram else self.labels
        object.__setattr__(self, "dimensions", dimensions)

    def __call__(self, value: float, *labels: str) -> Sample:
        """Return a sample of this metric; `labels` are the values of `self.dimensions`, in that
        order.
        """
        if len(labels) != len(self.dimensions):
            message = f"{self.name} takes the labels {self.dimensions}, not {labels}"
            raise TypeError(message)
        return sample_of((self, labels, value))


def gauge(name: str, help: str, *labels: str) -> Metric:
    """Declare a metric of a value that goes up and down."""
    return Metric(name, MetricKind.GAUGE, help, labels)


def counter(name: str, help: str, *labels: str) -> Metric:
    """Declare a metric of what only grows, and restarts from 0 with its source or the agent.

    Name ends in `_total`.
    """
    return Metric(name, MetricKind.COUNTER, help, labels)


def histogram(name: str, help: str, *labels: str) -> Metric:
    """Declare a metric of how a value is distributed; `Buckets` counts it."""
    return Metric(name, MetricKind.HISTOGRAM, help, labels)


class Buckets:
    """The observations of one series of a histogram."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """Count in buckets up to each of `bounds`, in rising order, and one above."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value in the buckets of a histogram metric."""
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def samples(self, metric: Metric, *labels: str) -> Iterator[Sample]:
        """Yield the series of a histogram `metric` with these labels, in order of writing."""
        total = 0
        for bound, count in zip((*map(float, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            yield metric(float(total), *labels, str(bound))
        yield metric(float(total), *labels, "count")
        yield metric(self._sum, *labels, "sum")


class NotAvailable(Exception):
    """This machine has no such source.

    An ordinary outcome: nothing is exported and nothing is alarmed.
    """


class SourceError(Exception):
    """The source is there and could not be read.

    `replace_worker` asks for a new worker process, for sources whose library must be loaded afresh.
    """

    def __init__(self, reason: Reason, detail: str, *, replace_worker: bool = False) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.replace_worker = replace_worker


@dataclass(frozen=True, kw_only=True)
class CollectorOptions:
    """What every collector can be told; a collector with options of its own derives from this."""

    enabled: bool = option(True, "Whether this collector runs.")
    interval: Duration = option("5s", "Time from one sample to the next.", minimum="100ms")
    deadline: Duration = option(
        "2s", "How long one source or device may take before it is given up.", minimum="10ms"
    )


@dataclass(kw_only=True)
class Context:
    """What a collector is given: the host, the clocks, and its process."""

    host: Host
    monotonic: Callable[[], float]
    """Seconds, unaffected by changes of the clock; for ages and durations."""
    wall: Callable[[], float]
    """Unix time in seconds; for timestamps only."""
    entering: Callable[[str], Fault | None] = field(default=lambda _part: None)
    """Say that what follows touches this part, which may hang.

    A fault in answer means: it hung before and is under quarantine; yield the
    fault and leave the part out. In a worker, everything that can hang is approached first; in the
    agent nothing can, and nothing is.
    """
    tell: Callable[[News], None] = field(default=lambda _news: None)
    """Have the collectors that wait for this news collect at once; see `Collector.wakes_on`."""
    heard: frozenset[tuple[News, str]] = frozenset()
    """News since the last collection of those that are collected now, each with the job that it is
    about, or "" where it is about the node.
    """
    state: Path | None = None
    """Directory for what must outlive the agent; None where there is none."""
    memory: dict[str, Any] = field(default_factory=dict)
    """What a worker hands on to the one that replaces it, as JSON; small.

    Empty in the agent's first worker. What was true then need not be true now.
    """
    read_state: Callable[[str], str] = read
    """Returns the content of a file below `state`, OSError.

    In the agent it was read beforehand, as its disk may hang.
    """
    sweep: int = 0
    """Counts the rounds of collection in this process, so that what is shared is refreshed once a
    round.
    """
    services: tuple[object, ...] = ()
    """What the agent runs beside the collectors and some of them read.

    Empty in a worker, and in a collection that no agent makes.
    """
    _shared: dict[Any, Any] = field(default_factory=dict)

    def service(self, kind: type[T], absence: str) -> T:
        """Return the agent's service of this class; NotAvailable with `absence` where none runs."""
        for service in self.services:
            if isinstance(service, kind):
                return service
        raise NotAvailable(absence)

    def shared(self, factory: Callable[[Context], T]) -> T:
        """Return this process's one instance of `factory` for all collectors, making it at first.

        One NVML for all GPU collectors.
        """
        if factory not in self._shared:
            self._shared[factory] = factory(self)
        return self._shared[factory]  # type: ignore[no-any-return] # keyed by its own factory

    def close(self) -> None:
        """Release what collectors shared; an instance that holds something has a `close()`."""
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
    """The worker process it runs in, for sources whose calls can hang; None for sources that
    cannot, read in the agent itself.
    """

    parallel: ClassVar[bool] = False
    """Whether several processes may read its parts at once.

    When one part hangs, they find out which others do.
    """

    wakes_on: ClassVar[frozenset[News]] = frozenset()
    """News on which it is collected at once, at most every `scheduler.WAKE_SPACING` seconds."""

    keeps_state: ClassVar[bool] = False
    """Whether it keeps a file of its name, with `.json`, below `Context.state`."""

    def __init_subclass__(cls) -> None:
        """Name the collector after its module."""
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
        """Say why this machine cannot have the source, or None if it may.

        Asked in the agent before each collection: cheap, and nothing that can hang. A worker whose
        collectors are all absent is ended.
        """
        return None

    @abstractmethod
    def collect(self) -> Iterator[Sample | Fault]:
        """Read the collector's source once."""

    def close(self) -> None:  # noqa: B027 - most collectors hold nothing
        """Release what the collector holds open."""
