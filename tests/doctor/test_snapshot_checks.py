"""Checks that show the findings of an agent: each on the samples of a fault and on those after it."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import pytest

from dshealthd.core.result import CollectionOutcome
from dshealthd.core.result import Result as Collected
from dshealthd.core.snapshot import Snapshot
from dshealthd.doctor.node import agent, gpus, kernel, rendezvous, resources, running_jobs
from dshealthd.findings.judgement import judge, series_of
from dshealthd.findings.judgement import seen as all_signs
from dshealthd.findings.past import Past
from dshealthd.findings.series import Series
from dshealthd.web.status import document
from generate import reference
from tests.doctor.looks import look, outcomes, results

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dshealthd.core.collector import Sample
    from dshealthd.doctor.node_context import NodeContext
    from dshealthd.doctor.snapshot_check import SnapshotCheck

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
        monotonic=100.0,
        wall=WALL,
        sections=verdict.document(),
    )
    return dataclasses.replace(look(), document={**json.loads(body), "source": "agent"})


ROUNDS = ("probe_up", 1), ("probe_rounds_total", 40, "pair", "ok")


def suspect(kind: str, component: str, reason: str, value: float) -> Scene:
    """Return what probes say after rounds over this node."""
    return (("suspect", value, kind, component, reason), *ROUNDS)


MEMBERS = ("members", 4), ("probe_up", 1)
ROUND = "probe_last_round_timestamp_seconds"
LOST = ("job_step", 100, JOB, "0")


@pytest.mark.parametrize(
    ("check", "slug", "outcome", "component", "step", "ill", "well"),
    [
        pytest.param(
            *(agent.AGENT, "collector-failing", "warning", "filesystem", "ps -eo"),
            (("worker_stuck", 1, "filesystem"),),
            (("worker_stuck", 0, "filesystem"),),
            id="a worker in the kernel, which comes back",
        ),
        pytest.param(
            *(resources.CLOCK, "clock-unsynchronized", "warning", "", "chronyc tracking"),
            (("clock_synchronized", 0),),
            (("clock_synchronized", 1),),
            id="no time daemon, which is started",
        ),
        pytest.param(
            *(resources.CLOCK, "clock-unsynchronized", "warning", "", "chronyc tracking"),
            (("clock_synchronized", 1), ("probe_clock_offset_seconds", -3, "median")),
            (("clock_synchronized", 1), ("probe_clock_offset_seconds", 0.01, "median")),
            id="a clock that is wrong, which is set",
        ),
        pytest.param(
            *(running_jobs.COLLECTIVES, "nccl-timeout", "critical", JOB, "py-spy dump"),
            (
                ("job_nccl_answers_without_progress", 9, JOB),
                ("job_nccl_rank_operations_behind", 1, JOB, "3", NODE, "3", "AllReduce"),
            ),
            (("job_nccl_answers_without_progress", 0, JOB),),
            id="a collective without progress, whose job is started again",
        ),
        pytest.param(
            *(running_jobs.JOB_HANGS, "training-hang", "critical", JOB, "dshealthd jobs"),
            (("job_hang", 1, JOB, "collective"), ("job_overdue_seconds", 500, JOB, "0")),
            (("job_hang", 0, JOB, "collective"), ("job_overdue_seconds", 0, JOB, "0")),
            id="a hung job, which is started again",
        ),
        pytest.param(
            *(running_jobs.JOB_ENDS, "child-failed", "warning", JOB, "dshealthd explain"),
            (("job_rank_ended_timestamp_seconds", WALL - 60, JOB, "3", "failed"),),
            (("job_rank_ended_timestamp_seconds", WALL - 60, JOB, "3", "ended"),),
            id="a rank that failed, whose job is started again and ends well",
        ),
        pytest.param(
            *(running_jobs.ARRIVALS, "ranks-stuck-at-init", "warning", JOB, "on each node"),
            (("job_nccl_ranks", 7, JOB, "8", "init"),),
            (("job_nccl_ranks", 8, JOB, "8", "running"),),
            id="ranks that wait for one that has died, which are started again",
        ),
        pytest.param(
            *(
                running_jobs.JOB_LOSSES,
                "loss-nan",
                "warning",
                JOB,
                "restart it from the last good checkpoint",
            ),
            (LOST, ("job_loss_finite", 0, JOB, "0"), ("job_nonfinite_losses_total", 9, JOB, "0")),
            (LOST, ("job_loss_finite", 1, JOB, "0"), ("job_nonfinite_losses_total", 0, JOB, "0")),
            id="a loss that is NaN, from the last good checkpoint",
        ),
        pytest.param(
            *(running_jobs.JOB_STEPS, "loss-scale-collapse", "warning", JOB, "bf16"),
            (LOST, ("job_loss_scale", 0, JOB, "0")),
            (LOST, ("job_loss_scale", 65536, JOB, "0")),
            id="a loss scale that has collapsed, with bf16",
        ),
        pytest.param(
            *(agent.PROBE_ROUNDS, "probes-missing", "warning", "members", "names the peers"),
            (("probe_peer_disagrees", 1, "node-3", "members"), *MEMBERS),
            MEMBERS,
            id="a peer with another list of members, which is given the same",
        ),
        pytest.param(
            *(agent.LINK_SUSPECTS, "bad-link", "warning", f"{NODE}--node-18", "mlxlink"),
            suspect("link", f"{NODE}--node-18", "slow", 1),
            suspect("link", f"{NODE}--node-18", "slow", 0),
            id="a slow link, whose cable is exchanged",
        ),
        pytest.param(
            *(agent.PROBE_FAILURES, "nccl-remote-error", "critical", NODE, "dshealthd probe"),
            suspect("node", NODE, "unreachable", 1),
            suspect("node", NODE, "unreachable", 0),
            id="a node that probes do not reach, which they do again",
        ),
        pytest.param(
            *(agent.PROBE_ROUNDS, "probes-missing", "warning", "", "journalctl -u dshealthd"),
            (("members", 4), ("probe_up", 0)),
            MEMBERS,
            id="probes that do not run, with a key that does",
        ),
        pytest.param(
            *(agent.PROBE_ROUNDS, "probes-missing", "warning", "", "the peer API"),
            (*MEMBERS, (ROUND, WALL - 900, "pair")),
            (*MEMBERS, (ROUND, WALL - 9, "pair")),
            id="no round for long, peers that are reached again",
        ),
        pytest.param(
            *(agent.STRAGGLER, "straggler", "warning", NODE, "nvidia-smi -q -d PERFORMANCE"),
            suspect("node", NODE, "slow", 1),
            suspect("node", NODE, "slow", 0),
            id="a slow node, which is as fast as the others again",
        ),
    ],
)
def test_findings_of_an_agent(
    check: SnapshotCheck,
    slug: str,
    outcome: str,
    component: str,
    step: str,
    ill: Scene,
    well: Scene,
) -> None:
    """A fault is found with its remedy; in the state that the remedy leads to, the check is ok."""
    (found,) = results(check, seen(check, ill))
    assert (check.slug, found.outcome.value, found.component) == (slug, outcome, component)
    assert step in found.remedy
    assert outcomes(check, seen(check, well)) == ["ok"]


def test_gpus_that_wait_for_the_cpus() -> None:
    """GPUs that hardly compute while tasks queue for the CPUs are found; with CPUs to spare not."""

    def scene(computes: float, stalled: float) -> Scene:
        return (
            ("gpu_compute_processes", 1, "0", "GPU-0"),
            ("gpu_utilization_ratio", computes, "0", "GPU-0"),
            ("pressure_stalled_ratio", stalled, "cpu", "some"),
        )

    def after(what: Scene) -> NodeContext:
        check = running_jobs.JOB_CPUS
        return seen(check, what, [(float(ago), what) for ago in range(600, 0, -20)])

    (found,) = results(running_jobs.JOB_CPUS, after(scene(0.05, 0.9)))
    assert (running_jobs.JOB_CPUS.slug, found.outcome.value) == ("training-slow", "warning")
    assert found.remedy
    assert outcomes(running_jobs.JOB_CPUS, after(scene(0.95, 0.1))) == ["ok"]


def test_a_host_with_errors() -> None:
    """Memory that had an error which ECC did not correct is found; without a new one it is not."""

    def after(errors: float) -> NodeContext:
        def scene(count: float) -> Scene:
            return (("kernel_events_total", count, "memory_error_uncorrected"),)

        return seen(kernel.HOST_ERRORS, scene(errors), [(float(ago), scene(0)) for ago in (60, 30)])

    (found,) = results(kernel.HOST_ERRORS, after(1))
    assert (kernel.HOST_ERRORS.slug, found.outcome.value) == ("host-errors", "warning")
    assert "journalctl -k" in found.remedy
    assert outcomes(kernel.HOST_ERRORS, after(0)) == ["ok"]


def test_job_that_continues_on_fewer_ports() -> None:
    """A job on a node with a fabric port down and traffic on the other is found; with both up not."""

    def after(up: int) -> NodeContext:
        def scene(ago: float, up: int) -> Scene:
            ports = (("mlx5_0", "1"), ("mlx5_1", "1"))
            return (
                *(("infiniband_port_info", 1, *port, "x", "InfiniBand") for port in ports),
                ("infiniband_port_up", up, *ports[0]),
                ("infiniband_port_up", 1, *ports[1]),
                ("infiniband_port_transmit_bytes_total", 1e12 - 1e9 * ago, *ports[1]),
                ("job_run_info", 1, JOB, "run", "torchrun"),
            )

        earlier = [(float(ago), scene(ago, int(ago > 300) or up)) for ago in range(600, 0, -20)]
        return seen(running_jobs.JOB_PORTS, scene(0, up), earlier)

    (found,) = results(running_jobs.JOB_PORTS, after(0))
    assert (running_jobs.JOB_PORTS.slug, found.outcome.value) == ("slow-communication", "warning")
    assert found.remedy
    assert outcomes(running_jobs.JOB_PORTS, after(1)) == ["ok"]


@pytest.mark.parametrize(
    ("check", "scene", "says", "not_says"),
    [
        (resources.CLOCK, (("clock_synchronized", 0),), "not synchronized", "off by"),
        (resources.LOOPBACK, (("loopback_up", 0),), "failed", "0 ms"),
        (gpus.GPU_METRICS, (("gpus_expected", 8),), "NVML does not show", "responds"),
        (
            gpus.IMEX,
            (("imex_nodes", 4), ("imex_running", 0), ("imex_listening", 0)),
            "is not ready",
            "runs for",
        ),
        (agent.PROBE_ROUNDS, (("probe_up", 0),), "do not run", "probes run"),
        (agent.AGENT, (("config_last_reload_successful", 0),), "not: configuration", "every"),
        (
            rendezvous.RENDEZVOUS_CONNECTIONS,
            (("rendezvous_client_sockets", 2, "syn_sent"),),
            "2 waiting for an answer",
            "none",
        ),
    ],
)
def test_signs_that_are_held(check: SnapshotCheck, scene: Scene, says: str, not_says: str) -> None:
    """What does not last long enough yet to be a finding is not said to be well."""
    context = seen(check, scene)
    held = dataclasses.replace(context, document={**context.document, "findings": []})
    (found,) = results(check, held)
    assert found.outcome.value == "ok"
    assert says in found.text
    assert not_says not in found.text
