"""The metrics of heartbeats: what is shown of a message, of which process, and where there is
nothing to show.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from dshealthd.collectors.training import (
    HEARD,
    NODE_HEARD,
    Training,
    samples,
    work,
    work_and_wait,
)
from dshealthd.core.collector import Context, Reason, Sample
from dshealthd.core.exposition import render
from dshealthd.core.host import Host
from dshealthd.core.result import CollectionOutcome, attempt
from dshealthd.jobs.environment import launch
from dshealthd.jobs.heartbeats.identity import Identity
from dshealthd.jobs.heartbeats.sender import Sender, by_rank
from dshealthd.jobs.own_work import Course
from dshealthd.jobs.processes import TrainingProcess
from dshealthd.training.message import DeviceMemory, Message, Phase, StepStage, Totals, WaitSource
from tests.collectors.bench import values
from tests.jobs.heartbeats.senders import sending
from tests.jobs.machines import TORCH
from tests.jobs.service import OFTEN, ON, configured, jobs


def test_everything_that_a_message_says() -> None:
    """Each value of a message is one series, by job and rank."""
    message = Message(
        step=12, sent=0.0, phase=Phase.EVALUATION, stage=StepStage.INPUT, last_seconds=0.5,
        mean_seconds=0.25, input_seconds=0.125, skipped=3,
        loss_finite=False, finite_step=9, nonfinite_step=11, loss_scale=65536.0, gradient_norm=1.5,
        memory=DeviceMemory(1, 2, 3), communication_seconds=6.0, wait_seconds=0.1,
        work_seconds=0.15, wait_source=WaitSource.DEVICE, pipeline_stage=2,
    )  # fmt: skip
    found = {
        (sample.metric.name.removeprefix("dshealthd_job_"), *sample.labels[2:]): sample.value
        for sample in samples(message, 99.0, "slurm-1", "7")
    }
    assert found == {
        ("step",): 12,
        ("heartbeat_timestamp_seconds",): 99.0,
        ("phase", "evaluation"): 1,
        ("stage", "input"): 1,
        ("input_seconds",): 0.125,
        ("loss_finite",): 0,
        ("finite_loss_step",): 9,
        ("nonfinite_loss_step",): 11,
        ("step_seconds",): 0.25,
        ("skipped_steps_total",): 3,
        ("loss_scale",): 65536,
        ("gradient_norm",): 1.5,
        ("communication_seconds_total",): 6.0,
        ("memory_bytes", "allocated"): 1,
        ("memory_bytes", "reserved"): 2,
        ("memory_bytes", "peak"): 3,
    }
    assert all(
        sample.labels[:2] == ("slurm-1", "7") for sample in samples(message, 99.0, "slurm-1", "7")
    )


def reporting(works: Sequence[Sequence[float]], step: float = 2.0) -> dict[int, Sender]:
    """Return senders of ranks 8 and up that have worked so long in each step."""
    senders = {}
    for rank, work_of_rank in enumerate(works, 8):
        course, done, message = Course(), 0.0, Message(step=0, sent=0.0)
        for number, seconds in enumerate(work_of_rank, 1):
            done += seconds
            totals = Totals(number, number, done, number * step - done)
            message = Message(
                step=number, sent=number * step, mean_seconds=step, totals=totals,
                wait_seconds=9.0, work_seconds=9.0
            )  # fmt: skip
            course.add(message, number * step)
        now = len(work_of_rank) * step
        sender = SimpleNamespace(course=course, message=message, looked=now)
        senders[rank] = cast("Sender", sender)
    return senders


def told(samples_of_node: Iterable[Sample]) -> dict[tuple[str, ...], float]:
    """Return samples by their name and labels, without the job."""
    return {
        (sample.metric.name.removeprefix("dshealthd_job_"), *sample.labels[1:]): sample.value
        for sample in samples_of_node
    }


def test_a_node_compares_its_ranks() -> None:
    """Rules get few figures of a node, however many ranks it has: of the slowest by its number,
    what is usual, and by how much the others differ, over each time that its steps fill.
    """
    ranks = reporting([[1.0 + 0.01 * (rank % 7)] * 40 for rank in range(7)] + [[1.5] * 40])
    found = told(work(ranks, "slurm-1", "stage 1"))
    assert found == pytest.approx(
        {
            ("node_work_seconds", "stage 1", "30s", "slow"): 1.5,
            ("node_work_seconds", "stage 1", "30s", "usual"): 1.03,
            ("node_work_variance", "stage 1", "30s", "between"): 0.0262**2,
            ("node_work_variance", "stage 1", "30s", "within"): 0.0,
            ("node_slowest_rank", "stage 1"): 15,
            ("node_role_ranks", "stage 1"): 8,
            ("node_step_seconds", "stage 1"): 2.0,
        },
        rel=0.1,
        abs=1e-9,
    )


def test_the_slowest_of_equal_ranks_is_one_of_theirs() -> None:
    """Of ranks that are slow in turns none stands out, and no rank of another node is told."""
    works = [[1.0 + (number // 2 + rank) % 2 for number in range(40)] for rank in range(2)]
    found = told(work(reporting(works), "slurm-1", ""))
    assert (
        found["node_work_seconds", "", "30s", "slow"]
        < found["node_work_seconds", "", "30s", "usual"]
    )
    assert found["node_slowest_rank", ""] in {8, 9}


@pytest.mark.parametrize(("steps", "slowest"), [(24, 13), (2, 12)])
def test_the_slowest_rank_stands_out_most_over_any_time(steps: int, slowest: int) -> None:
    """One that is new is not in the long windows yet, where another is a little slow all along."""
    works = [[1.0 + 0.002 * ((step * 7 + rank) % 5) for step in range(150)] for rank in range(6)]
    works[4] = [1.05 * seconds for seconds in works[4]]
    works[5][-steps:] = [1.5] * steps
    found = told(work(reporting(works), "slurm-1", ""))
    assert found["node_slowest_rank", ""] == slowest


@pytest.mark.parametrize(("looked", "is_told"), [(89.0, True), (89.1, False)])
def test_a_hung_job_has_no_slow_rank(looked: float, *, is_told: bool) -> None:
    """Without new steps there are no figures: an innocent rank would be accused on frozen ones.
    Two windows of two steps may be late, and twice the half second between two looks.
    """
    ranks = reporting([[1.0] * 40, [1.5] * 40])
    ranks[8].looked = looked
    found = told(work(ranks, "slurm-1", ""))
    assert found["node_role_ranks", ""] == 2
    assert (("node_slowest_rank", "") in found, len(found) > 1) == (is_told, is_told)
    for sender in ranks.values():
        sender.message = Message(step=1, sent=0.0)
    assert told(work(ranks, "slurm-1", "")) == {}, "how long a step takes is not known yet"


def test_shares_of_a_step_add_up() -> None:
    """Own work and wait are a step, also where averages leave out steps without a wait."""
    (sender,) = reporting([[0.5, 1.5] * 20]).values()
    assert told(work_and_wait(sender, "run-1", "8")) == {
        ("step_work_seconds", "8", "", "host"): pytest.approx(1.0),
        ("step_wait_seconds", "8", "", "host"): pytest.approx(1.0),
    }
    (new,) = reporting([[0.5]]).values()
    assert told(work_and_wait(new, "run-1", "8")) == {
        ("step_work_seconds", "8", "", "host"): 9.0,
        ("step_wait_seconds", "8", "", "host"): 9.0,
    }


def test_unknown_is_not_shown() -> None:
    """A message that knows nothing but the step gives the step and when it was."""
    names = {sample.metric.name for sample in samples(Message(step=1, sent=0.0), 1.0, "run-1", "0")}
    assert names == {
        f"dshealthd_job_{name}" for name in ("step", "heartbeat_timestamp_seconds", "phase")
    }


def entry(
    pid: int, start: int, *, parent: int = 1, rank: str = "3", **others: str
) -> tuple[Identity, Sender]:
    """Return a process that reports."""
    environment = {**TORCH, "RANK": rank, **others}
    place = launch(environment)
    assert place is not None
    process = TrainingProcess(pid, start, parent, "run-1", place, environment)
    return Identity(process, (start, 7)), cast("Sender", SimpleNamespace(pid=pid))


def test_processes_of_one_rank() -> None:
    """Of two processes of one rank the one that started last is shown."""
    ranks = by_rank(
        [entry(50, 300), entry(40, 100), entry(41, 400, parent=40), entry(60, 200, rank="4")]
    )
    assert {key: [who.process.pid for who, _ in found] for key, found in ranks.items()} == {
        ("run-1", 3): [40, 50],
        ("run-1", 4): [60],
    }


def test_runs_of_one_allocation() -> None:
    """Of two runs on one node, started side by side, the ranks of one are watched, never some of
    each; a smaller run within a rank, such as an evaluation, takes no place.
    """
    ranks = by_rank(
        [
            entry(50, 100, rank="0"),
            entry(51, 103, rank="1"),
            entry(60, 101, rank="0", MASTER_PORT="29600"),
            entry(61, 102, rank="1", MASTER_PORT="29600"),
            entry(52, 104, rank="2", MASTER_PORT="29700"),
        ]
    )
    assert {key: [who.process.pid for who, _ in found] for key, found in ranks.items()} == {
        ("run-1", 0): [60, 50],
        ("run-1", 1): [61, 51],
    }


def test_a_run_within_the_only_rank() -> None:
    """The child that meets elsewhere is no run beside its parent's; of two that are each other's
    children, by pids that were used again, none is left out.
    """
    for parent, shown in ((1, [50]), (51, [50, 51])):
        child = entry(51, 101, parent=50, MASTER_PORT="29600")
        ranks = by_rank([entry(50, 100, parent=parent), child])
        assert [who.process.pid for who, _ in ranks["run-1", 3]] == shown


async def test_ranks_on_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that report are shown with their job; those above the most are counted."""
    torchrun = {**TORCH, "TORCHELASTIC_RUN_ID": "r1"}
    monkeypatch.setattr("dshealthd.collectors.training.MAX_RANKS", 2)
    async with jobs(configured(OFTEN)) as (service, context):
        training = Training(ON, context)
        assert attempt(training).outcome is CollectionOutcome.OK
        with (
            sending({**torchrun, "RANK": "0"}) as first,
            sending({**torchrun, "RANK": "1"}) as second,
            sending({**torchrun, "RANK": "2"}) as third,
        ):
            reader = service.heartbeats()
            for told, sender in enumerate((first, second, third), 1):
                sender.tell(Message(step=5, sent=time.monotonic()))
                while sum(one.message is not None for _, one in reader.senders()) < told:
                    await asyncio.sleep(0.01)
            result = attempt(training)
    text = render(result.samples)
    assert text.count("dshealthd_job_step{") == 2
    assert [*values(result, NODE_HEARD).values()] == [max(values(result, HEARD).values())]
    assert re.search(
        r'launcher="torchrun",training_job="[^"]+",world_size="16"} 1', text
    )  # as job_environment names it
    assert "dshealthd_heartbeat_ranks_left_out 1" in text
    assert result.faults == ()


def test_single_collection() -> None:
    """`dshealthd metrics` reads no heartbeats."""
    result = attempt(Training(ON, Context(host=Host())))
    assert (result.outcome, result.detail) == (
        CollectionOutcome.NOT_AVAILABLE,
        "heartbeats are read only while an agent runs",
    )


async def test_processes_of_another_namespace(tmp_path: Path) -> None:
    """With a procfs whose pids are not the agent's, no sender could be known; this is said."""
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "self").symlink_to("1")
    async with jobs(configured(host=Host(procfs=proc))) as (_, context):
        result = attempt(Training(ON, context))
    assert (result.outcome, result.reason) == (CollectionOutcome.ERROR, Reason.NOT_FOUND)
    assert "another pid namespace" in result.detail
