"""The metrics of heartbeats: what is shown of a message, of which process, and where there is
nothing to show.
"""

from __future__ import annotations

import asyncio
import re
import socket
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from dshealthd.collectors.training import Training, Work, compared, samples
from dshealthd.core.collector import Context, Reason
from dshealthd.core.exposition import render
from dshealthd.core.host import Host
from dshealthd.core.result import CollectionOutcome, Result, attempt
from dshealthd.jobs.environment import launch
from dshealthd.jobs.heartbeats.identity import Identity
from dshealthd.jobs.heartbeats.reception import by_rank
from dshealthd.jobs.options import HeartbeatOptions
from dshealthd.jobs.processes import TrainingProcess
from dshealthd.training.message import DeviceMemory, Message, Phase, StepStage, WaitSource
from tests.jobs.heartbeats.senders import sending
from tests.jobs.machines import TORCH
from tests.jobs.service import configured, jobs

if TYPE_CHECKING:
    from pathlib import Path

    from dshealthd.jobs.heartbeats.sender import Sender


def options(path: Path, **others: Any) -> HeartbeatOptions:
    """Return options by which an agent listens there."""
    return HeartbeatOptions(socket=str(path), **others)


async def collected(path: Path, host: Host | None = None) -> Result:
    """Have an agent listen there, and return its first collection."""
    async with jobs(configured(options(path), host=host)) as (_, context):
        return attempt(Training(options(path), context))


def test_everything_that_a_message_says() -> None:
    """Each value of a message is one series, by job and rank."""
    message = Message(
        step=12, sent=0.0, phase=Phase.EVALUATION, stage=StepStage.INPUT, last_seconds=0.5, mean_seconds=0.25, input_seconds=0.125,
        forward_seconds=0.0625, skipped=3, loss_finite=False, nonfinite=4,
        loss_scale=65536.0, gradient_norm=1.5, memory=DeviceMemory(1, 2, 3), communication_seconds=6.0,
        wait_seconds=0.1, work_seconds=0.15, wait_source=WaitSource.DEVICE, pipeline_stage=2,
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
        ("forward_seconds",): 0.0625,
        ("loss_finite",): 0,
        ("nonfinite_losses_total",): 4,
        ("step_seconds",): 0.25,
        ("last_step_seconds",): 0.5,
        ("skipped_steps_total",): 3,
        ("loss_scale",): 65536,
        ("gradient_norm",): 1.5,
        ("communication_seconds_total",): 6.0,
        ("step_wait_seconds", "stage 2", "device"): 0.1,
        ("step_work_seconds", "stage 2", "device"): 0.15,
        ("memory_bytes", "allocated"): 1,
        ("memory_bytes", "reserved"): 2,
        ("memory_bytes", "peak"): 3,
    }
    assert all(
        sample.labels[:2] == ("slurm-1", "7") for sample in samples(message, 99.0, "slurm-1", "7")
    )


def test_a_node_compares_its_ranks() -> None:
    """Rules get few figures of a node, however many ranks it has: the slowest by its number, what is
    usual and what is fast; of two ranks the faster one is usual, and unknown is left out.
    """

    def figures(*ranks: Work) -> dict[tuple[str, ...], float]:
        return {
            (
                sample.metric.name.removeprefix("dshealthd_job_node_"),
                *sample.labels[2:],
            ): sample.value
            for sample in compared(sorted(ranks), "slurm-1", "")
        }

    eight = figures(
        *(Work(1.0 + 0.01 * rank, 8 + rank, 2.0) for rank in range(7)), Work(3.0, 15, 2.1)
    )
    assert eight == pytest.approx(
        {
            ("work_seconds", "fast"): 1.007,
            ("work_seconds", "usual"): 1.0231,
            ("work_seconds", "slow"): 3.0,
            ("role_ranks",): 8,
            ("slowest_rank",): 15,
            ("step_seconds",): 2.1,
        }
    )
    two = figures(Work(2.0, 1, None), Work(1.0, 0, 4.0))
    assert two == {
        ("work_seconds", "fast"): 1.0,
        ("work_seconds", "usual"): 1.0,
        ("work_seconds", "slow"): 2.0,
        ("role_ranks",): 2,
        ("slowest_rank",): 1,
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


async def test_ranks_on_metrics(tmp_path: Path) -> None:
    """Ranks that report are shown with their job; those above max_ranks are counted."""
    torchrun = {**TORCH, "TORCHELASTIC_RUN_ID": "r1"}
    given = options(tmp_path / "h.sock", max_ranks=2)
    async with jobs(configured(given)) as (service, context):
        training = Training(given, context)
        assert attempt(training).outcome is CollectionOutcome.OK
        with (
            sending(tmp_path / "h.sock", {**torchrun, "RANK": "0"}) as first,
            sending(tmp_path / "h.sock", {**torchrun, "RANK": "1"}) as second,
            sending(tmp_path / "h.sock", {**torchrun, "RANK": "2"}) as third,
        ):
            for sender in (first, second, third):
                sender.tell(Message(step=5, sent=time.monotonic()))
            while service.heartbeats().receiver.received < 3:
                await asyncio.sleep(0.01)
            result = attempt(training)
    text = render(result.samples)
    assert text.count("dshealthd_job_step{") == 2
    assert re.search(
        r'launcher="torchrun",training_job="[^"]+",world_size="16"} 1', text
    )  # as job_environment names it
    assert "dshealthd_heartbeat_ranks_left_out 1" in text
    assert result.faults == ()
    assert not (tmp_path / "h.sock").exists()


def test_single_collection(tmp_path: Path) -> None:
    """`dshealthd metrics` takes the socket from no agent."""
    context = Context(host=Host())
    result = attempt(Training(options(tmp_path / "h.sock"), context))
    assert (result.outcome, result.detail) == (
        CollectionOutcome.NOT_AVAILABLE,
        "heartbeats are received only while an agent runs",
    )
    assert list(tmp_path.iterdir()) == []


async def test_no_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without the directory of the socket nothing is available, which the log says once."""
    mine = options(tmp_path / "absent/heartbeat.sock")
    async with jobs(configured(mine)) as (service, context):
        service._reception.tend()  # type: ignore[union-attr] # the service's next turn
        result, status = attempt(Training(mine, context)), str(service.status())
    assert result.outcome is CollectionOutcome.NOT_AVAILABLE
    assert f"{tmp_path}/absent does not exist" in result.detail
    assert result.detail in status
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.messages == [result.detail]


async def test_another_agent(tmp_path: Path) -> None:
    """A socket that another agent serves is an error, which names it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.bind(str(tmp_path / "h.sock"))
        other.listen()
        result = await collected(tmp_path / "h.sock")
    assert (result.outcome, result.reason) == (CollectionOutcome.ERROR, Reason.IO_ERROR)
    assert result.detail == f"{tmp_path}/h.sock: another agent listens there"


async def test_processes_of_another_namespace(tmp_path: Path) -> None:
    """With a procfs whose pids are not the agent's, no sender could be known; this is said."""
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "self").symlink_to("1")
    result = await collected(tmp_path / "h.sock", Host(procfs=proc))
    assert (result.outcome, result.reason) == (CollectionOutcome.ERROR, Reason.NOT_FOUND)
    assert "another pid namespace" in result.detail
