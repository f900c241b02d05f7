"""Sources that consist of parts, each of which can fail for itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.core.collector import Fault, SourceError
from dshealthd.core.result import os_reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from dshealthd.core.collector import Sample


def read_parts(
    readers: Mapping[str, Callable[[], Iterable[Sample]]],
) -> Iterator[Sample | Fault]:
    """Yield what the reader of each part gives, and a fault by its name for one that fails.

    SourceError or OSError, that of the first that fails, if nothing is read at all.
    """
    read = False
    failures: dict[str, SourceError | OSError] = {}
    for part, reader in readers.items():
        try:
            samples = list(reader())
        except (SourceError, OSError) as error:
            failures[part] = error
        else:
            read = read or bool(samples)
            yield from samples
    if failures and not read:
        raise next(iter(failures.values()))
    for part, failure in failures.items():
        reason = failure.reason if isinstance(failure, SourceError) else os_reason(failure)
        yield Fault(part, reason, str(failure))
