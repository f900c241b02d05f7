"""The attempts of trainings: which processes are one, why it ended, and what outlives the agent."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dshealthd.collectors.training import STEP_SECONDS
from dshealthd.core import documents
from dshealthd.core.result import CollectionOutcome, CollectionResult
from dshealthd.findings import attempts as module
from dshealthd.findings.attempts import SPENT, Attempts
from dshealthd.findings.past import DAY
from dshealthd.findings.record import NodeRecord
from dshealthd.jobs.environment import job_name, launch
from dshealthd.jobs.goodput import Goodput
from dshealthd.jobs.hangs.classes import Culprit, HangClass
from dshealthd.jobs.hangs.exits import ExitKind
from dshealthd.jobs.heartbeats.identity import Identity
from dshealthd.jobs.processes import TrainingProcess
from dshealthd.training.message import Message, Totals
from tests.findings.test_judge import SOURCE, loaded
from tests.findings.test_judge import Node as Judged
from tests.findings.test_record import fault, kept
from tests.waiting import eventually

AWAY = 60.0
GONE = 8.0
MAX_EXPORTED = 32
MAX_RUNS = 200

NOW = 1_800_000_000.0
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}


class Node:
    """A node whose detector and receiver show what the test says; a check each two seconds."""

    def __init__(self, record: NodeRecord | None = None) -> None:
        self.record = record or NodeRecord(None)
        self.attempts = Attempts(self.record)
        self.now = 1000.0
        self.senders: dict[tuple[str, int], Any] = {}
        self.states: dict[str, list[Any]] = {}
        self.standstills: dict[str, Any] = {}
        self.pid = 100
        self.parent = 50
        """The pid of the launcher."""

    @property
    def wall(self) -> float:
        """Unix time."""
        return NOW + self.now

    def start(self, rank: int, *, user: int = 7, **variables: str) -> str:
        """Start a rank's process, in place of what was there; return its job."""
        environment = TORCHRUN | {"RANK": str(rank), "MASTER_PORT": "1"} | variables
        place = launch(environment)
        assert place is not None
        self.pid += 1
        job = job_name(environment, "machine")
        process = TrainingProcess(
            self.pid, self.pid, self.parent, job, place, environment, user=user
        )
        sender = SimpleNamespace(message=Message(0, self.now), goodput=Goodput())
        sender.goodput.begin(5.0, self.now, seen=True)
        self.senders[job, rank] = [(Identity(process, (1, 1)), sender)]
        return job

    def step(self, job: str, step: int, seconds: float = 1.0, wait: float = 0.25) -> None:
        """Have all ranks of a job come to a step of so many seconds."""
        for (name, _), [(_, sender)] in self.senders.items():
            if name == job:
                made = step - (sender.goodput.first or 0)
                totals = Totals(step, made - 1, (made - 1) * (seconds - wait), (made - 1) * wait)
                known = seconds if made > 1 else None
                message = Message(
                    step,
                    self.now,
                    last_seconds=known,
                    mean_seconds=known,
                    totals=totals if made > 1 else None,
                )
                sender.message = message
                sender.goodput.add(message, self.now, changed=True)

    def end(self, job: str, rank: int, how: ExitKind) -> None:
        """End a rank's process."""
        [(who, _)] = self.senders.pop((job, rank))
        self.states.setdefault(job, []).append(
            SimpleNamespace(
                rank=rank,
                pid=who.process.pid,
                start=who.process.start,
                ended=how,
                ended_at=self.wall,
            )
        )

    def check(self, seconds: float = 2.0) -> None:
        """Check the ranks, some time later."""
        self.now += seconds
        self.attempts.settle(self.senders, self.states, self.standstills, self.now, self.wall)

    def train(self, job: str, first: int, last: int) -> None:
        """Make steps of two seconds."""
        for step in range(first, last + 1):
            self.step(job, step, 2.0)
            self.check()

    def runs(self) -> list[dict[str, Any]]:
        """Return the attempts as the API shows them."""
        body = self.record.document("n1", self.attempts.lasting(), self.wall)
        found: list[dict[str, Any]] = json.loads(body)["runs"]
        return found


def both(node: Node, **variables: str) -> str:
    """Start two ranks."""
    node.start(0, user=7, **variables)
    return node.start(1, user=7, **variables)


