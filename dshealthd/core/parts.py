"""Sources that consist of parts, each of which can fail on its own."""

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
    """Yield the samples of each part's reader, and a named fault for each part that fails.

    If no part can be read, raise the first failure: SourceError or OSError.
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
