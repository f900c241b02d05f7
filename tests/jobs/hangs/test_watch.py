"""Watching ranks: what counts as silence, what their processes do meanwhile, and for how long an
end is told.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest

from dshealthd.core.host import Host
from dshealthd.jobs.hangs import watch as watch_module
from dshealthd.jobs.hangs.exits import End, ExitKind, ExitWatcher
from dshealthd.jobs.hangs.judge import judge
from dshealthd.jobs.hangs.states import NO_WORK, RankState
from dshealthd.jobs.hangs.watch import RankWatch
from dshealthd.jobs.heartbeats.identity import Identity
from dshealthd.linux.activity import ThreadState
from dshealthd.training.message import DeviceMemory, Message, Phase, StepStage
from tests.jobs.machines import TORCH, stat_line, training_process

FLOOR = 30.0
KEPT = 600.0
MAX_ENDED = 256
WINDOW = 30.0

JOB = "run-1"


def who(rank: int, start: int = 1) -> Identity:
    """Return the process of a rank."""
    process = training_process(100 + rank, {**TORCH, "RANK": str(rank)}, start=start)
    return Identity(process, (start, 7))


class KnownEnds:
    """Ends of processes, as the test says."""

    def __init__(self) -> None:
        self.ends: dict[tuple[int, int], End] = {}
        self.followed: set[tuple[int, int]] = set()

    def follow(self, pid: int, start: int) -> None:
        """Remember that it is asked for."""
        self.followed.add((pid, start))

    def end(self, pid: int, start: int) -> End | None:
        """Return what the test has said."""
        return self.ends.get((pid, start))

    def forget(self, pid: int, start: int) -> None:
        """Forget it; KeyError if it was never asked for."""
        self.followed.remove((pid, start))


class Scene:
    """A watch, the processes of a machine, and two ranks that make a step each second."""

    def __init__(self, path: Path) -> None:
        self.proc = path
        self.ends = KnownEnds()
        self.watch = RankWatch(Host(procfs=path), cast("ExitWatcher", self.ends), slack=3.0)
        self.now = 1000.0
        self.present = {(JOB, rank): (who(rank), Message(step=0, sent=self.now)) for rank in (0, 1)}
        for rank in (0, 1):
            self.process(rank)
        self.look(0.0)

    def process(
        self, rank: int, state: str = "S", ticks: int = 0, start: int = 1, thread: int = 0
    ) -> None:
        """Have the process of a rank be in a state, with so many ticks on CPUs, and so many of its
        main thread, which waits in the kernel where a file says.
        """
        place = self.proc / str(100 + rank)
        task = place / "task" / str(100 + rank)
        task.mkdir(parents=True, exist_ok=True)
        for where, used in ((place, ticks), (task, thread)):
            line = stat_line(100 + rank, state=state, ticks=used, start=start)
            (where / "stat").write_bytes(line)

    def tell(self, rank: int, **of_message: Any) -> None:
        """Have the page of a rank hold something else."""
        identity, before = self.present[JOB, rank]
        self.present[JOB, rank] = identity, before._replace(**of_message)

    def step(self, rank: int, **of_message: Any) -> None:
        """Have a rank make a step just now."""
        _, before = self.present[JOB, rank]
        self.tell(rank, step=before.step + 1, sent=self.now, **of_message)

    def look(self, seconds: float = 1.0) -> None:
        """Look once, so many seconds later."""
        self.now += seconds
        self.watch.check(self.present, self.now)

    def wait(self, seconds: int) -> None:
        """Look once a second, while no rank makes a step."""
        for _ in range(seconds):
            self.look()

    def train(self, seconds: int) -> None:
        """Let both ranks make steps."""
        for _ in range(seconds):
            self.now += 1.0
            self.step(0)
            self.step(1)
            self.look(0.0)

    def rank(self, rank: int) -> RankState:
        """Return what is known of a rank."""
        return next(found for found in self.watch.jobs()[JOB] if found.rank == rank)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """Two ranks that have made twenty steps."""
    scene = Scene(tmp_path)
    scene.train(20)
    return scene


def test_silence(scene: Scene) -> None:
    """A rank that makes steps is not silent, one that does not is so for as long as it has made
    none.
    """
    for _ in range(40):
        scene.now += 1.0
        scene.step(0)
        scene.look(0.0)
    assert (scene.rank(0).silence, scene.rank(0).step, scene.rank(0).overdue) == (0.0, 60, False)
    rank = scene.rank(1)
    assert (rank.silence, rank.bound, rank.overdue) == (40.0, FLOOR, True)


def test_a_watchdog_of_its_own(scene: Scene) -> None:
    """When a job ends itself, its process group tells, and its environment may tell an earlier
    time.
    """
    identity, message = scene.present[JOB, 0]
    process = dataclasses.replace(
        identity.process, environment={**TORCH, "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "120"}
    )
    for told, seconds in ((60, 60), (300, 120)):
        of_rank = dataclasses.replace(identity, process=process), message._replace(timeout=told)
        scene.present[JOB, 0] = of_rank
        scene.step(0)
        scene.look()
        assert scene.rank(0).timeout == seconds


def test_when_a_step_was_made(scene: Scene) -> None:
    """Silence is counted from the step itself and not from when the agent saw it."""
    scene.now += 0.2
    scene.step(0)
    scene.look(0.8)
    assert scene.rank(0).silence == pytest.approx(0.8)


@pytest.mark.parametrize("sent", [0.0, 1e9])
def test_a_clock_that_lies(scene: Scene, sent: float) -> None:
    """A sender whose clock is another's, or that lies, moves its own silence by no more than the
    time since the look before.
    """
    scene.step(0)
    scene.tell(0, sent=sent)
    scene.look(1.0)
    assert 0.0 <= scene.rank(0).silence <= 1.0


def test_an_agent_that_stood_still(scene: Scene) -> None:
    """Time in which nobody looked is no silence."""
    scene.look(3600.0)
    assert scene.rank(0).silence <= 3.0
    assert not scene.rank(0).overdue


def test_time_on_cpus(scene: Scene) -> None:
    """What a silent rank takes of a core is an average since it was last heard, and of the last
    minute; what its training's thread takes is told apart from what others do.
    """
    for second in range(1, 13):
        scene.process(0, ticks=100 * second, thread=90 * second)
        scene.process(1, ticks=5 * second)
        scene.look()
    assert (scene.rank(0).cpu, scene.rank(0).thread_cpu) == (1.0, 0.9)
    assert scene.rank(1).cpu == pytest.approx(0.05)
    assert scene.rank(1).thread_cpu == 0.0
    for second in range(62):
        scene.look()
        assert second > 25 or scene.rank(0).cpu
    assert scene.rank(0).cpu == 0.0
    scene.step(0, memory=DeviceMemory(1, 2, 3))
    scene.look()
    assert (scene.rank(0).cpu, scene.rank(0).on_gpu) == (None, True)


@pytest.mark.parametrize(("running", "waiting", "works"), [
    (0.1, 0.8, True),  # as it computes on a CPU that many want
    (0.1, 0.3, False),  # as one that polls does
])  # fmt: skip
def test_threads_that_get_no_cpu(
    scene: Scene,
    running: float,
    waiting: float,
    works: bool,  # noqa: FBT001
) -> None:
    """While the main thread waits for it, a thread that is runnable all the time is at work."""
    for thread in (100, 105, 106, 107):
        (scene.proc / "100" / "task" / str(thread)).mkdir(exist_ok=True)
    for second in range(round(FLOOR) + 3):
        scene.process(0, ticks=round(3 * 100 * running * second))
        for thread in (105, 106, 107):
            text = f"{running * second * 1e9:.0f} {waiting * second * 1e9:.0f} 7"
            (scene.proc / "100" / "task" / str(thread) / "schedstat").write_text(text)
        scene.look()
    assert scene.rank(0).thread_cpu == 0.0
    assert scene.rank(0).cpu == pytest.approx(max(3 * running, running + waiting))
    assert scene.rank(0).computes(NO_WORK) is works


@pytest.mark.parametrize("readable", [256, 0])
def test_threads_are_looked_at_in_turns(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, readable: int
) -> None:
    """Those of eight processes at a time, each of which has as many as are read: the loop waits
    meanwhile. Neither another user's many ranks keep a silent one waiting, nor those of its own job
    that make steps.
    """
    looks: Counter[int] = Counter()

    def demands(_host: Host, pid: int) -> dict[int, float]:
        looks[pid] += 1
        return dict.fromkeys(range(readable), 0.0)

    def look() -> None:
        for rank in range(40, 50):
            scene.step(rank)
        scene.look()

    monkeypatch.setattr(watch_module, "demands", demands)
    for rank in range(2, 32):
        process = training_process(100 + rank, {**TORCH, "RANK": str(rank)}, job="run-2", user=7)
        begun = Message(step=0, sent=scene.now)
        scene.present["run-2", rank] = Identity(process, (1, 7)), begun
        scene.process(rank)
    for rank in range(40, 50):
        scene.present[JOB, rank] = who(rank), begun
        scene.process(rank)
    for _ in range(50):  # half of what is usual in the first steps
        look()
    looks.clear()
    for check in range(1, 11):
        look()
        assert (looks.total(), looks[100], looks[101]) == (8 * check, check, check)
        idle = {rank.thread_cpu for rank in scene.watch.jobs()["run-2"]}
        assert (idle == {0.0}) is (check == 10), "all were looked at twice"


def test_threads_that_had_no_turn(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may write, or wait for a CPU: their rank is not known to be idle. Nor is anything known
    of the one that trains, until it was looked for.
    """
    scene.step(0, thread=12)
    scene.step(1, phase=Phase.CHECKPOINT)
    scene.process(0, "T")
    monkeypatch.setattr(watch_module, "THREADS", 0)
    scene.wait(80)
    assert scene.rank(0).state is not ThreadState.STOPPED
    assert (scene.rank(1).stores, scene.rank(1).thread_cpu) == (True, None)
    monkeypatch.setattr(watch_module, "THREADS", 2048)
    scene.look()
    assert scene.rank(0).state is ThreadState.STOPPED
    assert (scene.rank(1).stores, scene.rank(1).thread_cpu) == (False, None)
    scene.look()
    assert (scene.rank(1).stores, scene.rank(1).thread_cpu) == (False, 0.0)
    monkeypatch.setattr(watch_module, "THREADS", 0)
    scene.step(1, phase=Phase.TRAINING)
    scene.wait(20)
    assert scene.rank(1).thread_cpu is None, "what was seen before its step says nothing"


