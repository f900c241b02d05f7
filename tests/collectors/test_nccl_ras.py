"""The collector of NCCL's RAS: jobs of real processes with RAS's own protocol, seen through a
`/proc` that shows these alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.processes import free_port
from dshealthd.collectors.nccl_ras import NcclRas
from dshealthd.config.registry import all_collectors
from dshealthd.core.collector import Fault, News, Reason
from dshealthd.core.host import Host
from dshealthd.core.options import Duration
from dshealthd.core.result import CollectionOutcome, CollectionResult
from dshealthd.evidence.options import EvidenceOptions
from dshealthd.jobs.ras.options import NcclRasOptions
from tests.collectors.bench import Bench, reasons, sleeper
from tests.jobs.machines import Clock, Machine
from tests.jobs.ras.server import Communicator, Process, Rank, document, library
from tests.netns import network_namespace
from tests.stopwatch import Stopwatch

PAUSE = 4.0
AGAIN_AFTER = 5.0
SUSPECTED = 0.5
CLOSELY = 40
HURRIES = 2
HURRY_WINDOW = 60.0

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "SLURM_JOB_ID": "1"}
"""The environment of a job's only rank."""
LAGGING = [Rank(0, gpu=0), Rank(1, pid=4001, gpu=1, counts={"AllReduce": 990})]
GONE = Rank(2, pid=4002, host="192.0.2.2", flags=("unresponsive", "considered_dead"))
FIRST = document(Communicator(LAGGING, [GONE]), version="2.28.9")
GROWN = document(
    Communicator([Rank(0, counts={"AllReduce": 1001}), LAGGING[1]], [GONE]), version="2.28.9"
)


