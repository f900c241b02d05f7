"""Parts whose deadline is longer than the others can wait: they are waited for aside."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from dshealthd.collection.supervisor import REPLACED, STARTS
from dshealthd.core.collector import Reason
from dshealthd.core.timing import Backoff
from tests.collection.test_supervisor import (
    LONG,
    Bench,
    start_of_a_worker,
    values,
)
from tests.collectors.bench import reasons

PATIENCE = 0.4
"""Seconds; more where the machine takes longer to start a worker."""
MOST = 2.0
"""Seconds; at most, whatever the machine does."""
STARTS_WAITED_FOR = 3
"""The patience is at least that of so many starts of a worker."""
DEADLINE = 15
"""In times of the patience: far beyond what a sweep may take that does not wait for it."""


class Patient(Bench):
    """A bench whose worker leaves a silent part aside."""

    def __init__(self, script: Path, backoff: Backoff, patience: float) -> None:
        self.deadline = DEADLINE * patience
        super().__init__(script, backoff, self.deadline, parallel=["obstinate"], patience=patience)

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for what happens aside."""
        end = time.monotonic() + 60 + 2 * self.deadline
        while not condition():
            assert time.monotonic() < end
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def on_patient_bench(path: Path, backoff: Backoff = LONG) -> AsyncIterator[Patient]:
    """Give a bench, and close it."""
    start = await start_of_a_worker(path)
    bench = Patient(path / "script", backoff, min(max(PATIENCE, STARTS_WAITED_FOR * start), MOST))
    try:
        yield bench
    finally:
        await bench.supervisor.close()


def write(bench: Bench, **actions: str) -> None:
    """Say what each part does."""
    bench.script.write_text("\n".join(f"{part} {act}" for part, act in actions.items()))


async def test_others_do_not_wait_for_the_deadline(tmp_path: Path) -> None:
    """Three of five hang: before any deadline is over the others are read, and those are waiting.
    Then all three have their verdict, one process given up for each.
    """
    async with on_patient_bench(tmp_path) as bench:
        write(bench, a="hang", b="value 1", c="hang", d="hang", e="value 2")
        while values(result := await bench.sweep()) != {"b": 1.0, "e": 2.0}:
            # where a scout had to wait for a CPU, its part may come a sweep later
            assert {*reasons(result)} <= {*"abcde"}
        assert reasons(result) == dict.fromkeys("acd", Reason.WAITING)
        assert bench.metric(REPLACED, "timeout") == 0
        await bench.until(lambda: bench.metric(REPLACED, "timeout") == 3)
        result = await bench.sweep()
        assert values(result) == {"b": 1.0, "e": 2.0}
        assert reasons(result) == dict.fromkeys("acd", Reason.TIMEOUT)


async def test_a_slow_part_is_not_called_hung(tmp_path: Path) -> None:
    """A part that answers late but in time is shown from then on, and nothing is given up."""
    async with on_patient_bench(tmp_path) as bench:
        slow = round(bench.deadline * 2 / 3, 1)
        write(bench, a="value 1", b=f"sleep {slow}")
        assert reasons(await bench.sweep()) == {"b": Reason.WAITING}
        await bench.until(lambda: not bench.supervisor._aside)
        for _ in range(2):
            result = await bench.sweep()
            assert values(result) == {"a": 1.0, "b": slow}
            assert not result.faults
        assert bench.metric(STARTS) == 2
        assert not [*bench.supervisor._failures]


async def test_worker_left_behind_touches_nothing_more(tmp_path: Path) -> None:
    """One that comes back from the part at which it was left ends, and approaches no other."""
    async with on_patient_bench(tmp_path) as bench:
        write(bench, a=f"wait {tmp_path}/left", b=f"dstate {tmp_path}/touched")
        bench.supervisor._others_wait = 0.1
        asked = asyncio.create_task(bench.sweep())
        await bench.until(lambda: "a" in bench.supervisor._aside)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        (tmp_path / "left").touch()
        await bench.until(lambda: not bench.supervisor._aside)
        assert not (tmp_path / "touched").exists()


async def test_a_scout_tries_again(tmp_path: Path) -> None:
    """A hung part is tried again aside: the worker keeps its process and sweeps take no longer.
    Once it answers it is shown again.
    """
    async with on_patient_bench(tmp_path, Backoff(0.1, 0.2)) as bench:
        write(bench, a="hang", b="pid")
        await bench.sweep()
        await bench.until(lambda: bench.metric(REPLACED, "timeout") == 1)
        before = values(await bench.sweep())["b"]
        await asyncio.sleep(0.3)
        started = time.monotonic()
        result = await bench.sweep()
        assert time.monotonic() - started < bench.deadline / 2
        assert reasons(result) == {"a": Reason.TIMEOUT}
        await bench.until(lambda: bench.metric(REPLACED, "timeout") == 2)
        write(bench, a="value 7", b="pid")
        await asyncio.sleep(0.3)
        await bench.sweep()
        await bench.until(lambda: not bench.supervisor._quarantine)
        result = await bench.sweep()
        assert values(result) == {"a": 7.0, "b": before}
        assert not result.faults


async def test_27_worker_killed_at_the_part_where_it_was_left(tmp_path: Path) -> None:
    """By somebody else: the part is read again, and not called crashed."""
    async with on_patient_bench(tmp_path) as bench:
        slow = bench.deadline / 2
        write(bench, a=f"ended {tmp_path}/once {signal.SIGKILL} {slow}", b="value 2")
        assert reasons(await bench.sweep()) == {"a": Reason.WAITING}
        await bench.until(lambda: not bench.supervisor._aside)
        result = await bench.sweep()
        assert values(result) == {"a": 1.0, "b": 2.0}
        assert not result.faults
        assert bench.metric(REPLACED, "crashed") == 1


async def test_27_scout_killed(tmp_path: Path) -> None:
    """By somebody else: its part stays under quarantine for what it did, and is tried again."""
    async with on_patient_bench(tmp_path, Backoff(0.1, 0.2)) as bench:
        write(bench, a="hang", b="value 2")
        await bench.sweep()
        await bench.until(lambda: bench.metric(REPLACED, "timeout") == 1)
        write(bench, a=f"ended {tmp_path}/once", b="value 2")
        while not bench.metric(REPLACED, "crashed"):
            assert {*reasons(await bench.sweep()).values()} == {Reason.TIMEOUT}
            await asyncio.sleep(0.05)
        while reasons(result := await bench.sweep()):
            assert reasons(result) == {"a": Reason.TIMEOUT}
            await asyncio.sleep(0.05)
        assert values(result) == {"a": 1.0, "b": 2.0}