@pytest.fixture
def node() -> Node:
    """Return a node without a job."""
    return Node()


def test_an_attempt_while_it_runs_and_afterwards(node: Node) -> None:
    """One for all ranks of a job, from the start of their processes until the last has ended; the
    rank that failed first is named, not those that were ended with it.
    """
    job = both(node)
    node.check()
    node.train(job, 1, 100)
    (run,) = node.runs()
    assert (run["what"], run["job"], run["says"], run["end"]) == (job, job, "runs", None)
    assert run["begin"] == pytest.approx(NOW + 997.0)
    assert (run["value"], run["card"]["ranks"], run["card"]["world_size"]) == (100.0, 2, 2)
    assert run["card"]["slowest"]["work_seconds"] == pytest.approx(1.75)
    node.end(job, 1, ExitKind.KILLED)
    node.check()
    assert node.runs()[0]["end"] is None
    node.end(job, 0, ExitKind.TERMINATED)
    ended = node.wall
    node.check()
    (run,) = node.runs()
    assert (run["end"], run["part"], run["reason"]) == (ended, "rank 1", "killed")
    assert run["says"] == "rank 1 was killed (SIGKILL)"
    assert sum(run["card"]["times"].values()) == pytest.approx(2 * 205.0, rel=0.02)
    assert {sample.metric for sample in node.attempts.samples()} == set()


@pytest.mark.parametrize(("ends", "reason", "says"), [
    ((ExitKind.ENDED, ExitKind.ENDED), "ended", "ended by itself"),
    ((ExitKind.TERMINATED, ExitKind.ENDED), "terminated", "stopped by a signal"),
    ((ExitKind.FAILED, ExitKind.TERMINATED), "failed", "rank 0 ended with an error"),
    ((ExitKind.CRASHED, ExitKind.KILLED), "crashed", "rank 0 crashed (a signal such"),
    ((ExitKind.TERMINATED, ExitKind.FAILED), "terminated", "stopped by a signal"),
    ((ExitKind.ENDED, ExitKind.FAILED), "failed", "rank 1 ended with an error"),
    ((ExitKind.UNKNOWN, ExitKind.FAILED), "failed", "rank 1 ended with an error"),
    ((ExitKind.UNKNOWN, ExitKind.ENDED), "unknown", "nobody saw how"),
    ((None, ExitKind.ENDED), "unknown", "its heartbeats ended"),
])  # fmt: skip
def test_why_it_ended(
    ends: tuple[ExitKind | None, ExitKind], reason: str, says: str, node: Node
) -> None:
    """By how its processes ended, the first that failed; what nobody saw is unknown."""
    job = both(node)
    node.check()
    for rank, how in enumerate(ends):
        if how is None:
            del node.senders[job, rank]
        else:
            node.end(job, rank, how)
        node.check()
    assert (node.runs()[0]["end"] is None) == (None in ends)  # it may make another page
    node.check(GONE + 1)
    (run,) = node.runs()
    assert run["reason"] == reason
    assert says in run["says"]
    assert run["end"] is not None


@pytest.mark.parametrize(("later", "part"), [(0.5, "rank 1"), (1.5, "rank 0")])
def test_an_error_that_follows_from_a_kill(later: float, part: str, node: Node) -> None:
    """An agent may notice the kill a moment after the error, as the alert has it, too."""
    job = both(node)
    node.check()
    node.end(job, 0, ExitKind.FAILED)
    node.now += later
    node.end(job, 1, ExitKind.KILLED)
    node.check()
    (run,) = node.runs()
    assert run["part"] == part


def test_a_hang_that_ends_it(node: Node) -> None:
    """Its culprit is named, not the rank that a watchdog ended first; a hang that passed is not."""
    job = both(node)
    node.check()
    node.train(job, 1, 10)
    hang = SimpleNamespace(
        shown=True,
        reason=HangClass.INPUT,
        culprits=((1, Culprit.INPUT),),
        explanation="work between steps",
    )
    node.standstills = {job: hang}
    node.check(60.0)
    (run,) = node.runs()
    assert (run["reason"], run["part"]) == ("hung", "rank 1")
    node.standstills = {}
    node.train(job, 11, 12)
    assert node.runs()[0]["reason"] == ""
    node.standstills = {job: hang}
    node.check(60.0)
    node.standstills = {}
    node.end(job, 0, ExitKind.CRASHED)
    node.end(job, 1, ExitKind.KILLED)
    node.check()
    (run,) = node.runs()
    assert (run["reason"], run["part"]) == ("hung", "rank 1")
    assert run["says"] == "hung: work between steps"


