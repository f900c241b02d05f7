"""How long a worker may take, and what its silence means; the worker is none."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from dshealthd.probe.observation import Stage
from dshealthd.probe.workers import session
from dshealthd.probe.workers.job import RankResult, RankSpec
from dshealthd.probe.workers.store import LocalStore
from tests.probe.peering import at_once
from tests.probe.workers.test_worker_pool import ignore, job


def test_deadlines_end_a_worker_before_its_own_timeouts() -> None:
    """Those of store and backend are two seconds longer than any stage after the import."""
    deadlines = {Stage.IMPORT: 150.0, Stage.STORE: 4.0, Stage.INIT: 12.0, Stage.VERIFY: 8.0}
    told = session._description(job("", deadlines=deadlines), RankSpec(rank=0))
    assert told["timeout"] == 14.0


@pytest.mark.parametrize(
    ("states", "reason"),
    [("DD", "uninterruptible"), ("DS", "deadline"), ("DT", "stopped"), ("t", "stopped")],
)
def test_a_worker_hangs_in_the_kernel_if_it_is_there_twice(states: str, reason: str) -> None:
    """One that waits for another may wait for a page at that moment: it is not to blame."""
    process: Any = SimpleNamespace(pid=7, state=iter(states).__next__)

    async def judged() -> RankResult:
        round_ = session.NodeWorkers(job(""), LocalStore(), ignore)
        one = session.WorkerSession(RankSpec(rank=0), process, round_)
        await one._judge_silence()
        return one.result(0, 0)

    result, seconds = at_once(judged())
    assert (result.reason, seconds) == (reason, 0.5 * (states[0] == "D"))


@pytest.mark.parametrize(
    ("completed", "failed", "ends", "own"),
    [
        ([0, 0, 0], None, 2.0, True),
        ([0, 7, 7], None, 2.0, True),  # in the first half alone
        ([0, 0, 1, 1, 1, 1], None, 4.0, True),
        (range(99), None, 8.0, True),
        (range(99), 0.5, 1.5, False),
        ([0, 0, 0], 1.5, 2.0, True),
    ],
)
def test_how_long_a_stage_lasts(
    completed: Iterable[int], failed: float | None, ends: float, *, own: bool
) -> None:
    """Its deadline, and three times as long again while its collectives go on; a second more once
    another rank has failed.
    """
    process: Any = None

    async def scene() -> bool:
        round_ = session.NodeWorkers(job(""), LocalStore(), ignore)
        one = session.WorkerSession(RankSpec(rank=0), process, round_, iter(completed).__next__)
        stage = asyncio.create_task(asyncio.sleep(3600.0))
        if failed is not None:
            asyncio.get_running_loop().call_later(failed, round_.hurry)
        await one._wait_for(stage, 2.0)
        stage.cancel()
        return one._own

    is_own, seconds = at_once(scene())
    assert (is_own, seconds) == (own, ends)


async def test_a_worker_that_closes_its_channel_has_two_seconds_to_end() -> None:
    """How it ends is told then."""
    asked: list[float] = []

    async def gone(seconds: float) -> None:
        asked.append(seconds)

    process: Any = SimpleNamespace(gone=gone)
    ours, theirs = socket.socketpair()
    theirs.close()
    round_ = session.NodeWorkers(job(""), LocalStore(), ignore)
    one = session.WorkerSession(RankSpec(rank=0), process, round_)
    await one.follow(ours)
    assert (one.result(0, 0).reason, asked) == ("exited", [2.0])
