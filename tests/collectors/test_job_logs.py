"""Causes from the logs of running jobs: found, followed within bounds, with their user's rights."""

from __future__ import annotations

import gc
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from dshealthd.collectors import job_logs
from dshealthd.collectors.job_logs import JobLogs
from dshealthd.core.collector import Reason
from dshealthd.core.host import Host
from dshealthd.core.options import Errors, decode
from dshealthd.core.result import CollectionResult
from dshealthd.jobs.logs import watch
from tests.agents import running
from tests.collectors.bench import Bench, reasons, values
from tests.jobs.machines import TORCH, Machine
from tests.waiting import until

MAX_JOBS = 16

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a\n"
LOST = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed "
    "by peer [10.0.0.4]:8852. This is typically caused by a remote worker crashing.\n"
)
NOBODY = 65534
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")


class Node(Bench):
    """A node whose ranks see a directory as their file system."""

    def __init__(self, root: Path, **options: Any) -> None:
        super().__init__("job_logs", root, **options)
        self.machine = Machine(root / "proc")
        self.inside = root / "container"
        (self.inside / "logs").mkdir(parents=True)
        self.rootfs = root / "root"
        self.rootfs.mkdir()

    def rank(
        self,
        pid: int,
        number: int,
        output: str = "pipe:[7]",
        stat: Mapping[str, Any] = MappingProxyType({}),
        **variables: str,
    ) -> None:
        """Start a rank with that as its standard output and error."""
        environment = {**TORCH, "RANK": str(number), "SLURM_JOB_ID": "12", **variables}
        directory = self.machine.process(pid, environment, **stat)
        (directory / "root").symlink_to(self.inside)
        (directory / "cwd").symlink_to(self.inside)
        for stream in ("1", "2"):
            (directory / "fd" / stream).symlink_to(output)

    def write(self, name: str, text: str) -> Path:
        """Append to a log."""
        place = self.inside / "logs" / name
        with place.open("a", encoding="utf-8") as file:
            file.write(text)
        return place

    def sweep(self, seconds: float = 1.0) -> CollectionResult:
        """Collect after so many seconds."""
        return self.collect(seconds)


def causes(result: CollectionResult) -> set[tuple[str, ...]]:
    """Return job, slug, rank and node of each cause, which is in words, too."""
    found = set(values(result, job_logs.FAILURE))
    assert all(" " in words for *_, words in found)
    return {labels[:-1] for labels in found}


def states(result: CollectionResult) -> dict[str, float]:
    """Return what became of files, without what there is none of."""
    found = values(result, job_logs.FILES)
    return {state: count for (state,), count in found.items() if count}


def test_the_streams_of_the_ranks_tell_the_cause(tmp_path: Path) -> None:
    """The rank is that of the process whose output the file is; the victim's log tells another."""
    node = Node(tmp_path, standard_streams=True)
    node.rank(50, 2, "/logs/a.out")
    node.rank(51, 3, "/logs/b.out")
    node.rank(52, 4)
    node.write("a.out", "step 1 | loss 2.0\n")
    node.write("b.out", "step 1 | loss 2.0\n")
    result = node.sweep()
    assert (causes(result), states(result)) == (set(), {"followed": 2})
    node.write("a.out", LOST)
    assert causes(node.sweep()) == set()  # a lost peer alone is no cause
    node.write("b.out", OOM)
    assert causes(node.sweep()) == {("slurm-12", "cuda-oom", "3", os.uname().nodename)}


def test_configured_paths(tmp_path: Path) -> None:
    """`{job}` is the number of the Slurm job; what is older than the job is not of it."""
    node = Node(tmp_path, paths=("/logs/run-*/slurm-{job}.out", "/logs/old-{job}"))
    node.rank(50, 3)
    (node.inside / "logs/run-x").mkdir()
    node.write("run-x/slurm-12.out", "[rank3]: " + OOM)
    node.write("run-x/slurm-13.out", "OSError: [Errno 28] No space left on device\n")
    os.utime(node.write("old-12", "MemoryError\n"), (0, 0))
    result = node.sweep()
    assert causes(result) == {("slurm-12", "cuda-oom", "3", os.uname().nodename)}
    assert states(result) == {"followed": 1, "foreign": 1}