def test_a_suspended_job_is_not_hung(node: Node) -> None:
    """It stands still meanwhile, and what ends it is what ended it."""
    job = both(node)
    node.check()
    node.train(job, 1, 10)
    node.standstills = {
        job: SimpleNamespace(shown=False, reason=HangClass.SUSPENDED, culprits=(), explanation="")
    }
    node.check()
    for [(_, sender)] in node.senders.values():
        sender.goodput.add(sender.message, node.now + 60.0, changed=False)
    (run,) = node.runs()
    assert run["says"] == "runs"
    assert run["card"]["times"]["hung"] == pytest.approx(2 * 62.0, abs=5.0)
    node.end(job, 0, ExitKind.TERMINATED)
    node.end(job, 1, ExitKind.TERMINATED)
    node.check()
    assert node.runs()[0]["reason"] == "terminated"


def names(node: Node) -> list[tuple[str, bool]]:
    """Return the runs, and whether each attempt is one after another."""
    return [(run["what"], run["card"]["again"]) for run in node.runs()]


def fail(node: Node, job: str) -> None:
    """End a job."""
    node.end(job, 0, ExitKind.FAILED)
    node.end(job, 1, ExitKind.TERMINATED)
    node.check()


def test_a_restart_by_torchrun_is_the_same_run(node: Node) -> None:
    """Although it meets at another port, and so is another job. Its time begins as the attempt
    before it ends, and the steps that this had made are made again.
    """
    job = both(node, TORCHELASTIC_RESTART_COUNT="0")
    node.check()
    node.train(job, 1, 50)
    fail(node, job)
    node.now += 30.0
    again = both(node, TORCHELASTIC_RESTART_COUNT="1", MASTER_PORT="2")
    assert again != job
    for [(_, sender)] in node.senders.values():
        sender.message = sender.message._replace(step=40)
        sender.goodput.add(sender.message, node.now, changed=True)
    node.check()
    node.train(again, 41, 60)
    assert names(node) == [(job, False), (job, True)]
    times = node.runs()[1]["card"]["times"]
    assert times["restart"] == pytest.approx(2 * 34.0, abs=2.0)
    assert times["repeated"] == pytest.approx(2 * 18.0, abs=4.0)
    assert node.runs()[1]["card"]["first_step"] == 40
    spent = {sample.labels: sample.value for sample in node.attempts.samples()}
    assert spent[again, "repeated"] == pytest.approx(times["repeated"], abs=0.01)
    assert spent[again,] == 2.0
    fail(node, again)
    both(node, TORCHELASTIC_RESTART_COUNT="2", MASTER_PORT="3")
    node.check()
    assert node.attempts._open[-1].reached == 60  # by the one that came furthest


@pytest.mark.parametrize(("world", "part"), [("1", "work"), ("2", "unmeasured")])
def test_a_rank_without_others(world: str, part: str, node: Node) -> None:
    """Its steps are its own work; beside others, they may be waits that nobody has measured."""
    job = node.start(0, WORLD_SIZE=world)
    node.check()
    node.train(job, 1, 2)
    [(_, sender)] = node.senders[job, 0]
    sender.goodput.add(sender.message, node.now, changed=False)
    times = node.runs()[0]["card"]["times"]
    assert [name for name in ("work", "unmeasured") if times.get(name)] == [part]


def test_another_run_of_one_launcher(node: Node) -> None:
    """The time between two runs is of neither."""
    for name in ("a", "b"):
        job = node.start(0, DSHEALTHD_RUN=name)
        node.check()
        node.end(job, 0, ExitKind.ENDED)
        node.check(60.0)
    assert sum(node.runs()[1]["card"]["times"].values()) < 60


@pytest.mark.parametrize(("launchers", "place"), [(64, 0), (65, -1)])
def test_sixty_four_torchruns_are_remembered(launchers: int, place: int, node: Node) -> None:
    """What a torchrun starts anew is the same run, unless as many others have started since."""
    jobs = []
    for number in range(launchers):
        node.parent = 1000 + number
        jobs.append(node.start(0, MASTER_PORT=f"{number}"))
        node.check()
        node.end(jobs[-1], 0, ExitKind.FAILED)
        node.check()
    node.parent = 1000
    again = node.start(0, MASTER_PORT="999")
    node.check()
    assert node.runs()[-1]["what"] == [*jobs, again][place]


