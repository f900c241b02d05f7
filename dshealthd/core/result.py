"""One attempt to collect and its result; the same in the agent and in a worker process."""

from __future__ import annotations

import enum
import errno
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from dshealthd.core.collector import Collector, Fault, NotAvailable, Reason, Sample, SourceError
from dshealthd.core.host import read
from dshealthd.core.text import printable

log = logging.getLogger(__name__)

T = TypeVar("T")


class CollectionOutcome(enum.StrEnum):
    """The three outcomes of a collection."""

    OK = "ok"
    NOT_AVAILABLE = "not_available"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class CollectionResult:
    """The result of one attempt.

    An attempt that fails half-way keeps its samples: they are current.
    """

    outcome: CollectionOutcome
    samples: tuple[Sample, ...] = ()
    faults: tuple[Fault, ...] = ()
    reason: Reason | None = None
    """The reason for an error; None otherwise."""
    detail: str = ""
    """Free text for users: what failed, or why the source is not available."""
    duration: float = 0.0
    """Duration of the attempt in seconds."""
    replace_worker: bool = False


def failed(reason: Reason, detail: str, duration: float = 0.0) -> CollectionResult:
    """Return the result of a collection that failed without samples."""
    return CollectionResult(
        CollectionOutcome.ERROR, reason=reason, detail=detail, duration=duration
    )


def not_available(detail: str) -> CollectionResult:
    """Return the result for a machine without the collector's source."""
    return CollectionResult(CollectionOutcome.NOT_AVAILABLE, detail=detail)


def os_reason(error: OSError) -> Reason:
    """Return why a source could not be read, from its OSError."""
    if error.errno in (errno.ENOENT, errno.ENODEV, errno.ENXIO, errno.ENOTDIR):
        return Reason.NOT_FOUND
    if error.errno in (errno.EACCES, errno.EPERM):
        return Reason.PERMISSION_DENIED
    return Reason.IO_ERROR


def fault_of(part: str, error: Exception) -> Fault:
    """Return the fault of a part; what is no SourceError or OSError means malformed content."""
    if isinstance(error, SourceError):
        return Fault(part, error.reason, str(error))
    return Fault(
        part, os_reason(error) if isinstance(error, OSError) else Reason.MALFORMED, str(error)
    )


def read_parsed(path: str, parse: Callable[[str], T]) -> T:
    """Return what `parse` finds in a kernel file. SourceError if it is malformed; OSError."""
    text = read(path)
    try:
        return parse(text)
    except (ValueError, ArithmeticError) as error:
        raise SourceError(Reason.MALFORMED, f"{path}: {error}") from error


def attempt(
    collector: Collector, monotonic: Callable[[], float] = time.monotonic
) -> CollectionResult:
    """Run a collector's `collect()` once and return its result.

    No exception of a collector escapes.
    """
    started = monotonic()
    samples: list[Sample] = []
    faults: list[Fault] = []
    outcome = CollectionOutcome.ERROR
    reason, detail, replace = None, "", False
    try:
        for item in collector.collect():
            if isinstance(item, Sample):
                samples.append(item)
            else:
                faults.append(item)
        outcome = CollectionOutcome.OK
    except NotAvailable as absence:
        return not_available(str(absence))
    except SourceError as error:
        reason, detail, replace = error.reason, error.detail, error.replace_worker
    except OSError as error:
        reason, detail = os_reason(error), str(error)
    except MemoryError:
        # The frame's objects are freed, but the allocator may not return the memory to the kernel.
        reason, replace = Reason.OUT_OF_MEMORY, True
        detail = "it needs more memory than a worker may have"
        samples.clear()
    except Exception as error:
        # Catches everything: a defect in one collector must not end the agent.
        log.exception("collector %s failed; this is a defect of dshealthd", collector.name)
        reason, detail = Reason.INTERNAL, f"{type(error).__name__}: {error}"
    return CollectionResult(
        outcome, tuple(samples), tuple(faults), reason, detail, monotonic() - started, replace
    )


def one_of_many(
    part: str, read: Callable[[], Iterable[Sample | Fault]]
) -> Iterator[Sample | Fault]:
    """Yield what `read` does of one job, process or file, whose content one user decides.

    Whatever fails costs this one, and is a fault of `part`: what one user writes must not end the
    reading of everybody's. What is not about this one alone, NotAvailable, MemoryError and a worker
    to replace, ends the collection.
    """
    try:
        yield from read()
    except NotAvailable:
        raise
    except (SourceError, OSError, ValueError, ArithmeticError) as error:
        if isinstance(error, SourceError) and error.replace_worker:
            raise
        yield fault_of(part, error)
    except Exception as error:
        if isinstance(error, MemoryError):
            raise
        # Catches everything: a defect that one user can cause must not hide the others' jobs.
        log.exception("%s cannot be read; this is a defect of dshealthd", printable(part))
        yield Fault(part, Reason.INTERNAL, f"{type(error).__name__}: {error}")


def read_parts(readers: Mapping[str, Callable[[], Iterable[Sample]]]) -> Iterator[Sample | Fault]:
    """Yield the samples of each part's reader, and a named fault for each part that fails.

    If no part can be read, raise the first failure: SourceError or OSError.
    """
    any_read = False
    failures: dict[str, SourceError | OSError] = {}
    for part, reader in readers.items():
        try:
            samples = list(reader())
        except (SourceError, OSError) as error:
            failures[part] = error
        else:
            any_read = any_read or bool(samples)
            yield from samples
    if failures and not any_read:
        raise next(iter(failures.values()))
    for part, failure in failures.items():
        yield fault_of(part, failure)
