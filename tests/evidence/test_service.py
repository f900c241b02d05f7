"""The agent's part: of which hangs evidence is taken, and what becomes of a collection that hangs,
fails or is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from dshealthd.config.config import Config
from dshealthd.core import background
from dshealthd.core.collector import Metric
from dshealthd.core.host import Host
from dshealthd.core.options import Bytes, Duration
from dshealthd.evidence import service
from dshealthd.evidence.bundle import bundles_in
from dshealthd.evidence.findings import HangCase
from dshealthd.evidence.options import EvidenceOptions
from dshealthd.evidence.service import BUNDLES, INFO, Evidence, case
from dshealthd.jobs.hangs.classes import HangClass
from dshealthd.jobs.hangs.exits import ExitKind
from dshealthd.jobs.hangs.judge import Standstill
from tests.collectors.bench import sleeper
from tests.command_line import shell_script
from tests.jobs.standstills import rank_state
from tests.processes import children, runs, state
from tests.stopwatch import Stopwatch
from tests.waiting import eventually, until

UNEXPLAINED = 90.0

NOW = 1_795_271_340.0
OPTIONS = EvidenceOptions(
    after=Duration(10.0),
    min_free_bytes=Bytes(0),
    max_bytes=Bytes(1 << 23),
)
FAILING = (sys.executable, "-c", "pass")
CASE = HangCase(job="slurm-7", reason="waiting")
HANGING = (sys.executable, "-c", "import time; time.sleep(60)")
STOPPED = (
    sys.executable,
    "-c",
    """
