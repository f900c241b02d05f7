"""One attempt to collect and what came of it; the same in the agent and in a worker process."""

from __future__ import annotations

import enum
import errno
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dshealthd.core.collector import Fault, NotAvailable, Reason, Sample, SourceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dshealthd.core.collector import Collector

log = logging.getLogger(__name__)


class CollectionOutcome(enum.StrEnum):
    """The three outcomes of a collection."""

    OK = "ok"
    NOT_AVAILABLE = "not_available"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Result:
    """What one attempt gave.

    An attempt that fails half-way keeps the samples it had: they are of this moment.
    """

    outcome: CollectionOutcome
    samples: tuple[Sample, ...] = ()
    faults: tuple[Fault, ...] = ()
    reason: Reason | None = None
    """Why it is an error; None otherwise."""
    detail: str = ""
    """Free text for people: what failed, or why the source is not available."""
    duration: float = 0.0
    """Seconds that the attempt took."""
    replace_worker: bool = False


def failed(reason: Reason, detail: str, duration: float = 0.0) -> Result:
    """Return the result of an attempt to collect that gave nothing."""
    return Result(CollectionOutcome.ERROR, reason=reason, detail=detail, duration=duration)


def not_available(detail: str) -> Result:
    """Return the result of a collector for a machine that has no such source."""
    return Result(CollectionOutcome.NOT_AVAILABLE, detail=detail)


def os_reason(error: OSError) -> Reason:
    """Return the reason for a result that an error number stands for."""
    if error.errno in (errno.ENOENT, errno.ENODEV, errno.ENXIO, errno.ENOTDIR):
        return Reason.NOT_FOUND
    if error.errno in (errno.EACCES, errno.EPERM):
        return Reason.PERMISSION_DENIED
    return Reason.IO_ERROR


def attempt(collector: Collector, monotonic: Callable[[], float]) -> Result:
    """Run `collect()` once and return its result.

    Nothing that a collector does escapes from here.
    """
    started = monotonic()
    samples: list[Sample] = []
    faults: list[Fault] = []
    outcome, reason, detail, replace = CollectionOutcome.OK, None, "", False
    try:
        for item in collector.collect():
            if isinstance(item, Sample):
                samples.append(item)
            else:
                faults.append(item)
    except NotAvailable as absence:
        return not_available(str(absence))
    except SourceError as error:
        outcome, reason, detail, replace = (
            CollectionOutcome.ERROR,
            error.reason,
            error.detail,
            error.replace_worker,
        )
    except OSError as error:
        outcome, reason, detail = CollectionOutcome.ERROR, os_reason(error), str(error)
    except MemoryError:
        # what holds it is freed with this frame, but the worker's allocator may not give it back
        outcome, reason, replace = CollectionOutcome.ERROR, Reason.OUT_OF_MEMORY, True
        detail = "it takes more memory than a worker may have"
        samples.clear()
    except Exception as error:
        # the one place that catches everything: a defect in one collector must not end the agent
        log.exception("collector %s failed; this is a defect of dshealthd", collector.name)
        outcome, reason, detail = (
            CollectionOutcome.ERROR,
            Reason.INTERNAL,
            f"{type(error).__name__}: {error}",
        )
    return Result(
        outcome, tuple(samples), tuple(faults), reason, detail, monotonic() - started, replace
    )