def test_a_path_that_does_not_name_the_job_is_of_nobody_who_has_two(tmp_path: Path) -> None:
    """It is not guessed whose the log is."""
    node = Node(tmp_path, paths=("/logs/*.out",))
    node.rank(50, 0)
    node.write("a.out", OOM)
    assert states(node.sweep()) == {"followed": 1}
    node = Node(tmp_path / "two", paths=("/logs/*.out",))
    node.rank(50, 0)
    node.rank(51, 0, SLURM_JOB_ID="13")
    node.write("a.out", OOM)
    result = node.sweep()
    assert (causes(result), states(result)) == (set(), {"ambiguous": 2})


@pytest.mark.parametrize(("seconds", "read"), [(29.0, True), (31.0, False)])
def test_the_last_words_are_read_when_the_rank_has_gone(
    tmp_path: Path, seconds: float, *, read: bool
) -> None:
    """On a node's own file system, for half a minute; the cause is told for a quarter of an hour,
    and then no more.
    """
    node = Node(tmp_path, standard_streams=True)
    node.rootfs.rmdir()
    node.rootfs.symlink_to(node.inside)
    node.rank(50, 1, "/logs/a.out")
    node.write("a.out", "step 1 | loss 2.0\n")
    node.sweep()
    node.write("a.out", OOM)
    node.machine.end(50)
    wanted = {("slurm-12", "cuda-oom", "1", os.uname().nodename)} if read else set()
    assert causes(node.sweep(seconds)) == wanted
    assert causes(node.sweep(895.0 - seconds)) == wanted
    assert causes(node.sweep(6.0)) == set()