import os, signal, sys
from dshealthd.evidence import __main__, collection
collection.Collection.collect = lambda self: os.kill(os.getpid(), signal.SIGSTOP)
__main__.main(int(sys.argv[1]))
""",
)
"""A collecting process that is stopped after it has begun its bundle."""


def hang(job: str, **times: float) -> Standstill:
    """Return the hang of a job whose ranks wait for each other."""
    known = {"job": job, "reason": HangClass.WAITING, "culprits": (), "ranks": (), "since": NOW}
    return Standstill(**{**known, **times})  # type: ignore[arg-type] # fields of several types


class Node:
    """An evidence service with clocks that stand still until they are set."""

    def __init__(self, tmp_path: Path, options: EvidenceOptions = OPTIONS, **others: Any) -> None:
        self.monotonic = 1000.0
        self.wall = NOW
        self.asked = 0
        """How often metrics were: of a bundle that has begun twice."""
        self.evidence = Evidence(
            options,
            tmp_path,
            Host(),
            metrics=self._metrics,
            document=lambda: {"jobs": [], "probe": {"rounds": []}},
            monotonic=lambda: self.monotonic,
            wall=lambda: self.wall,
            interval=0.05,
            **others,
        )

    def _metrics(self) -> str:
        self.asked += 1
        return "dshealthd_job_step 1\n"

    @property
    def collects(self) -> bool:
        """Whether the collecting process has begun a bundle, and has stopped."""
        return self.asked == 2 and any(state(child) == "T" for child in children(os.getpid()))

    def values(self, metric: Metric) -> dict[tuple[str, ...], float]:
        """Return the samples of one metric by their labels."""
        return {
            labels: value for found, labels, value in self.evidence.samples() if found is metric
        }

    async def look(self, *jobs: str, seconds: float = 0.0) -> list[str]:
        """Let time pass, look at these hangs, wait for what is begun, and return the jobs that
        there are bundles of.
        """
        self.monotonic += seconds
        self.wall += seconds
        self.evidence.update_hangs(map(hang, jobs))
        while self.evidence.status()["state"] == "running":
            await asyncio.sleep(0.02)
        return [entry.job for entry in bundles_in(self.evidence.directory)]


def let_time_pass_once(
    patch: pytest.MonkeyPatch, condition: Callable[[], object], deadline: float
) -> None:
    """Have the deadline of a collection pass as soon as a condition holds, and not before."""

    @contextlib.asynccontextmanager
    async def time_limit(seconds: float) -> AsyncIterator[None]:
        assert seconds == deadline
        async with asyncio.timeout(None) as limit:

            async def run_out() -> None:
                await eventually(condition)
                limit.reschedule(0.0)

            running_out = asyncio.create_task(run_out())
            try:
                yield
            finally:
                running_out.cancel()

    patch.setattr(service, "time_limit", time_limit)


def training_process() -> AbstractContextManager[int]:
    """Run a process that looks like a rank of a job, and give its pid."""
    return sleeper(os.geteuid(), {"RANK": "0", "WORLD_SIZE": "2", "SLURM_JOB_ID": "7"})


async def test_a_hang_is_taken_once_and_not_before_it_has_lasted(tmp_path: Path) -> None:
    """A job that stands still for long enough gets one bundle, however long it goes on."""
    node = Node(tmp_path)
    assert await node.look("slurm-1") == []
    assert await node.look("slurm-1", seconds=9) == []
    assert await node.look("slurm-1", seconds=1) == ["slurm-1"]
    for _ in range(3):
        assert await node.look("slurm-1", seconds=3000) == ["slurm-1"]
    await node.evidence.close()


async def test_a_hang_without_a_cause_is_taken_at_once(tmp_path: Path) -> None:
    """A wait within a step causes a bundle, though its page waits for the probes."""
    node = Node(tmp_path)
    for _ in range(2):
        node.evidence.update_hangs([hang("slurm-1", overdue=1.0, hold=UNEXPLAINED)])
        node.monotonic += 10.0
    while node.evidence.status()["state"] == "running":
        await asyncio.sleep(0.02)
    assert [entry.job for entry in bundles_in(node.evidence.directory)] == ["slurm-1"]
    await node.evidence.close()


async def test_a_pause_between_begins_again(tmp_path: Path) -> None:
    """Two short stops are not one long one."""
    node = Node(tmp_path)
    await node.look("slurm-1")
    await node.look(seconds=6)
    assert await node.look("slurm-1", seconds=6) == []
    await node.evidence.close()


async def test_another_hang_of_the_job_is_taken_after_a_decent_time(tmp_path: Path) -> None:
    """The next hang of the same job waits for the time between bundles; another job does not."""
    node = Node(tmp_path)
    await node.look("slurm-1")
    await node.look("slurm-1", seconds=10)
    await node.look(seconds=60)
    await node.look("slurm-1", "slurm-2")
    assert await node.look("slurm-1", "slurm-2", seconds=10) == ["slurm-1", "slurm-2"]
    assert await node.look("slurm-1", "slurm-2", seconds=1800) == [
        "slurm-1",
        "slurm-2",
        "slurm-1",
    ]
    await node.evidence.close()


async def test_a_restarted_agent_takes_no_second_bundle(tmp_path: Path) -> None:
    """What lies on disk counts: the hang goes on, and the agent was restarted."""
    node = Node(tmp_path)
    await node.look("slurm-1")
    await node.look("slurm-1", seconds=10)
    successor = Node(tmp_path)
    successor.wall = node.wall
    await successor.evidence.apply(Config().with_section(OPTIONS))
    await successor.look("slurm-1")
    assert await successor.look("slurm-1", seconds=10) == ["slurm-1"]
    assert len(successor.evidence.status()["bundles"]) == 1


async def test_a_hang_that_is_over_before_its_turn_is_not_taken(tmp_path: Path) -> None:
    """A job that goes on is neither called hung nor made to dump, though another's evidence took
    long.
    """
    node = Node(tmp_path)
    await node.look("slurm-1", "slurm-2")
    node.monotonic += 10.0
    node.evidence.update_hangs(map(hang, ("slurm-1", "slurm-2")))
    await asyncio.sleep(0)
    assert node.evidence._waiting.keys() == {"slurm-2"}
    assert await node.look("slurm-1") == ["slurm-1"]
    await node.evidence.close()


async def test_evidence_can_be_switched_off(tmp_path: Path) -> None:
    """Nothing is taken, and the directory is not even made."""
    node = Node(tmp_path, dataclasses.replace(OPTIONS, enabled=False))
    await node.look("slurm-1")
    assert await node.look("slurm-1", seconds=100) == []
    assert not node.evidence.directory.exists()


async def test_a_bundle_is_counted_and_named(tmp_path: Path) -> None:
    """How it went, and which is the newest of a job."""
    node = Node(tmp_path)
    with training_process() as pid:
        taken = await node.evidence.collect(
            HangCase(job="slurm-7", reason="waiting", ranks=((0, pid),))
        )
    assert (taken.outcome, taken.bundle) == ("complete", "20261121T142900Z-slurm-7")
    assert node.values(BUNDLES)["complete",] == 1
    assert sum(node.values(BUNDLES).values()) == 1
    assert node.values(INFO) == {("slurm-7", taken.bundle): 1}
    files = list((node.evidence.directory / taken.bundle).iterdir())
    names = {file.name for file in files}
    assert {
        "summary.txt",
        "metrics-before.prom",
        "metrics-after.prom",
        "probes.json",
    } <= names
    assert any(re.fullmatch(r"rank-0-\d+\.kernel\.txt", name) for name in names)


async def test_a_job_of_which_no_rank_is_found_gives_part_of_a_bundle(tmp_path: Path) -> None:
    """Metrics and kernel lines are kept, and the outcome says that it is not all."""
    taken = await Node(tmp_path).evidence.collect(HangCase(job="slurm-404", reason="waiting"))
    assert taken.outcome == "partial"
    assert (
        "Ranks on this node: 0"
        in (tmp_path / "evidence" / taken.bundle / "summary.txt").read_text()
    )


def test_a_collection_that_hangs_is_killed_and_what_it_had_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundle stays, its summary says that it is not whole, and no process is left."""

    async def scene() -> None:
        node = Node(tmp_path, dataclasses.replace(OPTIONS, deadline=Duration(3.0)), command=STOPPED)
        let_time_pass_once(monkeypatch, lambda: node.collects, 3.0)
        taken = await node.evidence.collect(CASE)
        assert taken.outcome == "killed"
        assert node.values(BUNDLES)["killed",] == 1
        text = (node.evidence.directory / taken.bundle / "summary.txt").read_text()
        assert "THE COLLECTION HAS NOT ENDED" in text
        assert "What shows the cause\n  not known yet\n" in text
        assert "Ranks on this node: not known yet\n" in text
        assert "Not collected\n  not known yet\n" in text
        assert (
            node.evidence.directory / taken.bundle / "metrics-before.prom"
        ).read_text() == "dshealthd_job_step 1\n"
        assert node.values(INFO) == {("slurm-7", taken.bundle): 1}

    before = children(os.getpid())  # of what another test imported
    asyncio.run(scene())
    assert {*children(os.getpid())} <= {*before}