class Node(Bench):
    """A node with jobs, and the collector on it."""

    def __init__(self, root: Path, **options: Any) -> None:
        chosen = {"healthy_interval": Duration(0), **options}
        super().__init__("nccl_ras", Host(procfs=root / "proc", sysfs=root, dev=root), **chosen)
        self.root = root
        self.machine = Machine(root / "proc")
        (root / "proc" / "self").symlink_to("/proc/self")
        self.clock = time.monotonic
        self._stack = contextlib.ExitStack()
        self._files = 0
        self.record = root / "record"

    def answers(self, *contents: bytes) -> list[Path]:
        """Return files with these answers."""
        self._files += 1
        places = [self.root / f"answer-{self._files}-{index}" for index in range(len(contents))]
        for place, content in zip(places, contents, strict=True):
            place.write_bytes(content)
        return places

    def process(
        self,
        behavior: str,
        *contents: bytes,
        job: int,
        rank: int = 0,
        port: int = 0,
        ras: str | None = None,
        version: str | None = None,
    ) -> Process:
        """Start a process of a job of three ranks that serves at its `NCCL_RAS_ADDR`, or says
        another.
        """
        if not port:
            port = free_port()
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": "3",
            "SLURM_JOB_ID": str(job),
            "NCCL_RAS_ADDR": ras or f"127.0.0.1:{port}",
        }
        told = re.search(rb'"nccl_version": "([^"]+)"', contents[0] if contents else b"")
        loaded = version if version is not None else told[1].decode() if told else "2.29.7"
        process = Process(
            behavior,
            *self.answers(*contents),
            port=port,
            environment=environment,
            library=library(self.root, loaded),
            record=self.record,
        )
        self._stack.callback(process.close)
        (self.root / "proc" / str(process.popen.pid)).symlink_to(f"/proc/{process.popen.pid}")
        return process

    def close(self) -> None:
        """End all processes."""
        self._stack.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A node without jobs."""
    made = Node(tmp_path)
    yield made
    made.close()


def values(result: CollectionResult, job: int = 1) -> dict[tuple[str, ...], float]:
    """Return the samples of a job, by name without prefix and the other labels.

    Without the count of implausible answers where it is 0.
    """
    return {
        (sample.metric.name.removeprefix("dshealthd_job_nccl_"), *sample.labels[1:]): sample.value
        for sample in result.samples
        if sample.labels[:1] == (f"slurm-{job}",)
    }


def test_a_job_that_stops(node: Node) -> None:
    """From answers of NCCL 2.28.9, flaw and all: who is missing, and once the job stands still,
    which rank is behind.
    """
    node.process("json", FIRST, GROWN, GROWN, job=1)
    first, grown, still = (values(node.collect()) for _ in range(3))
    assert first == {
        ("ras_state", "answered"): 1,
        ("communicators", "3"): 1,
        ("ranks", "3", "running"): 2,
        ("ranks", "3", "dead"): 1,
        ("rank_trouble_info", "2", "192.0.2.2", "0", "dead"): 1,
    }
    assert grown["answers_without_progress",] == 0
    assert not any("rank_operations_behind" in key for key in grown)
    assert still["answers_without_progress",] == 1
    assert still["rank_operations_behind", "1", "192.0.2.1", "1", "AllReduce"] == 11


def test_only_the_node_of_rank_0_asks(node: Node) -> None:
    """A node without rank 0 says that it does not ask, and does not."""
    process = node.process("json", FIRST, b"asked a second time", job=1, rank=1)
    assert values(node.collect()) == {("ras_state", "elsewhere"): 1}
    node.process("json", FIRST, job=1, rank=0, port=process.port)
    assert values(node.collect())["ras_state", "answered"] == 1


def test_node_keeps_asking_when_rank_0_is_gone(node: Node) -> None:
    """When rank 0 dies, the node that has asked goes on asking the processes that are left."""
    first = node.process("json", FIRST, job=1, rank=0)
    node.process("json", GROWN, job=1, rank=1, port=first.port)
    node.collect()
    first.close()
    (node.root / "proc" / str(first.popen.pid)).unlink()
    assert values(node.collect())["ras_state", "answered"] == 1


def test_jobs_that_share_the_port(node: Node) -> None:
    """Two jobs of a user on the default port answer for each other."""
    one = node.process("json", document(Communicator([Rank(0)])), job=1)
    node.process("json", document(Communicator([Rank(0), Rank(1)])), job=2, port=one.port)
    for _ in range(3):
        result = node.collect()
        for job, size in ((1, "1"), (2, "2")):
            found = values(result, job)
            assert (
                found.get(("communicators", size)) == 1 or ("ras_state", "stranger") in found
            )  # 1 in 64: six times the wrong one
            assert ("communicators", "3" if size == "1" else "1") not in found


def test_job_without_nccl_beside_one_with(node: Node) -> None:
    """A job whose address another job's process has is shown without numbers, and that is no
    fault.
    """
    one = node.process("json", FIRST, job=1)
    node.process("mute", job=2, ras=f"127.0.0.1:{one.port}")
    result = node.collect()
    assert values(result, 2) == {("ras_state", "stranger"): 1}
    assert values(result, 1)["ras_state", "answered"] == 1
    assert result.faults == ()


def test_hostile_job_beside_a_good_one(node: Node) -> None:
    """Answers that are endless, garbage or never come are faults of their jobs."""
    for job, behavior in enumerate(("flood", "garbage", "stall", "cut", "trickle"), 2):
        node.process(behavior, FIRST, job=job)
    node.process("json", FIRST, job=1)
    watch = Stopwatch(os.getpid())
    result = node.collect()
    took = watch.seconds()
    assert values(result)["ras_state", "answered"] == 1
    assert all(values(result, job) == {("ras_state", "failed"): 1} for job in range(2, 7))
    assert {(fault.part, fault.reason) for fault in result.faults} == {
        ("job slurm-2", Reason.MALFORMED),
        ("job slurm-3", Reason.MALFORMED),
        ("job slurm-4", Reason.TIMEOUT),
        ("job slurm-5", Reason.MALFORMED),
        ("job slurm-6", Reason.TIMEOUT),
    }
    assert result.outcome is CollectionOutcome.OK
    assert took < NcclRasOptions().timeout + 2


def test_failure_keeps_what_was_known(node: Node) -> None:
    """An answer that fails leaves the count of answers without progress, and no other numbers."""
    node.process("json", FIRST, GROWN, b"{", job=1)
    node.collect()
    node.collect()
    result = node.collect()
    assert values(result) == {("ras_state", "failed"): 1, ("answers_without_progress",): 0}
    assert result.faults[0].detail == "body is not JSON"


def test_states_without_a_query(node: Node) -> None:
    """No listener, RAS switched off, and an address of another machine are told apart."""
    node.process("mute", job=1, ras=f"127.0.0.1:{free_port()}")
    node.process("mute", job=2, ras="192.0.2.77:28028")
    off = node.process("mute", job=3)
    (node.root / "proc" / str(off.popen.pid)).unlink()
    node.machine.process(99, {**ALONE, "SLURM_JOB_ID": "3", "NCCL_RAS_ENABLE": "0"})
    result = node.collect()
    assert [values(result, job) for job in (1, 2, 3)] == [
        {("ras_state", "no_listener"): 1},
        {("ras_state", "failed"): 1},
        {("ras_state", "disabled"): 1},
    ]
    assert result.faults == (
        Fault(
            "job slurm-2",
            Reason.NOT_FOUND,
            "NCCL_RAS_ADDR='192.0.2.77:28028' is not an address of this node",
        ),
    )


def test_network_namespace_of_its_own(node: Node) -> None:
    """The localhost of a container with its own network is not the agent's."""
    with contextlib.ExitStack() as stack:
        with network_namespace():
            pid = stack.enter_context(sleeper(os.getuid(), ALONE))
        (node.root / "proc" / str(pid)).symlink_to(f"/proc/{pid}")
        assert values(node.collect()) == {("ras_state", "namespace"): 1}


