"""What a scrape shows of results: fresh, failing, absent, expired."""

from __future__ import annotations

import pytest

from dshealthd.core.collector import Fault, Metric, MetricKind, Reason, Sample
from dshealthd.core.exposition import Tier
from dshealthd.core.result import CollectionOutcome, CollectionResult, failed, not_available
from dshealthd.core.snapshot import Snapshot
from tests.jobs.machines import Clock

VALUE = Metric("x_value", MetricKind.GAUGE, "X.")


def make() -> tuple[Snapshot, Clock]:
    """Return a snapshot that expects one collector whose samples live for 17 s, and its clock."""
    clock = Clock()
    snapshot = Snapshot(clock, clock)
    snapshot.expect("c", 17.0)
    return snapshot, clock


def lines(snapshot: Snapshot) -> dict[str, float]:
    """Return the series of a scrape."""
    text = snapshot.body(lambda: ()).decode()
    return {
        key: float(value)
        for key, _, value in (
            line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")
        )
    }


def ok(value: float, *faults: Fault) -> CollectionResult:
    """Return a result with one sample."""
    return CollectionResult(CollectionOutcome.OK, (Sample(VALUE, (), value),), faults, duration=0.5)


def test_success() -> None:
    """A success shows its samples, up, how long it took and when it was."""
    snapshot, _ = make()
    assert lines(snapshot) == {}
    assert not snapshot.complete()
    snapshot.put("c", ok(7.0))
    assert snapshot.complete()
    assert lines(snapshot) == {
        'dshealthd_collector_available{collector="c"}': 1.0,
        'dshealthd_collector_up{collector="c"}': 1.0,
        'dshealthd_collector_duration_seconds{collector="c"}': 0.5,
        'dshealthd_collector_last_success_timestamp_seconds{collector="c"}': 1000.0,
        "x_value": 7.0,
    }


def test_failure_takes_the_samples_away() -> None:
    """After a failure the old samples are gone, not zero. Up is 0, the reason stands, and the age
    of the last success stays.
    """
    snapshot, clock = make()
    snapshot.put("c", ok(7.0))
    clock.now += 5
    snapshot.put("c", failed(Reason.TIMEOUT, "no answer", 2.0))
    shown = lines(snapshot)
    assert "x_value" not in shown
    assert shown['dshealthd_collector_up{collector="c"}'] == 0.0
    assert shown['dshealthd_collector_failing{collector="c",reason="timeout"}'] == 1.0
    assert shown['dshealthd_collector_errors_total{collector="c",reason="timeout"}'] == 1.0
    assert shown['dshealthd_collector_last_success_timestamp_seconds{collector="c"}'] == 1000.0
    snapshot.put("c", ok(8.0))
    shown = lines(snapshot)
    assert shown["x_value"] == 8.0
    assert 'dshealthd_collector_failing{collector="c",reason="timeout"}' not in shown
    assert shown['dshealthd_collector_errors_total{collector="c",reason="timeout"}'] == 1.0


def test_absence_is_neither_up_nor_down() -> None:
    """A machine without the source has `available` 0 and no `up` at all, so that no rule on `up ==
    0` fires.
    """
    snapshot, _ = make()
    snapshot.put("c", not_available("no such hardware"))
    assert lines(snapshot) == {'dshealthd_collector_available{collector="c"}': 0.0}


@pytest.mark.parametrize(
    "part",
    [
        *("job slurm-7", "process 12", "process 12 of user 1000", "checkpoints of run-1"),
        *("master of run-1", "inspector /home/x", "logs of run-1"),
    ],
)
def test_a_job_s_own_part_is_no_fault_of_the_collector(part: str) -> None:
    """What a user's files cause is counted, and is not the collector's state on this node."""
    snapshot, _ = make()
    snapshot.put("c", ok(7.0, Fault(part, Reason.IO_ERROR, "a FIFO")))
    shown = lines(snapshot)
    assert shown['dshealthd_collector_up{collector="c"}'] == 1.0
    assert shown['dshealthd_collector_errors_total{collector="c",reason="io_error"}'] == 1.0
    assert not [name for name in shown if name.startswith("dshealthd_collector_failing")]


def test_faults_of_parts_are_counted() -> None:
    """A collector of which one part fails is up, and says why and how often."""
    snapshot, _ = make()
    for _ in range(3):
        snapshot.put(
            "c",
            ok(
                7.0,
                Fault("gpu 3", Reason.GPU_LOST, "fell off the bus"),
                Fault("gpu 5", Reason.GPU_LOST, "the same"),
            ),
        )
    shown = lines(snapshot)
    assert shown['dshealthd_collector_up{collector="c"}'] == 1.0
    assert shown['dshealthd_collector_failing{collector="c",reason="gpu_lost"}'] == 1.0
    assert shown['dshealthd_collector_errors_total{collector="c",reason="gpu_lost"}'] == 6.0


def test_silence_expires() -> None:
    """Samples of a collector from which nothing comes any more disappear by themselves, also from a
    cached body.
    """
    snapshot, clock = make()
    snapshot.put("c", ok(7.0))
    snapshot.expect("b", 30.0)
    assert not snapshot.complete()
    snapshot.put("b", failed(Reason.TIMEOUT, "hung"))
    assert "x_value" in lines(snapshot)
    clock.now += 17.1
    shown = lines(snapshot)
    assert "x_value" not in shown
    assert shown['dshealthd_collector_up{collector="c"}'] == 0.0
    assert shown['dshealthd_collector_failing{collector="c",reason="expired"}'] == 1.0


def test_unchanged_body_is_cached_and_own_samples_are_of_the_moment_of_change() -> None:
    """Between two results a scrape is the same bytes object: nothing is rendered twice."""
    snapshot, _ = make()
    snapshot.put("c", ok(7.0))
    first = snapshot.body(lambda: ())
    assert snapshot.body(lambda: ()) is first
    snapshot.put("c", ok(8.0))
    assert snapshot.body(lambda: ()) is not first


def test_forgotten_collector_leaves_no_series() -> None:
    """A collector that a reload disables disappears with all its series."""
    snapshot, _ = make()
    snapshot.put("c", ok(7.0))
    snapshot.forget("c")
    assert lines(snapshot) == {}


def test_a_result_is_rendered_once() -> None:
    """A result of another collector does not render it again; its own next one does. The collectors
    are in the order of their names, however they were added.
    """
    snapshot, _ = make()
    snapshot.expect("b", 17.0)
    assert [latest.name for latest in snapshot] == ["b", "c"]
    snapshot.put("c", ok(7.0))
    assert lines(snapshot)["x_value"] == 7.0
    text = snapshot["c"].texts[Tier.ALL]
    snapshot.put("b", failed(Reason.TIMEOUT, "hung"))
    assert lines(snapshot)["x_value"] == 7.0
    assert snapshot["c"].texts[Tier.ALL] is text
    snapshot.put("c", ok(8.0))
    assert lines(snapshot)["x_value"] == 8.0