def test_the_thread_that_trains(scene: Scene) -> None:
    """It may be another than the main one, and has another number outside its container."""
    task = scene.proc / "100" / "task"
    for thread, inside in ((100, 7), (105, 12), (109, 16)):
        (task / str(thread)).mkdir(exist_ok=True)
        (task / str(thread) / "status").write_text(f"Name:\tx\nNSpid:\t{thread}\t{inside}\n")
    scene.step(0, thread=12)

    def look(ticks: int) -> None:
        (task / "105" / "stat").write_bytes(stat_line(105, ticks=ticks, start=1))
        (task / "105" / "wchan").write_text("request_wait_answer")
        scene.look()

    for second in range(13):
        look(20 * second)
    assert scene.rank(0).thread_cpu == pytest.approx(0.2)
    assert scene.rank(0).state is ThreadState.BLOCKED


def test_states(scene: Scene) -> None:
    """What the process does is looked up once it is silent."""
    scene.process(0, "T")
    scene.process(1, "D")
    scene.look(3.0)
    assert (scene.rank(0).state, scene.rank(1).state) == (ThreadState.STOPPED, ThreadState.BLOCKED)
    (scene.proc / "100" / "stat").write_text("")
    scene.look()
    assert scene.rank(0).state is ThreadState.UNKNOWN