def test_a_requeued_job_and_a_name_of_its_users(node: Node) -> None:
    """A job of Slurm that is requeued is the same run, and another attempt on each node; so are
    jobs to which a user gives a name; a name does not join the jobs of two users.
    """
    for count in ("0", "1"):
        job = both(node, SLURM_JOB_ID="4711", SLURM_RESTART_COUNT=count)
        node.check()
        fail(node, job)
    assert names(node) == [("slurm-4711", False), ("slurm-4711", True)]
    elsewhere = Node()
    both(elsewhere, SLURM_JOB_ID="4711", SLURM_RESTART_COUNT="1")
    elsewhere.check()
    assert names(elsewhere) == [("slurm-4711", True)]
    for number, user in (("1", 7), ("2", 7), ("3", 8)):
        job = node.start(0, user=user, SLURM_JOB_ID=number, DSHEALTHD_RUN="llama" * 100)
        node.check()
        node.end(job, 0, ExitKind.ENDED)
        node.check()
    name = ("llama" * 100)[:100]
    assert names(node)[2:] == [(name, False), (name, True), (name, False)]


def test_another_start_within_an_allocation(node: Node) -> None:
    """Of the same ranks, at the same port: another attempt, once for all ranks."""
    for _ in range(2):
        job = both(node, SLURM_JOB_ID="4711")
        node.check()
    node.check()
    assert [run["card"]["ranks"] for run in node.runs()] == [2, 2]
    node.check(GONE - 4.0)
    assert [run["end"] for run in node.runs()] == [None, None]
    node.check(0.1)
    assert [run["end"] is None for run in node.runs()] == [False, True]
    fail(node, job)
    assert [run["end"] is None for run in node.runs()] == [False, False]


def restarted(node: Node, boot: str = "boot-1") -> Node:
    """Return the node under an agent that has started again."""
    document = json.loads(documents.dumps(node.attempts.document()))
    document["boot"] = boot
    again = Node(node.record)
    again.now, again.pid, again.senders = node.now, node.pid, node.senders
    again.attempts.restore(document)
    again.attempts.resume(again.now)
    return again


def test_it_outlives_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt goes on with the next agent, with its account; if its ranks are not found again,
    it has ended when it was seen last.
    """
    monkeypatch.setattr(module, "current_boot", lambda: ("boot-1", 5.0))
    node = Node()
    job = both(node)
    node.check()
    node.train(job, 1, 50)
    before = node.runs()[0]
    node = restarted(node)
    assert node.runs()[0]["card"]["times"] == before["card"]["times"]
    for [(_, sender)] in node.senders.values():
        sender.goodput = Goodput()
    node.check()
    node.train(job, 51, 60)
    (run,) = node.runs()
    assert (run["value"], run["begin"]) == (60.0, before["begin"])
    seen = node.wall
    node = restarted(node)
    node.senders = {}
    node.check(AWAY - 4.0)
    assert node.runs()[0]["end"] is None
    node.check(8.0)
    (run,) = node.runs()
    assert (run["end"], run["reason"]) == (seen, "unknown")


def test_a_node_that_goes_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ran has ended with it."""
    monkeypatch.setattr(module, "current_boot", lambda: ("boot-2", 5.0))
    node = Node()
    both(node)
    node.check()
    node = restarted(node)
    (run,) = node.runs()
    assert (run["reason"], run["end"]) == ("boot", node.wall)


@pytest.mark.parametrize("broken", [[], {"open": 1}, {"open": [{}]}, "x"])
def test_a_state_that_is_none(broken: Any, node: Node) -> None:
    """Nothing of it is restored."""
    with pytest.raises(documents.MISSHAPEN):
        node.attempts.restore(broken)
    node.attempts.resume(5.0)
    assert node.runs() == []


