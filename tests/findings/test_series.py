"""What the rules of findings ask for their samples."""

from __future__ import annotations

import weakref

from dshealthd.core.collector import gauge
from dshealthd.findings.series import Series

STEP = gauge("dshealthd_test_step", "For tests.", "job", "rank")
KEPT = gauge("dshealthd_test_kept", "For tests.", "gpu")


class Job(str):
    """A label whose end can be noticed."""

    __slots__ = ("__weakref__",)


def test_series_that_are_gone_are_forgotten() -> None:
    """A job every few minutes leaves nothing behind, and what stays is named once."""
    jobs, kept = [], []
    for number in range(100):
        job = Job(f"run-{number}")
        jobs.append(weakref.ref(job))
        ranks = [STEP(1.0, job, str(rank)) for rank in range(12)]
        moment = Series([*ranks, KEPT(1.0, "0")])
        assert [point.labels["job"] for point in moment("test_step")] == [job] * 12
        kept += [point.labels for point in moment("test_kept")]
        del job, ranks, moment
    assert len([job for job in jobs if job() is not None]) <= 2
    assert {id(labels) for labels in kept} == {id(kept[0])}