@pytest.mark.parametrize(("seconds", "seen"), [(1.9, False), (2.1, True)])
def test_a_process_is_checked_once_its_rank_is_silent(
    scene: Scene, seconds: float, *, seen: bool
) -> None:
    """After two seconds; before, only at each fifth check."""
    scene.process(0, "T")
    scene.look(seconds)
    assert (scene.rank(0).state is ThreadState.STOPPED) is seen
    scene.train(2)
    assert (scene.rank(0).state is ThreadState.STOPPED) is seen
    scene.train(1)
    assert scene.rank(0).state is ThreadState.STOPPED


def test_for_how_long_a_process_is_stopped(scene: Scene) -> None:
    """A stop is as long as it was seen, and over once the process goes on."""
    scene.process(0, "T")
    scene.process(1, "t")
    scene.wait(10)
    assert 7.0 <= scene.rank(0).stopped_for <= 10.0
    scene.process(0, "S")
    scene.process(1, "S")
    scene.look()
    assert (scene.rank(0).stopped_for, scene.rank(1).stopped_for) == (0.0, 0.0)
    assert scene.rank(0).silence == 0.0
    assert scene.rank(1).silence >= 10.0
    scene.process(1, "t")
    scene.wait(round(FLOOR) + 2)
    scene.process(1, "S")
    scene.look()
    assert scene.rank(1).silence == 0.0, "a debugger, and no tool that read its stack"