def test_stopped_rank_does_not_hide_the_job(node: Node) -> None:
    """While rank 0 is stopped, another process of the job answers on the port that they share."""
    first = node.process("json", FIRST, job=1, rank=0)
    for rank in (1, 2):
        node.process("json", FIRST, job=1, rank=rank, port=first.port)
    os.kill(first.popen.pid, signal.SIGSTOP)
    found = values(node.collect())
    assert found["ras_state", "answered"] == 1


def test_quarantined_job_is_left_out(node: Node) -> None:
    """A job whose answer broke the worker before is not asked again until its time is over."""
    node.process("json", FIRST, job=1)
    node.process("json", FIRST, job=2)
    node.hung = {"job slurm-1": Reason.CRASHED}
    result = node.collect()
    assert (values(result, 1), reasons(result)) == ({("ras_state", "failed"): 1}, node.hung)
    assert values(result, 2)["ras_state", "answered"] == 1


def test_absent_without_a_driver(tmp_path: Path) -> None:
    """Without NVIDIA's driver there is no NCCL, and no worker for it."""
    host = Host(dev=tmp_path, sysfs=tmp_path)
    assert NcclRas.absent(NcclRasOptions(), host) == "no NVIDIA driver, and so no NCCL"
    (tmp_path / "nvidiactl").touch()
    assert NcclRas.absent(NcclRasOptions(), host) is None


def test_worker_is_shared_with_none() -> None:
    """A collection may wait for seconds, which would hold up whatever else the worker collects."""
    assert [name for name, kind in all_collectors().items() if kind.worker == NcclRas.worker] == [
        NcclRas.name
    ]


def test_a_worker_outlives_its_queries() -> None:
    """The worker is given up only once all queries have had time to end."""
    assert NcclRasOptions.deadline >= NcclRasOptions.timeout + 5


