"""Snapshots of an agent with a clock that stands."""

from __future__ import annotations

from collections.abc import Mapping

from dshealthd.core.collector import Sample
from dshealthd.core.result import CollectionOutcome, CollectionResult
from dshealthd.core.snapshot import Snapshot


def snapshot(
    results: Mapping[str, CollectionResult | tuple[Sample, ...] | None],
    now: float = 0.0,
    wall: float = 0.0,
) -> Snapshot:
    """Return what collectors have found: a result, or the samples of a good one; None is one that
    has not run yet.
    """
    made = Snapshot(lambda: now, lambda: wall)
    for name, found in results.items():
        made.expect(name, 15.0)
        if found is not None:
            whole = (
                found
                if isinstance(found, CollectionResult)
                else CollectionResult(CollectionOutcome.OK, found)
            )
            made.put(name, whole)
    return made
