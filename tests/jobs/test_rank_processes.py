"""Ranks without heartbeats, as the kernel shows their processes."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from dshealthd.core.host import Host
from dshealthd.jobs import rank_processes
from dshealthd.jobs.hangs.exits import ExitKind
from dshealthd.jobs.processes import TrainingProcess, read_stat
from dshealthd.jobs.rank_processes import RankProcesses, _RankProcess
from dshealthd.linux.activity import Activity, ThreadState
from tests.jobs.machines import TORCH, started, training_process
from tests.processes import state
from tests.waiting import until

KEPT = 600.0


@pytest.fixture
def ranks() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Three processes, which end with the test, and wait until then."""
    command = [sys.executable, "-c", "print(flush=True); input()"]
    made = [subprocess.Popen(command, stdin=-1, stdout=-1) for _ in range(3)]
    for process in made:
        assert process.stdout is not None
        process.stdout.readline()
    until(lambda: all(state(process.pid) == "S" for process in made))
    yield made
    for process in made:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()


class Scene:
    """The ranks of a job, without those that are gone, as a table of processes shows them."""

    def __init__(self, ranks: list[subprocess.Popen[bytes]]) -> None:
        self.processes: list[TrainingProcess] = []
        for number, rank in enumerate(ranks):
            variables = {**TORCH, "RANK": str(number), "LOCAL_RANK": str(number)}
            start = started(rank.pid)
            self.processes.append(training_process(rank.pid, variables, start=start))
        self.watch = RankProcesses(Host())
        self.now = 0.0

    def look(self, *, gone: tuple[int, ...] = ()) -> set[tuple[int, str, float]]:
        """Return the troubles ten seconds later."""
        self.now += 10.0
        left = [one for number, one in enumerate(self.processes) if number not in gone]
        return {(one.rank, one.what, one.seconds) for one in self.watch.troubles(left, self.now)}

    def await_state(self, state: str, *numbers: int) -> None:
        """Wait until ranks are in a state, by the kernel's letter."""
        pids = [self.processes[number].pid for number in numbers]
        until(lambda: all(read_stat(Host(), pid).state == state for pid in pids))


def test_a_rank_that_is_stopped(ranks: list[subprocess.Popen[bytes]]) -> None:
    """It is told with for how long, until it goes on; a job of which all are stopped was
    suspended.
    """
    scene = Scene(ranks)
    with closing(scene.watch):
        assert scene.look() == set()
        ranks[1].send_signal(signal.SIGSTOP)
        scene.await_state("T", 1)
        assert scene.look() == {(1, "stopped", 0.0)}
        assert scene.look() == {(1, "stopped", 10.0)}
        for rank in (ranks[0], ranks[2]):
            rank.send_signal(signal.SIGSTOP)
        scene.await_state("T", 0, 2)
        assert scene.look() == set()
        for rank in ranks:
            rank.send_signal(signal.SIGCONT)
        scene.await_state("S", 0, 1, 2)
        assert scene.look() == set()


@pytest.mark.parametrize("reaped", [True, False])
def test_a_rank_that_is_killed(ranks: list[subprocess.Popen[bytes]], *, reaped: bool) -> None:
    """How it ended is told while others of its run go on, and after that if it was by a signal."""
    scene = Scene(ranks)
    with closing(scene.watch):
        scene.look()
        ranks[1].kill()
        scene.await_state("Z", 1)
        if reaped:
            ranks[1].wait()
        # Before Linux 6.15 nobody knows how a process ended that its parent has reaped.
        ((rank, what, seconds),) = scene.look(gone=(1,))
        assert (rank, seconds) == (1, 0.0)
        assert what in ({"killed", "unknown"} if reaped else {"killed"})
        assert scene.look(gone=(1,)) == {(1, what, 10.0)}
        for other in (ranks[0], ranks[2]):
            other.terminate()
        scene.await_state("Z", 0, 2)
        over = what == "killed"
        assert scene.look(gone=(0, 1, 2)) == ({(1, what, 20.0)} if over else set())
        scene.now += KEPT - 40.0
        assert scene.look(gone=(0, 1, 2)) == ({(1, what, KEPT - 10.0)} if over else set())
        assert scene.look(gone=(0, 1, 2)) == set()