@pytest.mark.parametrize(("silent", "at_least"), [(0, 12.0), (4, 11.0)])
def test_a_stop_is_as_old_as_the_last_sign_that_it_was_none(
    scene: Scene, silent: int, at_least: float
) -> None:
    """Of a heartbeat or a look: a rank that was stopped is no less silent than it is stopped."""
    scene.wait(silent)
    scene.process(0, "T")
    scene.wait(12)
    stopped_for = scene.rank(0).stopped_for
    assert at_least <= stopped_for <= at_least + 1.0
    assert stopped_for <= scene.rank(0).silence


@pytest.mark.parametrize(("silent", "stopped_for"), [(0.5, 0.5), (3.0, 2.0)])
def test_a_stop_that_is_seen_at_the_first_check(
    scene: Scene, silent: float, stopped_for: float
) -> None:
    """It is not longer than the rank is silent, nor than a healthy one is."""
    scene.process(0, "T")
    while scene.rank(0).state is not ThreadState.STOPPED:
        scene.step(0)
        scene.look(silent)
    assert scene.rank(0).stopped_for == stopped_for


def test_for_how_long_a_phase_lasts(scene: Scene) -> None:
    """A phase is as old as its first heartbeat; those within it do not make it younger."""
    scene.step(0, phase=Phase.EVALUATION)
    for _ in range(10):
        scene.look()
        scene.step(0)
    assert scene.rank(0).phase_seconds == pytest.approx(10.0, abs=1.0)
    scene.step(0, phase=Phase.TRAINING)
    scene.look()
    assert scene.rank(0).phase_seconds <= 1.0


@pytest.mark.parametrize("state", ["D", "S"])
def test_a_thread_that_waits_for_storage(scene: Scene, state: str) -> None:
    """In a marked phase that is soon too long, any thread that flushes a file is seen, for a while
    after; before, nobody looks at each thread.
    """
    thread = scene.proc / "100" / "task" / "777"
    thread.mkdir()
    (thread / "stat").write_bytes(stat_line(777, comm=b"writer", state=state, start=1))
    (thread / "wchan").write_text("rpc_wait_bit_killable")
    scene.step(0, phase=Phase.CHECKPOINT)
    scene.step(1, phase=Phase.CHECKPOINT)
    scene.look()
    due = round(scene.rank(0).idle_bound - WINDOW)
    assert due > 0
    scene.wait(due - 2)
    assert not scene.rank(0).stores
    scene.wait(10)
    assert (scene.rank(0).stores, scene.rank(1).stores) == (True, False)
    (thread / "stat").unlink()
    scene.wait(round(WINDOW) + 5)
    assert not scene.rank(0).stores


def test_for_how_long_a_rank_waits_in_a_collective(scene: Scene) -> None:
    """It is in one for as long as nothing else is told; the next of the same type is another."""

    def wait(collective: tuple[int, int], seconds: int) -> tuple[str, float, float]:
        scene.tell(0, collective=collective)
        scene.wait(seconds)
        rank = scene.rank(0)
        return rank.collective, rank.collective_for, rank.silence

    assert wait((16, 1), 10) == ("barrier", 9.0, 10.0)
    assert wait((16, 2), 10) == ("barrier", 9.0, 20.0)
    assert wait((101, 3), 2) == ("other", 1.0, 22.0)
    assert wait((0, 3), 5)[0] == ""
    wait((1, 4), 5)
    scene.step(0)
    operation, waited, silent = wait((1, 5), 3)
    assert (operation, waited) == ("broadcast", 2.0)
    assert silent == pytest.approx(3.0, abs=1.0)


@pytest.mark.parametrize(
    ("timeout", "shown"), [(600, 540), (0, 540), (100, 120), (1800, 1800 + 90 - 701)]
)
def test_a_first_evaluation_that_its_watchdog_would_end(
    scene: Scene, timeout: int, shown: int
) -> None:
    """Half an hour is usual of an evaluation of which nothing is known, unless all ranks wait in a
    collective of it: that is shown a minute before it times out, if the half hour is not over yet.
    """
    for rank in (0, 1):
        scene.step(rank, phase=Phase.EVALUATION, timeout=timeout)
    scene.wait(700)  # they compute, each for itself
    assert judge(JOB, scene.watch.jobs()[JOB], scene.now) is None
    for rank in (0, 1):
        scene.tell(rank, collective=(16, 1))
    scene.look()
    seen = []
    for _ in range(shown + 1):
        still = judge(JOB, scene.watch.jobs()[JOB], scene.now)
        seen.append(still is not None and still.shown)
        scene.look()
    assert seen == [False] * shown + [True]