async def test_a_summary_has_what_was_seen_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks that were inspected are in the summary of a collection that is killed."""
    stopped = STOPPED[2].replace("Collection.collect", "Collection._read_dumps")
    command = (sys.executable, "-c", stopped)
    node = Node(tmp_path, dataclasses.replace(OPTIONS, deadline=Duration(15.0)), command=command)
    let_time_pass_once(monkeypatch, lambda: node.collects, 15.0)
    with training_process() as pid:
        case = HangCase(job="slurm-7", reason="waiting", ranks=((0, pid),))
        taken = await node.evidence.collect(case)
    assert taken.outcome == "killed"
    text = (node.evidence.directory / taken.bundle / "summary.txt").read_text()
    assert "THE COLLECTION HAS NOT ENDED" in text
    assert re.search(rf"Ranks on this node: 1\n  rank 0, .*, pid {pid}, .*, sleeping", text), text


def test_what_a_killed_collection_had_begun_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps of a collecting process that is killed, and what they run, are not left behind."""
    (tmp_path / "pid").touch()
    code = f"""
import os, subprocess, time
from dshealthd.linux.forked import run
def hang(emit):
    process = subprocess.Popen(["sleep", "60"])
    with open({str(tmp_path / "pid")!r}, "w") as file:
        file.write(f"{{os.getpid()}} {{process.pid}}")
    time.sleep(60)
run("hang", hang, 60)
"""

    async def scene() -> None:
        node = Node(
            tmp_path,
            dataclasses.replace(OPTIONS, deadline=Duration(6.0)),
            command=(sys.executable, "-c", code),
        )
        let_time_pass_once(monkeypatch, (tmp_path / "pid").read_bytes, 6.0)
        assert (await node.evidence.collect(CASE)).outcome == "killed"

    asyncio.run(scene())
    step = int((tmp_path / "pid").read_text(encoding="ascii").split()[0])
    until(lambda: not runs(step))


async def test_a_loop_goes_on_while_a_collection_hangs(tmp_path: Path) -> None:
    """The agent's loop is never held up by more than a moment."""
    node = Node(tmp_path, dataclasses.replace(OPTIONS, deadline=Duration(2.0)), command=HANGING)
    task = asyncio.create_task(node.evidence.collect(CASE))
    worst = 0.0
    while not task.done():
        watch = Stopwatch()
        await asyncio.sleep(0.01)
        worst = max(worst, watch.seconds())
    assert task.result().outcome == "killed"
    assert worst < 1.0


async def test_a_collecting_process_that_ends_early_is_a_failure(tmp_path: Path) -> None:
    """Neither an exception nor a wait: an outcome."""
    node = Node(tmp_path, command=FAILING)
    taken = await node.evidence.collect(CASE)
    assert (taken.outcome, taken.bundle) == ("failed", "")
    missing = Node(tmp_path, command=("/nonexistent",))
    assert (await missing.evidence.collect(CASE)).outcome == "failed"


async def test_a_disk_that_is_nearly_full_is_a_refusal(tmp_path: Path) -> None:
    """It is counted, and says how much there is."""
    node = Node(tmp_path, dataclasses.replace(OPTIONS, min_free_bytes=Bytes(1 << 60)))
    taken = await node.evidence.collect(CASE)
    assert taken.outcome == "refused"
    assert "MiB are free" in taken.detail
    assert node.values(BUNDLES)["refused",] == 1