@pytest.mark.parametrize(
    ("version", "state"), [("2.27.7", "unsafe_release"), ("", "unknown_release")]
)
def test_release_that_is_not_asked(node: Node, version: str, state: str) -> None:
    """A job whose NCCL may crash on a query hears not one byte, however often it is looked at."""
    node.process("text", FIRST, job=1, version=version)
    for _ in range(3):
        assert values(node.collect()) == {("ras_state", state): 1}
    assert not node.record.exists()


def test_one_unsafe_rank_of_many(node: Node) -> None:
    """One rank with an unsafe release is enough: RAS collects from all."""
    first = node.process("json", FIRST, job=1, version="2.28.9")
    node.process("json", FIRST, job=1, rank=1, port=first.port, version="2.27.7")
    assert values(node.collect()) == {("ras_state", "unsafe_release"): 1}
    assert not node.record.exists()


def test_unknown_release_with_the_operators_word(node: Node) -> None:
    """It is asked in JSON; one that knows text alone is not asked for its status."""
    node.collector = NcclRas(NcclRasOptions(ask_unknown_releases=True), node.context)
    node.process("text", FIRST, job=1, version="")
    assert values(node.collect()) == {("ras_state", "failed"): 1}
    assert b"STATUS" not in node.record.read_bytes()


def test_job_without_nccl(node: Node) -> None:
    """A process that has not mapped NCCL is not asked."""
    with sleeper(os.getuid(), ALONE) as pid:
        (node.root / "proc" / str(pid)).symlink_to(f"/proc/{pid}")
        assert values(node.collect()) == {("ras_state", "not_loaded"): 1}


IMPOSSIBLE = {
    "more ranks than the job": document(
        Communicator([Rank(number) for number in range(4)]), version="2.28.9"
    ),
    "another release": document(Communicator(LAGGING, [GONE]), version="2.27.7"),
}


