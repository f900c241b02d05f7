"""Jobs that stand still, with real processes that send real heartbeats.

`tests/symptoms` has what follows from several nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from dshealthd.collectors.job_hang import JobHang, ranks_with_series
from dshealthd.config.config import Config
from dshealthd.core.collector import Context
from dshealthd.core.host import Host
from dshealthd.core.options import Duration
from dshealthd.core.result import CollectionOutcome, CollectionResult, attempt
from dshealthd.jobs.hangs.classes import Culprit, HangClass
from dshealthd.jobs.hangs.exits import ExitKind
from dshealthd.jobs.hangs.judge import Standstill
from dshealthd.jobs.hangs.states import RankState
from dshealthd.jobs.options import HangOptions
from dshealthd.jobs.service import Jobs
from dshealthd.linux.activity import ThreadState
from dshealthd.training.message import Phase, StepStage
from tests.jobs import rank
from tests.jobs.service import configured, jobs

MAX_RANKS = 64
TIMEOUT = 600
NOTICE = 60.0
FIRST = 100.0

ROOT = Path(__file__).parents[2]
FLOOR = 1.0
"""Seconds of silence that are usual; more where a rank has waited for a CPU for half of that."""
RENDEZVOUS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


class Node:
    """An agent's collector of hangs, and a job of two or three ranks."""

    def __init__(self, service: Jobs, context: Context, ranks: int) -> None:
        self.service = service
        self.hang = JobHang(HangOptions(), context)
        self.config = Config()
        self.told: list[frozenset[str]] = []
        """The jobs that were hung, at each look that saw others than the one before."""
        self.ranks = [
            subprocess.Popen(
                [sys.executable, rank.__file__],
                env={
                    "PATH": os.defpath,
                    "PYTHONPATH": str(ROOT),
                    **RENDEZVOUS,
                    "WORLD_SIZE": str(ranks),
                    "RANK": str(number),
                    "LOCAL_RANK": str(number),
                },
                stdin=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for number in range(ranks)
        ]

    async def restart(self) -> None:
        """End the agent's service, which keeps what it knows, and start it as a new agent does."""
        await self.service.close()
        await self.service.apply(self.config)

    def tell(self, number: int, what: str) -> None:
        """Have something go wrong with a rank."""
        stdin = self.ranks[number].stdin
        assert stdin is not None
        stdin.write(what + "\n")
        stdin.flush()

    def look(self) -> dict[tuple[str, ...], float]:
        """Collect once, and return the values by metric and labels, without prefix and job."""
        return shown(attempt(self.hang))

    async def until(
        self, condition: Callable[[Mapping[tuple[str, ...], float]], bool]
    ) -> dict[tuple[str, ...], float]:
        """Collect until something is so."""
        while not condition(values := self.look()):
            await asyncio.sleep(0.1)
        return values

    async def trained(self) -> None:
        """Wait until all ranks have made steps enough to know what is usual."""
        await self.until(
            lambda values: all(known(values, str(number)) for number in range(len(self.ranks)))
        )

    async def hung_at_input(self) -> dict[tuple[str, ...], float]:
        """Have rank 1 wait for input, and the others for rank 1; return what is shown of it."""
        self.tell(1, "input")
        # They start when they can, so that either may be ahead until the other stops.
        await self.until(
            lambda values: all(
                values["position", other] > values["position", "1"] + 20 for other in "02"
            )
        )
        self.tell(0, "wait")
        self.tell(2, "wait")
        return await self.until(hanging)

    def close(self) -> None:
        """End the ranks."""
        for process in self.ranks:
            process.kill()
            process.wait()
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()


def known(values: Mapping[tuple[str, ...], float], number: str) -> bool:
    """Tell whether it is known for how long a rank is usually silent in training."""
    return FLOOR <= values.get(("step_bound_seconds", number), FIRST) < FIRST


def shown(result: CollectionResult) -> dict[tuple[str, ...], float]:
    """Return the values of a collection by metric and labels, without prefix and job."""
    assert result.outcome is CollectionOutcome.OK, result.detail
    return {
        (sample.metric.name.removeprefix("dshealthd_job_"), *sample.labels[1:]): sample.value
        for sample in result.samples
    }


@contextlib.asynccontextmanager
async def node(path: Path, ranks: int = 2) -> AsyncIterator[Node]:
    """Run a node."""
    told: list[frozenset[str]] = []

    def on_look(hangs: Iterable[Standstill]) -> None:
        now = frozenset(hang.job for hang in hangs)
        if now != (told[-1] if told else frozenset()):
            told.append(now)

    config = configured(
        hangs=HangOptions(interval=Duration(0.1), floor=Duration(FLOOR)),
    )
    async with jobs(config, on_look, path) as (service, context):
        with contextlib.closing(Node(service, context, ranks)) as found:
            found.told, found.config = told, config
            yield found


def hanging(values: Mapping[tuple[str, ...], float]) -> bool:
    """Tell whether a job is hung."""
    return any(name == "hang" and value == 1 for (name, *_), value in values.items())


def ended(values: Mapping[tuple[str, ...], float]) -> set[tuple[str, ...]]:
    """Return the ranks that have ended, each with how."""
    return {name[1:] for name in values if name[0] == "rank_ended_timestamp_seconds"}


async def test_a_rank_that_is_stopped(tmp_path: Path) -> None:
    """A rank that gets SIGSTOP while the other waits for it is named with its pid."""
    async with node(tmp_path) as found:
        await found.trained()
        values = found.look()
        assert values["hang", "none"] == 0
        assert values["runnable_ranks",] == 2
        assert not any(name.startswith("silent_") for name, *_ in values)
        found.ranks[1].send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        for _ in range(20):  # the other makes steps, which is no hang
            assert not hanging(found.look())
            await asyncio.sleep(0.1)
        found.tell(0, "wait")
        # The other has made steps until just now: it may be overdue a moment later.
        values = await found.until(
            lambda values: hanging(values) and values.get(("overdue_seconds", "0"), 0.0) > 0.0
        )
        assert values["hang", "process"] == 1
        assert values["hang_culprit_info", "1", "process", "stopped"] == 1
        assert values["rank_state", "1", "stopped"] == 1
        assert values["runnable_ranks",] == 1
        assert values["silent_overdue_seconds",] > 0
        silent = {
            number: values["overdue_seconds", number] + values["step_bound_seconds", number]
            for number in "01"
        }
        assert silent["1"] > silent["0"]
        (hang,) = found.service.hangs().standstills.values()
        assert (hang.reason, hang.culprits) == (HangClass.PROCESS, ((1, Culprit.STOPPED),))
        assert [state.pid for state in hang.ranks] == [process.pid for process in found.ranks]
        assert time.time() - (time.monotonic() - stopped) <= hang.since <= time.time()
        found.ranks[1].send_signal(signal.SIGCONT)
        values = await found.until(lambda values: not hanging(values))
        assert values["overdue_seconds", "1"] == 0.0
        assert found.told == [frozenset({hang.job}), frozenset()]


async def test_a_rank_without_input(tmp_path: Path) -> None:
    """A rank that does not begin the step in which the other waits is at its input."""
    async with node(tmp_path, ranks=3) as found:
        await found.trained()
        values = await found.hung_at_input()
        positions = {name[1]: value for name, value in values.items() if name[0] == "position"}
        assert positions["1"] == int(positions["1"])
        assert positions["0"] - int(positions["0"]) > 0.6
        assert values["silent_rank_position", "0", "backward"] == positions["0"]
        assert values["silent_rank_position", "1", "input"] == positions["1"]
        assert values["hang", "input"] == 1
        assert values["hang_culprit_info", "1", "input", "input"] == 1


async def test_a_rank_that_fails(tmp_path: Path) -> None:
    """A rank that ends with an error while the other waits is the one at fault, and how it ended is
    told with the time.
    """
    async with node(tmp_path) as found:
        await found.trained()
        before = time.time()
        found.tell(0, "wait")
        found.tell(1, "fail")
        values = await found.until(
            lambda values: values.get(("hang_culprit_info", "1", "process", "gone")) == 1
        )
        assert hanging(values)
        assert before <= values["rank_ended_timestamp_seconds", "1", "failed"] <= time.time()
        found.ranks[0].kill()
        values = await found.until(
            lambda values: (
                ("hang", "process") not in values
                and ended(values) == {("0", "killed"), ("1", "failed")}
            )
        )
        assert ("hang", "none") not in values


async def test_an_agent_that_is_started_anew_hears_ranks_that_hang(tmp_path: Path) -> None:
    """Ranks that hang send nothing more: the next agent takes their pages, and knows their pace."""
    async with node(tmp_path, ranks=3) as found:
        await found.trained()
        before = await found.hung_at_input()
        await found.restart()
        after = await found.until(hanging)
        assert after["hang", "input"] == 1
        assert after["hang_culprit_info", "1", "input", "input"] == 1
        assert after["step_bound_seconds", "0"] == before["step_bound_seconds", "0"] < FIRST
        assert after["overdue_seconds", "0"] + 1e-6 >= before["overdue_seconds", "0"] > 0
        await found.restart()  # and once more, with nothing heard in between
        await found.until(hanging)
        found.ranks[0].kill()
        values = await found.until(lambda values: ("overdue_seconds", "0") not in values)
        assert ("overdue_seconds", "1") in values


async def test_an_agent_that_is_started_anew_knows_the_pace_of_ranks_that_go_on(
    tmp_path: Path,
) -> None:
    """What is usual need not be learnt again, and each rank is there once."""
    async with node(tmp_path) as found:
        await found.trained()
        before = found.look()["step_bound_seconds", "1"]
        await found.restart()
        values = await found.until(lambda values: ("step_bound_seconds", "1") in values)
        assert before <= values["step_bound_seconds", "1"] < FIRST
        reader = found.service.heartbeats()
        await found.until(
            lambda _: (
                len(reader) == 2 and [len(senders) for senders in reader.ranks().values()] == [1, 1]
            )
        )


@pytest.mark.parametrize(
    "ranks", ["7", "[7]", '[{"pid": 1, "start": 1, "user": 0, "sent": 0, "baseline": {}}]']
)
async def test_a_damaged_pace_is_learnt_anew(tmp_path: Path, ranks: str) -> None:
    """Whatever is in the file, ranks are watched."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    text = f'{{"boot_id": "{boot}", "ranks": {ranks}}}'
    (tmp_path / "job_hang.json").write_text(text, encoding="utf-8")
    async with node(tmp_path) as found:
        await found.until(lambda values: ("step_bound_seconds", "1") in values)


@pytest.mark.parametrize("what", ["checkpoint", "compute"])
async def test_pauses_are_no_hang(tmp_path: Path, what: str) -> None:
    """While one rank is in a checkpoint, or computes, the job does not hang, however long the other
    waits.
    """
    async with node(tmp_path) as found:
        await found.trained()
        found.tell(1, what)
        if what == "checkpoint":
            values = await found.until(lambda values: not known(values, "1"))
            assert ("phase_seconds", "1") in values
        found.tell(0, "wait")
        values = await found.until(lambda values: values["overdue_seconds", "0"] > 1.5)
        if what == "compute":
            values = await found.until(lambda values: ("hang", "working") in values)
            assert values["hang_patience_seconds",] == pytest.approx(TIMEOUT - NOTICE, abs=10.0)
        assert not hanging(values)
        assert found.told == []


async def test_a_pause_that_nobody_marked_teaches_nothing(tmp_path: Path) -> None:
    """Ranks that are all between the same two steps (here one) are in a pause."""
    async with node(tmp_path, ranks=1) as found:
        await found.trained()
        found.tell(0, "pause")
        values = await found.until(lambda values: ("hang", "between_steps") in values)
        assert values["hang", "between_steps"] == 0
        assert values["hang_patience_seconds",] == pytest.approx(TIMEOUT - NOTICE, abs=10.0)
        await found.until(lambda values: values["overdue_seconds", "0"] > 4.0)
        before = found.look()["step_bound_seconds", "0"]
        found.tell(0, "go on")
        values = await found.until(lambda values: ("hang", "none") in values)
        assert values["step_bound_seconds", "0"] <= before
        assert found.told == []


def test_without_heartbeats() -> None:
    """Where no heartbeats come in there is nothing to watch, and no loop is asked for."""
    context = Context(host=Host())
    result = attempt(JobHang(HangOptions(), context))
    assert (result.outcome, result.detail) == (
        CollectionOutcome.NOT_AVAILABLE,
        "no heartbeats come in",
    )


LIVING = RankState(
    rank=0,
    pid=100,
    start=1000,
    step=50,
    phase=Phase.TRAINING,
    stage=StepStage.BACKWARD,
    silence=1.0,
    bound=30.0,
    state=ThreadState.SLEEPING,
    user=0,
)
ENDED = replace(LIVING, ended=ExitKind.KILLED, ended_at=1.0)


def test_ended_ranks_take_no_place_of_the_living() -> None:
    """Jobs that failed within ten minutes leave the ranks of the one that runs their series."""
    failed = {
        f"failed-{number}": [replace(ENDED, rank=rank, start=number) for rank in (0, 1)]
        for number in range(MAX_RANKS)
    }
    running = {"running": [replace(LIVING, rank=rank) for rank in range(8)]}
    found = ranks_with_series({**failed, **running})
    assert [rank.rank for job, rank in found if job == "running"] == list(range(8))
    assert len(found) == MAX_RANKS
    assert {job for job, _ in ranks_with_series(failed)} == set(failed)