def test_a_job_that_its_launcher_starts_again(tmp_path: Path) -> None:
    """The cause of the attempt before is told for a quarter of an hour, and not for as long as the
    job then runs; a failure of the new attempt is told at once.
    """
    node = Node(tmp_path, standard_streams=True)
    slurm = {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
    node.machine.process(40, slurm, start=100)
    first, second = {"parent": 40, "start": 200}, {"parent": 40, "start": 300}
    node.rank(50, 1, "/logs/a.out", first)
    node.rank(51, 2, "/logs/b.out", first)
    node.write("a.out", "step 1 | loss 2.0\n")
    node.sweep()
    node.write("a.out", OOM)
    host = os.uname().nodename
    oom = {("slurm-12", "cuda-oom", "1", host)}
    assert causes(node.sweep()) == oom
    node.machine.end(50)
    node.machine.end(51)
    for _ in range(2):
        assert causes(node.sweep(6.0)) == oom
    node.rank(60, 1, "/logs/a.out", second)
    node.rank(61, 2, "/logs/b.out", second)
    assert causes(node.sweep(6.0)) == oom
    node.write("a.out", "step 1 | loss 2.0\n")
    assert causes(node.sweep(880.0)) == oom
    assert causes(node.sweep(21.0)) == set()
    node.write("b.out", "OSError: [Errno 28] No space left on device\n")
    assert {labels[1:3] for labels in causes(node.sweep(12.0))} == {("disk-full", "2")}


def test_the_task_of_a_launcher_is_no_rank(tmp_path: Path) -> None:
    """Below srun torchrun has the number of its node: a rank of that number is elsewhere."""
    node = Node(tmp_path, paths=("/logs/{job}.out",))
    slurm = {"SLURM_JOB_ID": "12", "SLURM_PROCID": "3", "SLURM_NTASKS": "4"}
    node.machine.process(40, slurm, start=100)
    node.sweep(6.0)
    node.rank(50, 24, stat={"parent": 40, "start": 200})
    node.sweep(6.0)
    node.write("12.out", "[rank3]: " + OOM)
    assert causes(node.sweep(12.0)) == {("slurm-12", "cuda-oom", "3", "")}


@root_only
def test_nothing_is_opened_that_the_user_may_not_read(tmp_path: Path) -> None:
    """Another user's file, a link to one, a FIFO: a log is a regular file of the job's user."""
    node = Node(tmp_path, standard_streams=True, paths=("/logs/*.log",))
    node.rank(50, 0, "/logs/mine")
    for pid in ("50",):
        for path in (node.machine.root / pid, node.inside, node.inside / "logs"):
            os.chown(path, NOBODY, NOBODY)
    secret = node.write("secret.log", OOM)
    secret.chmod(0o600)
    (node.inside / "logs/mine").symlink_to("secret.log")
    os.mkfifo(node.inside / "logs/fifo.log")
    os.chown(node.inside / "logs/fifo.log", NOBODY, NOBODY)
    result = node.sweep()
    assert causes(result) == set()
    assert states(result) == {"foreign": 3}
    own = node.write("own.log", OOM)
    os.chown(own, NOBODY, NOBODY)
    node.sweep(10.0)
    assert {labels[1] for labels in causes(node.sweep())} == {"cuda-oom"}


def test_a_job_whose_files_hang_is_left_out(tmp_path: Path) -> None:
    """The others are read, and the fault says which."""
    node = Node(tmp_path, standard_streams=True)
    node.rank(50, 0, "/logs/a.out")
    node.rank(51, 0, "/logs/b.out", SLURM_JOB_ID="13")
    node.write("a.out", OOM)
    node.write("b.out", OOM)
    node.hung["logs of slurm-12"] = Reason.TIMEOUT
    result = node.sweep()
    assert {labels[0] for labels in causes(result)} == {"slurm-13"}
    assert reasons(result) == node.hung


def test_many_jobs_of_one_user_take_nobody_s_place(tmp_path: Path) -> None:
    """Beyond sixteen those of the user with most go."""
    node = Node(tmp_path, standard_streams=True)
    for number in range(MAX_JOBS + 3):
        node.rank(50 + number, 0, f"/logs/{number}.out", SLURM_JOB_ID=str(number))
        node.write(f"{number}.out", OOM)
    until(lambda: len(causes(node.sweep(0.0))) == MAX_JOBS)  # a busy machine reads some later


def test_a_log_takes_no_more_time_than_its_share(tmp_path: Path) -> None:
    """Lines that patterns look at one by one, faster than they can: 5 % of a core, whatever
    comes.
    """
    node = Node(tmp_path, standard_streams=True)
    node.rank(50, 1, "/logs/a.out")
    node.write("a.out", "Error: nccl CUDA error Xid timed out rank 1\n" * 100_000)
    gc.collect()  # what earlier tests have left is searched before, not meanwhile
    start = time.process_time()
    for _ in range(10):
        node.sweep(1.0)
    assert time.process_time() - start < 10 * (0.05 + 0.15)


def steps_of_a_millisecond(node: Node) -> Iterator[float]:
    """Let each step between two queries of the CPU time take a millisecond; yield its total."""
    seconds = itertools.count()
    node.collector._watch._spent = lambda: next(seconds) / 1000
    while True:
        yield node.collector._watch._spent()


def follows_a_file(tmp_path: Path) -> tuple[Node, Iterator[float]]:
    """Return a node that has begun to follow an empty file, and what that takes from now on."""
    node = Node(tmp_path, standard_streams=True)
    node.rank(50, 1, "/logs/a.out")
    node.write("a.out", "")
    node.sweep()
    spent = steps_of_a_millisecond(node)
    next(spent)
    return node, spent


def test_the_time_spent_is_known_within_a_line(tmp_path: Path) -> None:
    """A record of a single line can have thousands of lines of text: they are read over several
    looks, and none is lost.
    """
    node, spent = follows_a_file(tmp_path)
    text = "Error: nccl CUDA error Xid timed out rank 1\n" * 1000 + OOM
    node.write("a.out", json.dumps({"message": text}) + "\n")
    looks = 0
    while not causes(node.sweep(1.0)):
        looks += 1
        assert next(spent) <= 1.2 * 0.05 * (looks + 1)
    assert looks > 10


def test_a_look_that_comes_late(tmp_path: Path) -> None:
    """It takes the time of two seconds, and not that of all it has missed."""
    node, spent = follows_a_file(tmp_path)
    node.write("a.out", "Error: nccl CUDA error Xid timed out rank 1\n" * 1000)
    node.sweep(60.0)
    assert 0.8 * 0.05 * 2.0 < next(spent) < 1.2 * 0.05 * 2.0


def test_exceptions_of_many_ranks_are_read_over_several_looks(tmp_path: Path) -> None:
    """Each is recognized only where the file ends so far, thousands of them at once."""
    node, spent = follows_a_file(tmp_path)
    node.write("a.out", "".join(f"[rank{n}]: ValueError: {n}\n" for n in range(1000)))
    events = node.collector._watch._jobs["slurm-12"].recognizer.found.events
    for looks in range(1, 10):
        node.sweep(1.0)
        assert next(spent) <= 1.2 * 0.05 * looks
        assert len(events) <= 1000 * 1.2 * 0.05 * looks


def test_what_was_spent_beyond_the_share_is_saved_later(tmp_path: Path) -> None:
    """A step that takes long is not interrupted, but the looks after it pay for it."""
    node = Node(tmp_path, standard_streams=True)
    node.rank(50, 1, "/logs/a.out")
    node.write("a.out", "Error: nccl CUDA error Xid timed out rank 1\n" * 100_000)
    watched = node.collector._watch
    watched._spent = lambda: (
        0.1
        * sum(  # each line takes the share of two looks
            job.recognizer.found.statistics.examined for job in watched._jobs.values()
        )
    )
    for _ in range(800):
        node.sweep(1.0)
    assert 20.0 < watched._spent() <= 1.2 * 0.05 * 800


def test_a_job_whose_lines_take_long_pays_for_them_itself(tmp_path: Path) -> None:
    """The logs of another job are read meanwhile."""
    node = Node(tmp_path, standard_streams=True)
    node.rank(50, 0, "/logs/a.out")
    node.rank(51, 0, "/logs/b.out", SLURM_JOB_ID="13")
    node.write("a.out", "")
    node.write("b.out", "")
    node.sweep()
    jobs = node.collector._watch._jobs
    jobs["slurm-12"].overdrawn = 1.0
    node.write("a.out", OOM)
    node.write("b.out", OOM)
    next(steps_of_a_millisecond(node))
    assert {labels[0] for labels in causes(node.sweep(1.0))} == {"slurm-13"}
    assert 0 < jobs["slurm-12"].overdrawn < 1.0
    for _ in range(100):
        if len(found := causes(node.sweep(1.0))) == 2:
            break
    assert {labels[0] for labels in found} == {"slurm-12", "slurm-13"}


@pytest.mark.parametrize(
    ("path", "why"),
    [("logs/a", "must be absolute"), ("/a/**/b", "must not contain"), ("/{user}/a", "other than")],
)
def test_a_wrong_pattern_is_named(path: str, why: str) -> None:
    """The error names key, pattern and what is wrong."""
    errors = Errors()
    decode(JobLogs.Options, {"paths": [path]}, "collectors.job_logs", errors)
    assert len(errors) == 1
    assert errors[0].startswith(f'collectors.job_logs.paths: "{path}"')
    assert why in errors[0]


def test_nothing_runs_unless_configured() -> None:
    """A worker costs memory, and so is started only where there is something to follow."""
    assert JobLogs.absent(JobLogs.Options(), Host()) is not None
    assert JobLogs.absent(JobLogs.Options(standard_streams=True), Host()) is None


JOB = """
import sys, time
print("step 1 | loss 2.0", flush=True)
sys.stdin.readline()
raise MemoryError
"""


def processes(directory: Path, *pids: int) -> Path:
    """Return a view of /proc with these processes alone: other tests have ranks too."""
    for name in (*filter(str.isalpha, os.listdir("/proc")), *map(str, pids)):
        (directory / name).symlink_to(f"/proc/{name}")
    return directory


def test_a_real_agent_follows_a_real_rank(tmp_path: Path) -> None:
    """The rank's own standard error, as a file: the cause is on /metrics a moment after its end."""
    environment = {**os.environ, **TORCH, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    (view := tmp_path / "proc").mkdir()
    with (
        (tmp_path / "rank.log").open("w") as log,
        subprocess.Popen(
            [sys.executable, "-c", JOB], stdin=subprocess.PIPE, stdout=log, stderr=log,
            env=environment,
        ) as rank,
        running(
            tmp_path,
            f'[path]\nprocfs = "{processes(view, rank.pid)}"\n'
            "[collectors.job_logs]\nstandard_streams = true\n",
        ) as agent,
    ):  # fmt: skip
        agent.wait(lambda scrape: scrape.value("dshealthd_job_log_files", state="followed"), 60)
        assert rank.stdin is not None
        rank.stdin.close()
        start = time.monotonic()
        scrape = agent.wait(lambda scrape: scrape.all("dshealthd_job_failure_info"), 60)
        print(f"{time.monotonic() - start:.2f} s")
        assert scrape.all("dshealthd_job_failure_info", slug="host-memory-pressure", rank="3") == [
            1
        ]


@pytest.mark.parametrize(("ranks", "named"), [
    ((999_999, 1_000_000), {"999999"}),
    (range(8), set("01234567")),
    (range(9), {""}),
])  # fmt: skip
def test_ranks_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: Sequence[int], named: set[str]
) -> None:
    """A log may hold any number: the largest plausible rank is named, the next one is not, and of
    more than eight none.
    """
    found = SimpleNamespace(ranks=ranks, slug="cuda-oom", title="", host=None)
    causes_found = [("slurm-12", found, frozenset({0}))]
    monkeypatch.setattr(watch.LogWatch, "findings", lambda _watch: iter(causes_found))
    node = Node(tmp_path, standard_streams=True)
    node.rank(50, 2, "/logs/a.out")
    assert {rank for _, _, rank, _ in causes(node.sweep())} == named