def test_a_state_with_a_field_that_is_none(node: Node) -> None:
    """Nor where one field has another type: it would fail where it is shown."""
    both(node)
    node.check()
    made = json.loads(documents.dumps(node.attempts.document()))
    for name in ("run", "job", "user", "mark", "begin", "last", "earlier", "again", "members"):
        document = json.loads(json.dumps(made))
        document["open"][0][name] = ["x"]
        with pytest.raises(documents.MISSHAPEN):
            Attempts(node.record).restore(document)


def test_the_record_keeps_them(tmp_path: Path, node: Node) -> None:
    """Over a restart; those dated in the future are not shown, nor those of another shape read."""
    both(node)
    node.check()
    (entry,) = node.attempts.lasting()
    entry.end = entry.begin + 5.0
    later = Node()
    later.now += 400 * DAY
    both(later)
    later.check()
    (ahead,) = later.attempts.lasting()
    ahead.end = ahead.begin + 5.0
    record = kept(tmp_path, entry, ahead)
    assert len(record.runs(entry.what, 7)) == 2
    document = json.loads(record.document("n1", (), NOW + 2000.0))
    assert [run["what"] for run in document["runs"]] == [entry.what]
    assert (document["entries"], document["in_the_future"]) == ([], 1)
    file = tmp_path / "history.json"
    for broken in ('"card":{', '"card":{"no":1,'), ('"card":{', '"cart":{'):
        file.write_text(file.read_text().replace(*broken))
        made = NodeRecord(tmp_path)
        asyncio.run(made.load())
        assert "begins anew" in made.problem
        file.with_name("history.json.bad").rename(file)


def test_many_attempts(node: Node) -> None:
    """A job that crashes in a loop pushes out neither findings nor other users' attempts."""
    node.record.add(fault(NOW))
    for user, count in ((7, 2), (8, MAX_RUNS + 50)):
        for number in range(count):
            job = node.start(0, user=user, SLURM_JOB_ID=str(number))
            node.check()
            node.end(job, 0, ExitKind.FAILED)
            node.check()
    runs = node.runs()
    users = [run["card"]["user"] for run in runs]
    assert (users.count(7), len(runs)) == (2, MAX_RUNS)
    assert runs[-1]["what"] == f"slurm-{MAX_RUNS + 49}"
    assert len(json.loads(node.record.document("n1", (), node.wall))["entries"]) == 1
    for number in range(MAX_EXPORTED + 5):
        node.start(0, user=8, SLURM_JOB_ID=f"1{number:03}")
    node.start(0, user=7, SLURM_JOB_ID="1")
    node.check()
    jobs = {each.labels[0] for each in node.attempts.samples() if each.metric is SPENT}
    assert len(jobs) == MAX_EXPORTED
    assert "slurm-1" in jobs


async def test_an_attempt_is_written_as_it_begins(tmp_path: Path) -> None:
    """A node that goes down with the job soon afterwards has not forgotten that it ran."""
    node, trained = Judged(tmp_path), Node()
    await node.judge.apply(loaded("", tmp_path))
    node.over(0.5)
    file = tmp_path / "findings.json"
    await eventually(file.exists)
    job = both(trained)
    assert job not in file.read_text(encoding="utf-8")
    trained.check()
    node.judge.attempts.settle(trained.senders, {}, {}, node.now, node.now + 1e9)
    node.over(0.5, 0.0)
    await eventually(lambda: job in file.read_text(encoding="utf-8"))
    await node.judge.close()


@pytest.mark.parametrize(("again", "found"), [(False, ["JobSlow"]), (True, [])])
def test_what_is_usual_is_of_an_attempt(*, again: bool, found: list[str]) -> None:
    """Steps of twice the time are slow, unless the job has begun anew: it may train another
    model.
    """
    node, trained = Judged(), Node()
    job = both(trained, SLURM_JOB_ID="4711")
    for minute in range(110):
        if minute == 69 and again:
            fail(trained, job)
        elif minute == 70 and again:
            both(trained, SLURM_JOB_ID="4711")
        trained.check(60.0)
        wall = node.now + 1e9
        node.judge.attempts.settle(trained.senders, trained.states, {}, node.now, wall)
        seconds = 1.0 if minute < 70 else 2.0
        samples = tuple(STEP_SECONDS(seconds, job, str(rank)) for rank in range(2))
        result = CollectionResult(CollectionOutcome.OK, samples, duration=0.0)
        node.snapshot.put(SOURCE, result)
        node.judge.judge()
        node.now += 60.0
    assert node.found() == found