@pytest.mark.parametrize("content", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_impossible_answer_ends_the_queries(node: Node, content: bytes) -> None:
    """An answer that cannot be true gives no numbers, and the job is asked no more."""
    node.process("json", content, FIRST, job=1, version="2.28.9")
    for _ in range(3):
        result = node.collect()
        assert values(result) == {("ras_state", "implausible"): 1}
    assert [fault.reason for fault in result.faults] == [Reason.MALFORMED]
    assert node.record.read_bytes().count(b"VERBOSE STATUS\n") == 1


def test_communicator_of_all_ranks_vanishes(node: Node) -> None:
    """It goes last where a job ends: gone while a smaller one remains, the answer is corrupt."""
    pair = document(Communicator([Rank(0), LAGGING[1]], name="aa"), version="2.28.9")
    node.process("json", FIRST, pair, job=1)
    assert values(node.collect())["ras_state", "answered"] == 1
    assert values(node.collect())["ras_state", "implausible"] == 1


def test_restarted_job_is_asked_again(node: Node) -> None:
    """What one run answered is not held against the next."""
    first = node.process("json", IMPOSSIBLE["more ranks than the job"], job=1)
    node.collect()
    first.close()
    (node.root / "proc" / str(first.popen.pid)).unlink()
    node.process("json", FIRST, job=1)
    assert values(node.collect())["ras_state", "answered"] == 1


@pytest.mark.parametrize("interval", [15, 14.99])
def test_job_that_is_well_is_asked_rarely(node: Node, interval: float) -> None:
    """Between two queries its last answer is shown; a rank that stops makes the next one due."""
    node.clock = clock = Clock()
    node.collector = NcclRas(NcclRasOptions(), node.context)
    well = [Rank(0), Rank(1, pid=4001), Rank(2, pid=4002)]
    answers = [
        document(Communicator([Rank(0, counts={"AllReduce": 1000 + more}), *well[1:]]))
        for more in range(9)
    ]
    job = node.process("json", *answers, job=1)
    second = node.process("json", answers[8], job=1, rank=1)
    asked = []
    for _ in range(6):
        found = values(node.collect())
        assert found["ras_state", "answered"] == 1
        asked.append(node.record.read_bytes().count(b"VERBOSE STATUS\n"))
        clock.now += interval
    assert asked == [1, 2, 2, 3, 3, 4]
    os.kill(second.popen.pid, signal.SIGSTOP)
    assert os.WIFSTOPPED(os.waitpid(second.popen.pid, os.WUNTRACED)[1])
    clock.now -= 14
    assert values(node.collect())["ras_state", "answered"] == 1
    assert node.record.read_bytes().count(b"VERBOSE STATUS\n") == 5
    assert job.popen.poll() is None


def test_suspicion_brings_a_query_forward(node: Node) -> None:
    """Only of the job that it is about, and no more than `HURRIES` in `HURRY_WINDOW`."""
    node.clock = clock = Clock()
    node.collector = NcclRas(NcclRasOptions(), node.context)
    answers = [
        document(
            Communicator([Rank(0, counts={"AllReduce": 1000 + more}), Rank(1, pid=1), Rank(2)])
        )
        for more in range(40)
    ]
    node.process("json", *answers, job=1)
    node.record = node.root / "record of the other"
    node.process("json", *answers, job=2)

    def asked(*heard: tuple[News, str], after: float) -> tuple[int, int]:
        clock.now += after
        node.context.heard = frozenset(heard)
        found = node.collect()
        assert [values(found, job)["ras_state", "answered"] for job in (1, 2)] == [1, 1]
        records = (node.root / "record", node.record)
        first, second = (place.read_bytes().count(b"VERBOSE STATUS\n") for place in records)
        return first, second

    hang = (News.HANG_SUSPECTED, "slurm-1")
    assert asked(after=0) == (1, 1)
    assert asked(after=15) == (2, 2)
    assert asked(hang, after=5) == (3, 2)
    assert asked(hang, after=5) == (4, 2)
    assert asked((News.GPU_ERROR, ""), after=5) == (4, 3)
    assert asked(after=10) == (5, 3)
    # 15 s since the last query are no reason to ask one that is well.
    assert asked((News.HANG_SUSPECTED, "slurm-3"), after=15) == (5, 3)
    begin = asked(after=HURRY_WINDOW)
    for _ in range(int(HURRY_WINDOW / 5)):
        last = asked(hang, (News.GPU_ERROR, ""), after=5)
    closely = HURRY_WINDOW / float(NcclRasOptions().interval)
    assert last[0] - begin[0] <= closely + HURRIES
    assert last[1] - begin[1] == closely


def test_documented_pace() -> None:
    """docs/jobs.md has the pace of queries that the options and the job's memory have."""
    text = (Path(__file__).parents[2] / "docs/jobs.md").read_text(encoding="utf-8")
    table = text.partition("## How often NCCL's RAS is queried")[2]
    options = NcclRasOptions()
    rarely, closely = float(options.healthy_interval), float(options.interval)
    assert f"| {rarely:g} s |" in table
    assert f"| {closely:g} s (`interval`) |" in table
    assert f"after {CLOSELY} such answers in a row, {CLOSELY * closely / 60:g} min" in table
    assert f"{3600 / rarely:g} queries an hour" in table
    hurried = 3600 / HURRY_WINDOW * HURRIES
    assert f"{3600 / closely + hurried:g} at most" in table
    assert f"and {AGAIN_AFTER:g} s later, {HURRIES} times in {HURRY_WINDOW:g} s at most" in table
    assert f"{SUSPECTED:.0%} of the silence" in table
    assert f"{options.timeout:g} s until NCCL has answered" in table
    assert f"{2 * rarely:g} s at most" in table
    evidence = EvidenceOptions()
    assert f"after {evidence.after:g} s (`evidence.after`)" in table
    assert f"in {evidence.again_after / 60:g} min of a job" in table
    assert f"{PAUSE:g} s apart" in table