def test_a_rank_that_evaluates_while_others_wait(scene: Scene) -> None:
    """It has its half hour."""
    scene.step(0, phase=Phase.EVALUATION)
    scene.step(1, phase=Phase.EVALUATION, collective=(16, 1))
    scene.wait(1000)
    assert judge(JOB, scene.watch.jobs()[JOB], scene.now) is None


def test_a_stage_that_was_read_after_its_time(scene: Scene) -> None:
    """Stage and time are two words: a rank whose new time was read with its old stage is not held
    there.
    """
    scene.step(0, stage=StepStage.INPUT)
    scene.look()
    scene.tell(0, stage=StepStage.BACKWARD)
    scene.wait(10)
    assert scene.rank(0).stage is StepStage.BACKWARD
    assert scene.rank(0).silence == pytest.approx(10.0, abs=1.0)


def test_an_unusual_silence_is_not_learnt(scene: Scene) -> None:
    """What a pause or a stopped process took is not usual from then on, however often it comes."""

    def wait(unusual: set[str]) -> float:
        scene.wait(90)
        scene.step(0)
        scene.watch.check(scene.present, scene.now, unusual)
        return scene.rank(0).bound

    assert [wait({JOB}) for _ in range(3)] == [FLOOR] * 3
    assert wait(set()) == FLOOR
    assert wait(set()) > 2 * FLOOR


def end(scene: Scene, rank: int, how: ExitKind) -> None:
    """Have the process of a rank end."""
    del scene.present[JOB, rank]
    scene.ends.ends[100 + rank, 1] = End(how, 5000.0)


@pytest.mark.parametrize(("seconds", "known"), [(59, True), (62, False)])
def test_a_saved_baseline_counts_for_a_minute(scene: Scene, seconds: int, *, known: bool) -> None:
    """A process that reports later is one of which nobody knows what it did meanwhile."""
    for place, (identity, message) in scene.present.items():
        process = dataclasses.replace(identity.process, user=7)
        scene.present[place] = dataclasses.replace(identity, process=process), message
    scene.train(20)
    saved = scene.watch.saved()
    scene.watch = RankWatch(Host(procfs=scene.proc), cast("ExitWatcher", scene.ends), slack=3.0)
    scene.watch.restore(saved)
    present, scene.present = scene.present, {}
    scene.wait(seconds)
    scene.present = present
    scene.look()
    assert (scene.rank(0).bound == FLOOR) is known


def test_an_end_is_told_for_a_while(scene: Scene) -> None:
    """How a rank ended stays known for ten minutes."""
    end(scene, 1, ExitKind.KILLED)
    scene.look()
    rank = scene.rank(1)
    assert (rank.ended, rank.ended_at, rank.state) == (ExitKind.KILLED, 5000.0, ThreadState.GONE)
    for _ in range(601):
        scene.step(0)
        scene.look()
    assert [rank.rank for rank in scene.watch.jobs()[JOB]] == [0]
    assert scene.ends.followed == {(100, 1)}


def test_ends_of_a_job_are_forgotten_together(scene: Scene) -> None:
    """The first end is known for as long as the last one, which would otherwise appear to be the
    first.
    """
    end(scene, 1, ExitKind.KILLED)
    scene.wait(300)
    end(scene, 0, ExitKind.FAILED)
    for _ in range(601):
        scene.look()
        assert [rank.rank for rank in scene.watch.jobs()[JOB]] == [0, 1]
    scene.look()
    assert JOB not in scene.watch.jobs()


@pytest.mark.parametrize(("silent", "known"), [(298, False), (301, True)])
def test_an_end_is_known_while_others_wait_for_the_rank(
    scene: Scene, silent: int, *, known: bool
) -> None:
    """A rank that has ended remains the culprit while another has been silent for five minutes."""
    end(scene, 1, ExitKind.KILLED)
    for second in range(round(KEPT) + 2):
        if second < KEPT + 2 - silent:
            scene.step(0)
        scene.look()
    assert (len(scene.watch.jobs()[JOB]) == 2) is known