@pytest.mark.parametrize("everyone", [False, True])
def test_a_run_that_ends_with_a_rank(
    ranks: list[subprocess.Popen[bytes]], *, everyone: bool
) -> None:
    """The rank that was killed first is told after its run has ended, until the job goes on; not
    where all were, as by somebody who ends the job.
    """
    scene = Scene(ranks)
    with closing(scene.watch):
        scene.look()
        ranks[1].kill()
        for rank in (ranks[0], ranks[2]):
            rank.send_signal(signal.SIGKILL if everyone else signal.SIGTERM)
        scene.await_state("Z", 0, 1, 2)
        told = set() if everyone else {(1, "killed")}
        for _ in range(2):
            found = scene.look(gone=(0, 1, 2))
            assert {(rank, what) for rank, what, _ in found} == told
        assert {what for _, what, _ in scene.look(gone=(0, 1))} <= {"blocked"}
        scene.now += KEPT
        assert scene.look(gone=(0, 1, 2)) == set()


def test_a_rank_that_is_started_anew(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Its earlier process is told no longer."""
    scene = Scene(ranks[:2])
    first = scene.processes[1]
    with closing(scene.watch):
        scene.look()
        ranks[1].kill()
        scene.await_state("Z", 1)
        assert len(scene.look(gone=(1,))) == 1
        pid = ranks[2].pid
        scene.processes[1] = dataclasses.replace(first, pid=pid, start=started(pid))
        assert scene.look() == set()


def test_a_process_that_is_no_rank_any_more(ranks: list[subprocess.Popen[bytes]]) -> None:
    """One that runs has not ended, whatever it was taken for, as a launcher before its ranks."""
    scene = Scene(ranks)
    with closing(scene.watch):
        for gone in ((), (1,), (1,), ()):
            assert scene.look(gone=gone) == set()


@pytest.mark.parametrize("run", ["r", ""])
def test_a_run_that_its_launcher_starts_anew(
    ranks: list[subprocess.Popen[bytes]], run: str
) -> None:
    """Torchrun gives it another port, and so another name; its end is over all the same."""
    scene = Scene(ranks)
    environment = {**TORCH, "TORCHELASTIC_RUN_ID": run}
    scene.processes = [
        dataclasses.replace(process, parent=42, environment=environment)
        for process in scene.processes
    ]
    anew = dataclasses.replace(scene.processes.pop(), job="run-2")
    with closing(scene.watch):
        scene.look()
        ranks[0].terminate()
        ranks[1].kill()
        scene.await_state("Z", 0, 1)
        assert scene.look(gone=(0, 1)) == {(1, "killed", 0.0)}
        scene.processes = [anew]
        assert scene.look() == (set() if run else {(1, "killed", 10.0)})


def test_so_many_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor each: not of whatever a user starts, who leaves places to others. A run of which
    all of these are stopped was suspended, as far as anybody knows.
    """
    scene, looks = Scene([]), list[int]()

    def stopped(_host: Host, pid: int, start: int) -> Activity:
        looks.append(pid)
        return Activity(ThreadState.STOPPED, start, 0.0, 0)

    monkeypatch.setattr(rank_processes, "activity", stopped)
    for number in range(257):
        variables = {**TORCH, "RANK": str(number), "WORLD_SIZE": "257"}
        scene.processes.append(training_process(1 << 23 | number, variables, user=1))
    assert scene.look() == set()
    assert len(scene.watch._followed) == 256
    assert len(looks) == 256, "and nobody looks at the others"
    other = training_process(1 << 22, start=2, job="run-2", user=2)
    scene.processes.append(other)
    scene.look()
    assert len(scene.watch._followed) == 256
    assert other.key in scene.watch._followed


def test_so_many_failures_are_remembered() -> None:
    """The latest, of each user: nobody's are pushed out by those of another."""
    watch = RankProcesses(Host())
    ends = [(f"run-{number}", 1, float(number)) for number in range(1, 300)]
    watch._failed = [
        (_RankProcess((job, ""), 0, 1, -1, None, user), ExitKind.KILLED, at)
        for job, user, at in [("run-0", 2, 0.0), *ends]
    ]
    told = [trouble.job for trouble in watch.troubles([], 300.0)]
    assert len(told) == 256
    assert {"run-0", "run-299"} <= {*told}
    assert "run-1" not in told
