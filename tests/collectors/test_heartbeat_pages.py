"""Pages of training processes are found, soon, whoever else has processes, and are their own."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence

import psutil
import pytest

from dshealthd.collectors import heartbeat_pages
from dshealthd.collectors.heartbeat_pages import INFO, HeartbeatPages
from dshealthd.jobs.environment import launch
from dshealthd.jobs.heartbeats.page import PageHolder, page_holder
from dshealthd.jobs.processes import TrainingProcess
from dshealthd.training.message import Message
from tests.collectors.bench import Bench, values
from tests.jobs.heartbeats.senders import own_pages, sending
from tests.jobs.machines import TORCH, Clock, training_process
from tests.processes import start_time

JOB = f"slurm-{os.getpid()}"
"""No other test's training on this machine has this name."""
RANK = {**TORCH, "SLURM_JOB_ID": str(os.getpid())}


class Node(Bench):
    """The collector, on this machine; jobs of other tests there are left out."""

    def __init__(self) -> None:
        super().__init__("heartbeat_pages")
        self.clock = time.monotonic

    def found(self) -> list[PageHolder]:
        """Collect; return the pages."""
        result = self.collect()
        assert result.faults == ()
        return [
            page_holder(dict(zip(sample.metric.dimensions, sample.labels, strict=True)))
            for sample in result.samples
            if sample.metric is INFO
        ]

    def seconds(self) -> float:
        """Collect; return the seconds until that is due again."""
        return HeartbeatPages.pace(HeartbeatPages.Options(), self.collect().samples)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    """Return a node that has collected once."""
    table = HeartbeatPages._table

    def own(self: HeartbeatPages) -> Sequence[TrainingProcess]:
        return [process for process in table(self) if process.claimed == JOB]

    monkeypatch.setattr(HeartbeatPages, "_table", own)
    made = Node()
    made.found()
    return made


def beat(step: int) -> Message:
    """Return a heartbeat of now."""
    return Message(step=step, sent=time.monotonic())


def test_a_page_is_found_with_the_next_collection(node: Node) -> None:
    """A process that has no page yet is searched again, and one that has ended is forgotten."""
    with sending(RANK) as sender:
        assert node.found() == []
        sender.tell(beat(1))
        assert node.found() == own_pages()
        sender.tell(beat(2))
        assert node.found() == own_pages()
    assert node.found() == []


def test_it_hurries_while_a_page_is_awaited(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has not begun to train is looked at more often, in its first ten minutes."""
    usual, soon = 5.0, 2.0
    assert node.seconds() == usual
    with sending(RANK) as sender:
        begun = start_time(sender.pid) / os.sysconf("SC_CLK_TCK")
        for age, seconds in ((599.0, soon), (601.0, usual), (0.0, soon)):
            monkeypatch.setattr(time, "clock_gettime", lambda _, at=begun + age: at)
            assert node.seconds() == seconds
        sender.tell(beat(1))
        assert node.found()
        assert node.seconds() == usual
        with sending({**RANK, "RANK": "4"}):
            assert node.seconds() == soon


AGAIN = """
first = page(bytes.fromhex(sys.stdin.readline()))
print("told", flush=True)
second = page(bytes.fromhex(sys.stdin.readline()))
print("told", flush=True)
sys.stdin.readline()
os.close(second)
print("told", flush=True)
sys.stdin.readline()
"""


def test_a_page_that_gives_way_to_another(node: Node) -> None:
    """A page that stands still is left for one of the same process that is written, and found again
    when that is gone.
    """
    with sending(RANK, AGAIN) as sender:
        sender.tell(beat(1))
        (first,) = node.found()
        sender.tell(beat(2))
        (second,) = node.found()
        assert (first.pid, first.start) == (second.pid, second.start)
        assert first.inode != second.inode
        sender.tell(b"")
        assert node.found() == [first]


FORK = """
file = page(bytes.fromhex(sys.stdin.readline()))
if os.fork() == 0:
    time.sleep(600)
print("told", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("end", [False, True])
def test_a_child_that_holds_the_page_of_its_parent(node: Node, *, end: bool) -> None:
    """The page is the parent's, also when that has ended: a rank that is gone would seem to
    hang.
    """
    with sending(RANK, FORK) as sender:
        sender.tell(beat(1))
        children = psutil.Process(sender.pid).children()
        assert [holder.pid for holder in node.found()] == [sender.pid]
        if end:
            sender.popen.kill()
            sender.popen.wait()
            assert node.found() == []
        for child in children:
            child.kill()


@pytest.mark.parametrize(("ranks", "loaders", "seconds", "searched"), [
    (60, 60, 0.0, (48, 16)),
    (10, 80, 0.0, (10, 54)),
    (60, 60, 0.0625, (4, 0)),  # a quarter of a second
])  # fmt: skip
def test_so_many_are_searched_at_a_time(
    node: Node,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    loaders: int,
    seconds: float,
    searched: tuple[int, int],
) -> None:
    """Sixty-four, of which sixteen may be children of ranks; each takes so many seconds."""
    own = [
        training_process(number, {**RANK, "RANK": str(number)}) for number in range(2, 2 + ranks)
    ]
    children = [
        training_process(1000 + number, own[0].environment, parent=2) for number in range(loaders)
    ]
    found: list[int] = []

    def find(_collector: HeartbeatPages, pid: int) -> None:
        found.append(pid)
        clock.now += seconds

    clock = Clock()
    node.collector.context.monotonic = clock
    monkeypatch.setattr(HeartbeatPages, "_find", find)
    node.collector._search({one.key: one for one in (*own, *children)}, set())
    assert (sum(pid < 1000 for pid in found), sum(pid >= 1000 for pid in found)) == searched


LOADERS = """
number = next((number for number in range(3) if os.fork() == 0), "parent")
if str(number) == os.environ["WRITES"]:
    file = page(bytes.fromhex(sys.stdin.readline()))
    print("told", flush=True)
time.sleep(600)
"""
"""Has three children; one of all four has a page."""


def test_no_user_takes_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many pages are told as the agent reads; one user's processes, which have come first, leave
    places to another's.
    """
    place, node = launch(TORCH), Bench("heartbeat_pages")
    assert place is not None
    processes = [
        TrainingProcess(pid, pid, 0, JOB, place, {}, user=1 + pid // 260) for pid in range(262)
    ]
    monkeypatch.setattr(HeartbeatPages, "_table", lambda _: processes)
    for name in ("_find", "_read"):
        monkeypatch.setattr(
            HeartbeatPages, name, lambda _, pid, *__: heartbeat_pages._Page(3, pid, b"")
        )
    found = [values(node.collect(), INFO) for _ in range(6)][-1]
    assert Counter(user for _, _, user, *_ in found) == {"1": 254, "2": 2}


def test_all_are_searched_in_turn(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a script has started is found, although others of its job are searched before."""
    monkeypatch.setattr(heartbeat_pages, "MAX_SEARCHED", 2)
    monkeypatch.setattr(heartbeat_pages, "MIN_CHILDREN", 1)
    with sending({**RANK, "WRITES": "2"}, LOADERS) as sender:
        sender.tell(beat(1))
        assert [node.found() for _ in range(3)][-1] == own_pages() != []