def test_a_job_that_goes_on(scene: Scene) -> None:
    """An end is told no longer when the launcher has started the job again, with any of its
    ranks.
    """
    end(scene, 0, ExitKind.TERMINATED)
    end(scene, 1, ExitKind.FAILED)
    scene.look()
    assert len(scene.watch.jobs()[JOB]) == 2
    scene.process(0, start=2)
    scene.present[JOB, 0] = who(0, start=2), Message(step=10, sent=scene.now)
    scene.look()
    assert [(rank.rank, rank.start, rank.settled) for rank in scene.watch.jobs()[JOB]] == [
        (0, 2, False)
    ]


@pytest.mark.parametrize(("parent", "run", "known"), [
    (42, "r", False),
    (43, "r", True),  # another launcher, of a run that its user calls the same
    (42, "s", True),
    (42, "", True),  # as a shell starts one training after another
])  # fmt: skip
def test_a_job_that_torchrun_starts_anew(
    scene: Scene, parent: int, run: str, *, known: bool
) -> None:
    """With another port the job has another name, and its launcher tells that it goes on."""
    for place, (identity, message) in scene.present.items():
        scene.present[place] = started_by(identity, 42, run and "r"), message
    scene.look()
    end(scene, 1, ExitKind.FAILED)
    end(scene, 0, ExitKind.TERMINATED)
    anew = started_by(who(0, start=2), parent, run, "run-2")
    scene.process(0, start=2)
    scene.look()
    scene.present["run-2", 0] = anew, Message(step=0, sent=scene.now)
    scene.look()
    assert (JOB in scene.watch.jobs()) is known
    assert "run-2" in scene.watch.jobs()


def started_by(identity: Identity, parent: int, run: str, job: str = JOB) -> Identity:
    """Return a process as a launcher has started it for a run."""
    environment = {**TORCH, "TORCHELASTIC_RUN_ID": run}
    process = dataclasses.replace(identity.process, parent=parent, environment=environment, job=job)
    return dataclasses.replace(identity, process=process)


def test_ends_have_so_many_places(scene: Scene) -> None:
    """A user whose processes report and end all the time takes neither memory without bound nor the
    ends of others: the latest of each user's are kept.
    """
    end(scene, 1, ExitKind.KILLED)
    count = 0
    for _ in range(10):
        living = {}
        for _ in range(MAX_ENDED // 4):
            count += 1
            process = training_process(1000 + count, job=f"churn-{count}", user=7)
            living[process.job, 0] = Identity(process, (1, 7)), Message(step=0, sent=scene.now)
        scene.present |= living
        scene.look()
        for where, (who, _) in living.items():
            del scene.present[where]
            scene.ends.ends[who.process.pid, who.process.start] = End(ExitKind.ENDED, 5000.0)
    scene.look()
    ended = [
        job for job, ranks in scene.watch.jobs().items() for rank in ranks if rank.ended is not None
    ]
    assert len(ended) == 256
    assert {JOB, f"churn-{count}"} <= {*ended}
    assert "churn-1" not in ended
    assert len(scene.ends.followed) == MAX_ENDED + 1  # rank 0 of the job lives


def test_letting_go_of_the_heartbeat(scene: Scene) -> None:
    """A process that lives and has closed its heartbeat is watched no longer after a moment, and is
    no hang.
    """
    del scene.present[JOB, 1]
    scene.wait(3)
    assert len(scene.watch.jobs()[JOB]) == 2
    scene.look()
    assert len(scene.watch.jobs()[JOB]) == 1


def test_a_marked_phase(scene: Scene) -> None:
    """A rank that has marked an evaluation is granted more."""
    scene.tell(0, phase=Phase.EVALUATION, sent=scene.now + 0.5)
    scene.wait(100)
    assert scene.rank(0).phase == Phase.EVALUATION
    assert (scene.rank(0).overdue, scene.rank(1).overdue) == (False, True)


def test_a_process_that_turns_out_to_be_of_another_job(scene: Scene) -> None:
    """Its end, at once after its job has got another name, is an end in that one alone."""
    identity, message = scene.present.pop((JOB, 1))
    other = "run-1-uid12345"
    process = dataclasses.replace(identity.process, job=other)
    scene.present[other, 1] = dataclasses.replace(identity, process=process), message
    scene.look()
    assert [rank.rank for rank in scene.watch.jobs()[JOB]] == [0]
    del scene.present[other, 1]
    scene.ends.ends[101, 1] = End(ExitKind.FAILED, 5000.0)
    scene.look()
    jobs = scene.watch.jobs()
    assert [(rank.rank, rank.ended) for rank in jobs[JOB]] == [(0, None)]
    assert [(rank.rank, rank.ended) for rank in jobs[other]] == [(1, ExitKind.FAILED)]