async def test_bundles_that_cannot_be_listed_are_unknown(tmp_path: Path) -> None:
    """And not none, by which the next hang of a job would be its first."""
    node = Node(tmp_path)
    node.evidence.directory.touch()
    assert (await node.evidence.collect(CASE)).outcome == "refused"
    assert node.evidence.status()["bundles"] is None


@pytest.mark.parametrize(("ended", "asks"), [(0, True), (1, False)])
def test_the_node_of_a_rank_0_that_has_ended_queries_ras(ended: int, *, asks: bool) -> None:
    """No other node does, and its peers can tell that it is gone."""
    ranks = (rank_state(9.0, rank=ended, ended=ExitKind.FAILED), rank_state(9.0, rank=2, pid=101))
    found = case(dataclasses.replace(hang("slurm-1"), ranks=ranks))
    assert found.ranks == ((2, 101),)
    assert found.always_ask is asks


@pytest.mark.parametrize(("hanging", "outcome"), [(8, "complete"), (9, "refused")])
async def test_a_user_for_whom_processes_hang(tmp_path: Path, hanging: int, outcome: str) -> None:
    """What cannot be killed does not add up with each hang, until the service may start nothing
    else. What has ended counts no more.
    """
    node = Node(tmp_path)
    with training_process() as pid, contextlib.ExitStack() as stack:
        left = []
        for _ in range(9):
            process = stack.enter_context(subprocess.Popen(["sleep", "60"], process_group=0))
            stack.callback(process.kill)
            left.append(process)
        node.evidence._left = {os.getuid(): [process.pid for process in left]}
        for process in left[hanging:]:
            process.kill()
            process.wait()
        taken = await node.evidence.collect(
            HangCase(job="slurm-7", reason="waiting", ranks=((0, pid),))
        )
    assert taken.outcome == outcome
    assert ("hangs and cannot be killed" in taken.detail) is (outcome == "refused")


async def test_what_a_collection_leaves_is_remembered(tmp_path: Path) -> None:
    """By the user of the ranks."""
    answers = {"outcome": "partial", "detail": "", "kept": [], "user": 4321, "left": [os.getpgrp()]}
    code = f"""
import socket, sys
from dshealthd.core import wire
channel = socket.socket(fileno=int(sys.argv[1]))
next(wire.frames(channel))
channel.sendall(wire.pack({answers}))
"""
    node = Node(tmp_path, command=(sys.executable, "-c", code))
    for _ in range(9):
        assert node.evidence._hanging() == []
        await node.evidence.collect(CASE)
    assert node.evidence._hanging() == [4321]


async def test_a_state_directory_that_is_not_there_is_a_failure(tmp_path: Path) -> None:
    """An agent whose state could not be made goes on without evidence, and says why."""
    taken = await Node(tmp_path / "missing").evidence.collect(CASE)
    assert taken.outcome == "failed"
    assert "No such file or directory" in taken.detail


async def test_a_disk_that_hangs_is_unknown_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While bundles cannot be listed the loop goes on, and their number is absent, not 0."""
    asked, over = tmp_path / "asked", asyncio.Event()
    hanging = shell_script(tmp_path / "hanging", f"mkdir {asked}; exec sleep 5")
    (tmp_path / "evidence").mkdir()

    async def happens(_event: asyncio.Event, seconds: float | None) -> bool:
        assert seconds == 2.0
        await over.wait()
        return False

    monkeypatch.setattr(background, "happens", happens)
    monkeypatch.setattr(sys, "executable", str(hanging))
    node = Node(tmp_path)
    beginning = asyncio.create_task(node.evidence.apply(Config().with_section(OPTIONS)))
    await eventually(asked.exists)  # the loop goes on meanwhile
    assert not beginning.done()
    over.set()
    await beginning
    assert node.evidence.status()["bundles"] is None
    monkeypatch.undo()
    await node.evidence.apply(Config().with_section(OPTIONS))  # as a reload does
    assert node.evidence.status()["bundles"] == []
    await node.evidence.close()


def test_to_stop_ends_a_collection(tmp_path: Path) -> None:
    """An agent that stops does not wait for evidence, and leaves no process behind."""

    async def scene() -> None:
        node = Node(tmp_path, dataclasses.replace(OPTIONS, after=Duration(0.0)), command=HANGING)
        node.evidence.update_hangs([hang("slurm-1")])
        await eventually(lambda: {*children(os.getpid())} - {*before})
        watch = Stopwatch()
        await node.evidence.close()
        assert watch.seconds() < 3

    before = children(os.getpid())  # of what another test imported
    asyncio.run(scene())
    assert {*children(os.getpid())} <= {*before}
