"""What the rules of findings ask for their samples."""

from __future__ import annotations

import json
import weakref

from dshealthd.collectors.training import (
    NODE_RANKS,
    NODE_STEP_SECONDS,
    NODE_VARIANCE,
    NODE_WORK_SECONDS,
    SLOWEST,
)
from dshealthd.core.collector import gauge
from dshealthd.findings.past import Past
from dshealthd.findings.series import Series
from dshealthd.findings.slowness import ranks

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
        moment = Series([*ranks, KEPT(1.0, "0")], past=Past())
        assert [point.labels["job"] for point in moment("test_step")] == [job] * 12
        kept += [point.labels for point in moment("test_kept")]
        del job, ranks, moment
    assert len([job for job in jobs if job() is not None]) <= 2
    assert {id(labels) for labels in kept} == {id(kept[0])}


def test_past_of_a_source_that_is_gone() -> None:
    """After a restart without the source, its series still have their labels. Of another release,
    with other labels, nothing is kept.
    """
    before = Past()
    list(Series([KEPT(7.0, "3")], past=before, now=0.0).highest("test_kept", 60.0))
    document = json.loads(json.dumps(before.document(1.0)))
    past = Past()
    past.restore(document, 1.0, 2.0)
    (point,) = Series([], past=past, now=3.0).highest("test_kept", 60.0)
    assert (dict(point.labels), point.value) == ({"gpu": "3"}, 7.0)
    renamed = gauge("dshealthd_test_kept", "For tests.", "gpu", "uuid")
    (point,) = Series([renamed(1.0, "3", "u")], past=past, now=4.0).highest("test_kept", 60.0)
    assert (dict(point.labels), point.value) == ({"gpu": "3", "uuid": "u"}, 1.0)


def test_what_there_never_was_has_no_past() -> None:
    """Rules ask for three hundred metrics, of which a node has some."""
    past = Past()
    for name in ("test_kept", "test_step"):
        assert (
            list(Series([KEPT(7.0, "3")], past=past, now=0.0).highest(name, 60.0))
            == [({"gpu": "3"}, 7.0)][: name == "test_kept"]
        )
    assert len(past.document(0.0)) == 1


def test_a_job_leaves_no_window_behind() -> None:
    """Rules look back at all jobs in one window: an agent that runs for months sees thousands."""
    past = Past()
    for number in range(100):
        job = f"run-{number}", "data"
        figures = [NODE_VARIANCE(0.1, *job, "30s", of) for of in ("between", "within")]
        figures += [NODE_WORK_SECONDS(1.0, *job, "30s", of) for of in ("slow", "usual")]
        figures += [NODE_STEP_SECONDS(2.0, *job), NODE_RANKS(8.0, *job), SLOWEST(3.0, *job)]
        list(ranks(Series(figures, past=past, now=float(number)), 0.0))
    assert len(past.document(100.0)) == 1
