"""Checks that show the findings of an agent, which tests/findings/scenes cause and end."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable

import pytest

from dshealthd.core.collector import Sample
from dshealthd.core.result import CollectionOutcome
from dshealthd.core.result import CollectionResult as Collected
from dshealthd.core.snapshot import Snapshot
from dshealthd.doctor.node_context import NodeContext
from dshealthd.doctor.snapshot_check import SnapshotCheck
from dshealthd.findings.judgement import judge, series_of
from dshealthd.findings.judgement import seen as all_signs
from dshealthd.findings.past import Past
from dshealthd.findings.series import Series
from dshealthd.web.status import document
from generate import reference
from tests.doctor.looks import look, named, outcomes, results
from tests.status_documents import finding

METRICS = reference.all_metrics()
NODE, JOB, WALL = "node-17", "slurm-7", 1_800_000_000.0
Scene = tuple[tuple[str | float, ...], ...]
"""Rows of a metric's name, its value and the values of its labels."""


def _samples(scene: Scene) -> list[Sample]:
    return [
        METRICS[f"dshealthd_{name}"](float(value), *map(str, labels))
        for name, value, *labels in scene
    ]


def seen(
    check: SnapshotCheck, scene: Scene, earlier: Iterable[tuple[float, Scene]] = ()
) -> NodeContext:
    """Return an agent's context with these samples, and `earlier` ones some seconds before."""
    past = Past()
    for ago, before in earlier:
        series = Series(_samples(before), past=past, now=100.0 - ago)
        all_signs(series, node=NODE, name=NODE, wall=WALL - ago)
    samples = _samples(scene)
    snapshot = Snapshot(lambda: 100.0, lambda: WALL)
    for name in check.collectors:
        snapshot.expect(name, 15)
        snapshot.put(name, Collected(CollectionOutcome.OK, tuple(samples)))
        samples = []  # the first has them all
    series = series_of(snapshot, samples, past=past, now=100.0)
    verdict = judge(snapshot, series, node=NODE, name=NODE, monotonic=100.0, wall=WALL)
    body = document(
        snapshot,
        samples,
        node=NODE,
        started=WALL - 100,
        begun=0.0,
        monotonic=100.0,
        wall=WALL,
        ready=True,
        sections=verdict.document(),
    )
    return dataclasses.replace(look(), document={**json.loads(body), "source": "agent"})


ROUNDS = ("probe_up", 1), ("probe_rounds_total", 40, "pair", "ok")
WELL: dict[SnapshotCheck, Scene] = {
    named("agent"): (("worker_stuck", 0, "filesystem"),),
    named("link-suspects"): ROUNDS,
    named("probe-failures"): ROUNDS,
    named("probe-rounds"): ROUNDS,
    named("straggler"): ROUNDS,
    named("fabric-manager"): (("fabric_manager_running", 1, "nv-fabricmanager"),),
    named("nvlink"): (
        ("nvlinks_up", 18, "0", "GPU-0"),
        ("gpu_fabric_state", 3, "0", "GPU-0"),
    ),
    named("host-errors"): (),
    named("clock"): (("clock_synchronized", 1), ("clock_offset_seconds", 0.01)),
    named("disk-space"): (("filesystem_size_bytes", 1e12, "/ckpt"),),
    named("shared-memory"): (
        ("filesystem_size_bytes", 1e12, "/dev/shm"),
        ("filesystem_free_bytes", 1e12, "/dev/shm"),
    ),
    named("collectives"): (),
    named("job-cpus"): (("gpu_compute_processes", 1, "0", "GPU-0"),),
    named("job-ends"): (),
    named("job-hangs"): (("job_ranks", 1, JOB, "run"),),
    named("job-heartbeats"): (),
    named("job-losses"): (("job_loss_finite", 1, JOB, "0"),),
    named("job-steps"): (("job_loss_scale", 65536, JOB, "0"),),
    named("nccl-releases"): (),
}
"""Checks that add nothing to the findings of their symptom, and what is read where all is well."""


@pytest.mark.parametrize("check", WELL, ids=lambda check: check.name)
def test_findings_of_an_agent(check: SnapshotCheck) -> None:
    """A check shows the findings of its symptom with their first steps, and no others."""
    context = seen(check, WELL[check])
    assert outcomes(check, context) == ["ok"]
    prefix = check.alerts if isinstance(check.alerts, str) else check.alerts[0]
    shown = finding(slug=check.slug, alert=f"{prefix}Something")
    starting = dataclasses.replace(context, document={**context.document, "ready": False})
    assert outcomes(check, starting) == ["unknown"]
    unread = [{**one, "state": "pending"} for one in context.collectors.values()]
    starting = dataclasses.replace(context, document={**starting.document, "collectors": unread})
    assert outcomes(check, starting) == ["unknown"]
    others = [finding(), finding(slug=check.slug, alert=f"{prefix}Else", severity="unknown")]
    document = {**context.document, "findings": [shown, *others]}
    (found,) = results(check, dataclasses.replace(context, document=document))
    assert (found.outcome.value, found.component) == ("critical", "gpu 3")
    assert found.remedy == "drain n1 and reboot it"


def test_parts_that_cannot_be_read() -> None:
    """What a user's files cause says nothing of the node; of its own parts one is named."""
    check = named("clock")
    context = seen(check, WELL[check])
    (name,) = check.collectors
    parts = ("job slurm-7", "process 7", "mlx5_0")
    faults = [{"part": part, "reason": "io_error", "detail": "bad"} for part in parts]
    read = {**context.collectors[name], "faults": faults}
    document = {**context.document, "collectors": [read]}
    found = results(check, dataclasses.replace(context, document=document))
    assert [(one.outcome.value, one.component) for one in found] == [
        ("unknown", "mlx5_0"), ("ok", ""),
    ]  # fmt: skip


def test_signs_that_are_held() -> None:
    """What does not last long enough yet to be a finding is not said to be well."""
    check = named("clock")
    context = seen(check, (("clock_synchronized", 1),))
    sign = finding(slug=check.slug, alert="DshealthdClockWrong", summary="The clock is wrong")
    for watched, words in (([sign], "has not lasted: The clock is wrong"), ([], check.title)):
        held = dataclasses.replace(context, document={**context.document, "watched": watched})
        (found,) = results(check, held)
        assert found.outcome.value == "ok"
        assert words in found.text
