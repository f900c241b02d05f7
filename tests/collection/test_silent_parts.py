"""Parts whose deadline is longer than the others can wait: they are waited for aside."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import TYPE_CHECKING

import pytest

from dshealthd.collection.supervisor import REPLACED, STARTS, Supervisor
from dshealthd.config import registry
from dshealthd.core.collector import Reason
from dshealthd.core.host import Host
from dshealthd.core.options import encode
from dshealthd.core.timing import Backoff
from tests.collection.test_supervisor import (
    COMMAND,
    LONG,
    Bench,
    reasons,
    start_of_a_worker,
    values,
)
from tests.workers import obstinate

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

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
        super().__init__(script, Host(), backoff, self.deadline)
        options = obstinate.Options(script=str(script))
        hello = {
            "worker": "test",
            "host": encode(Host()),
            "collectors": {"obstinate": encode(options)},
            "log_level": 50,
        }
        self.supervisor = Supervisor(
            "test",
            hello,
            {"obstinate": self.deadline},
            {"obstinate": registry.metrics(obstinate.Obstinate)},
            time.monotonic,
            backoff,
            COMMAND,
            parallel=["obstinate"],
            patience=patience,
        )

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for what happens aside."""
        end = time.monotonic() + 60 + 2 * self.deadline
        while not condition():
            assert time.monotonic() < end
            await asyncio.sleep(0.02)


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., None]:
    """Return a function that runs a scene with a supervisor and closes it."""

    def run(
        scene: Callable[[Patient], Coroutine[None, None, None]], backoff: Backoff | None = None
    ) -> None:
        async def main() -> None:
            start = await start_of_a_worker(tmp_path, Host())
            patience = min(max(PATIENCE, STARTS_WAITED_FOR * start), MOST)
            bench = Patient(tmp_path / "script", backoff or LONG, patience)
            try:
                await scene(bench)
            finally:
                await bench.supervisor.close()

        asyncio.run(main())

    return run


def write(bench: Bench, **actions: str) -> None:
    """Say what each part does."""
    bench.script.write_text("\n".join(f"{part} {act}" for part, act in actions.items()))


def test_others_do_not_wait_for_the_deadline(play: Callable[..., None]) -> None:
    """Three of five hang: before any deadline is over the others are read, and those are waiting.

    Then all three have their verdict, one process given up for each.
    """

    async def scene(bench: Patient) -> None:
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

    play(scene)


def test_a_slow_part_is_not_called_hung(play: Callable[..., None]) -> None:
    """A part that answers late but in time is shown from then on, and nothing is given up."""

    async def scene(bench: Patient) -> None:
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

    play(scene)


def test_worker_left_behind_touches_nothing_more(play: Callable[..., None], tmp_path: Path) -> None:
    """One that comes back from the part at which it was left ends, and approaches no other."""

    async def scene(bench: Patient) -> None:
        write(bench, a=f"wait {tmp_path}/left", b=f"dstate {tmp_path}/touched")
        bench.supervisor._others_wait = 0.1
        asked = asyncio.create_task(bench.sweep())
        await bench.until(lambda: "a" in bench.supervisor._aside)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        (tmp_path / "left").touch()
        await bench.until(lambda: not bench.supervisor._aside)
        assert not (tmp_path / "touched").exists()

    play(scene)


def test_a_scout_tries_again(play: Callable[..., None]) -> None:
    """A hung part is tried again aside: the worker keeps its process and sweeps take no longer.

    Once it answers it is shown again.
    """

    async def scene(bench: Patient) -> None:
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

    play(scene, Backoff(0.1, 0.2))


def test_27_worker_killed_at_the_part_where_it_was_left(
    play: Callable[..., None], tmp_path: Path
) -> None:
    """By somebody else: the part is read again, and not called crashed."""

    async def scene(bench: Patient) -> None:
        slow = bench.deadline / 2
        write(bench, a=f"ended {tmp_path}/once {signal.SIGKILL} {slow}", b="value 2")
        assert reasons(await bench.sweep()) == {"a": Reason.WAITING}
        await bench.until(lambda: not bench.supervisor._aside)
        result = await bench.sweep()
        assert values(result) == {"a": 1.0, "b": 2.0}
        assert not result.faults
        assert bench.metric(REPLACED, "crashed") == 1

    play(scene)


def test_27_scout_killed(play: Callable[..., None], tmp_path: Path) -> None:
    """By somebody else: its part stays under quarantine for what it did, and is tried again."""

    async def scene(bench: Patient) -> None:
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

    play(scene, Backoff(0.1, 0.2))
