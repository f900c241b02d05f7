"""Whole collections of jobs of real processes, seen through a `/proc` that shows these alone.

RAS, kernel lines, and what is missing.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, NamedTuple, cast

import pytest

from bench.processes import free_port
from dshealthd.core.host import Host
from dshealthd.evidence import members, nccl_ras, process
from dshealthd.evidence.bundle import Bundle, make
from dshealthd.evidence.collection import Collection
from dshealthd.evidence.findings import (
    CollectedEvidence,
    HangCase,
    LogSources,
    NodeMembers,
    RankEvidence,
)
from dshealthd.jobs.ras import protocol
from dshealthd.jobs.ras.protocol import MAY_BE_SENT
from dshealthd.linux.forked import Ended
from dshealthd.linux.kmsg import kernel_clock
from tests.evidence.test_dump import dump, entry
from tests.jobs.ras.server import Communicator, Process, Rank, document, library
from tests.processes import children, wait_for_environment

RANKS = 16
MAX_DUMP = 32 << 20
MEMORY = 1 << 30

NOW = 1_795_271_340.0
BUNDLE_BYTES = 64 << 20
USER, STRANGER = 4321, 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="runs processes of other users")


class Node:
    """A machine with the processes that were shown to it and no others."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "proc").mkdir()
        (root / "dev").mkdir()
        self.stack = contextlib.ExitStack()

    def show(self, pid: int) -> None:
        """Let the machine have a process."""
        (self.root / "proc" / str(pid)).symlink_to(f"/proc/{pid}")

    def rank(
        self,
        job: int,
        rank: int = 0,
        output: IO[str] | None = None,
        user: int | None = None,
        **variables: str,
    ) -> int:
        """Run a process of a rank, with that as its output, and return its pid."""
        environment = {"RANK": str(rank), "WORLD_SIZE": "3", "SLURM_JOB_ID": str(job), **variables}
        process = subprocess.Popen(
            ["sleep", "600"],
            env=environment,
            stdout=output,
            stderr=output,
            user=user,
            group=user,
            extra_groups=None if user is None else [],
        )
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)
        wait_for_environment(process.pid)
        self.show(process.pid)
        return process.pid

    def ras(self, behavior: str, *contents: bytes, job: int, version: str = "2.29.7") -> int:
        """Run a process of rank 0 that answers in the place of NCCL's RAS."""
        port = free_port()
        places = [self.root / f"answer-{number}" for number in range(len(contents))]
        for place, content in zip(places, contents, strict=True):
            place.write_bytes(content)
        environment = {
            "RANK": "0",
            "WORLD_SIZE": "3",
            "SLURM_JOB_ID": str(job),
            "NCCL_RAS_ADDR": f"127.0.0.1:{port}",
        }
        process = Process(
            behavior,
            *places,
            port=port,
            environment=environment,
            library=library(self.root, version),
            record=self.root / "record",
        )
        self.stack.callback(process.close)
        self.show(process.popen.pid)
        return process.popen.pid

    def collect(self, case: HangCase, *paths: str) -> tuple[str, dict[str, bytes], bool]:
        """Take evidence, and return the summary, the files and whether it was whole."""
        return collect(self.root, case, *paths)


def collect(root: Path, case: HangCase, *paths: str) -> tuple[str, dict[str, bytes], bool]:
    """Take evidence, and return the summary, the files and whether it was whole."""
    (root / "state").mkdir()
    bundle = make(
        root / "state/evidence",
        case.job,
        NOW,
        max_bundles=9,
        max_bytes=1 << 30,
        bundle_bytes=BUNDLE_BYTES,
        min_free=0,
    )
    host = Host(procfs=root / "proc", dev=root / "dev")
    collection = Collection(
        case, host, bundle, node="node-a", begun=NOW, py_spy=None, logs=LogSources(paths)
    )
    collection.begin(
        "",
        [],
        {
            "rounds": [
                {"time": NOW - 3599, "kind": "light", "outcome": "ok"},
                {"time": NOW - 3601, "kind": "pair"},
            ]
        },
    )
    collection.collect()
    collection.end(None, 0.0)
    return (
        bundle.path.joinpath("summary.txt").read_text(),
        {file.name: file.read_bytes() for file in bundle.path.iterdir()},
        collection.whole,
    )


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A machine without processes."""
    found = Node(tmp_path)
    with found.stack:
        yield found


def test_ras_is_asked_twice_and_tells_who_is_behind(node: Node) -> None:
    """Both raw answers are kept, and the summary names who is behind and who is dead."""
    ranks = [Rank(0, pid=1), Rank(1, pid=2, counts={"AllReduce": 999})]
    dead = Rank(2, pid=3, flags=("unresponsive", "considered_dead"))
    answer = document(Communicator(ranks, [dead]))
    node.ras("json", answer, answer, job=7)
    text, files, whole = node.collect(HangCase(job="slurm-7", reason="desync"))
    assert "NCCL RAS: rank 2 on 192.0.2.1 GPU 0 is dead" in text
    assert "NCCL RAS: rank 1 on 192.0.2.1 GPU 0 is 1 AllReduce behind the furthest rank" in text
    assert files["nccl-ras-1.json"] == files["nccl-ras-2.json"] == answer
    assert json.loads(files["nccl-ras.json"])["idle"] == 1
    said = (node.root / "record").read_bytes().splitlines(keepends=True)
    assert set(said) <= MAY_BE_SENT
    assert said.count(b"VERBOSE STATUS\n") == 2
    assert whole


@pytest.mark.parametrize("version", ["2.27.7", "2.29.1", ""])
def test_a_release_that_may_crash_is_not_asked(node: Node, version: str) -> None:
    """Evidence of a hang is not worth the job: not one byte is sent, and the summary says why."""
    node.ras("text", b"never", job=7, version=version)
    text, files, _ = node.collect(HangCase(job="slurm-7", reason="desync"))
    assert "NCCL RAS: not queried, un" in text
    assert not any(name.startswith("nccl-ras") for name in files)
    assert not (node.root / "record").exists()


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("2.27.7", "not queried, unsafe_release: loaded NCCL is 2.27.7"),
        ("", "not queried, unknown_release: loaded NCCL is unknown (process "),
    ],
)
def test_a_rank_0_that_cannot_be_read_is_of_this_node(node: Node, version: str, said: str) -> None:
    """No other node queries RAS, and no release that a query can crash is queried: its own counts,
    too.
    """
    port = free_port()
    rank_0 = Process(
        "text",
        port=port,
        environment={},
        library=library(node.root, version),
        record=node.root / "record",
    )
    node.stack.callback(rank_0.close)
    node.show(rank_0.popen.pid)
    node.rank(7, 1, NCCL_RAS_ADDR=f"127.0.0.1:{port}")
    case = HangCase(job="slurm-7", reason="waiting", ranks=((0, rank_0.popen.pid),))
    text, _, _ = node.collect(case)
    assert f"NCCL RAS: {said}" in text
    assert f"(pid {rank_0.popen.pid}), flight recorder: its environment could not be read" in text
    assert not (node.root / "record").exists()


def test_a_ras_that_stalls_costs_its_own_part(node: Node) -> None:
    """Who speaks the protocol and never answers is given up, and the rest is there."""
    node.ras("stall", job=7)
    text, files, whole = node.collect(HangCase(job="slurm-7", reason="waiting"))
    assert "NCCL RAS: no complete answer in time" in text
    assert any(re.fullmatch(r"rank-0-\d+\.kernel\.txt", name) for name in files)
    assert whole


def test_a_ras_answer_made_to_fill_the_memory_costs_its_own_part(node: Node) -> None:
    """An answer that takes too much to parse ends its step alone; the process is no larger."""
    hostile = b"[" + b",".join([b"{}"] * (protocol.MAX_ANSWER // 3)) + b"]"
    assert len(hostile) == protocol.MAX_ANSWER
    pid = node.ras("json", hostile, job=7)
    found = collected(node)
    text, files = found.summary, {file.name: file.read_bytes() for file in found.bundle.iterdir()}
    assert "NCCL RAS: it needs more memory than its limit" in text
    assert files["nccl-ras-1.json"] == hostile
    assert "nccl-ras.json" not in files
    assert f"rank-0-{pid}.kernel.txt" in files
    assert "THE COLLECTION HAS NOT ENDED" not in text
    assert found.whole
    assert found.grown < 4 * protocol.MAX_ANSWER  # what it returns is among it


def test_a_job_with_a_network_of_its_own_is_not_asked(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who listens there in the agent's network is another job's NCCL, which may be one that a
    connection can crash.
    """
    node.ras("text", b"never", job=7)
    monkeypatch.setattr(nccl_ras, "namespace", lambda *_: "net:[1]")
    text, _, _ = node.collect(HangCase(job="slurm-7", reason="waiting"))
    assert "NCCL RAS: the job has a network namespace of its own" in text
    assert not (node.root / "record").exists()


def test_another_node_asks_ras(node: Node) -> None:
    """One question goes through the whole job, so that the node with rank 0 asks alone."""
    node.rank(7, 1)
    text, _, _ = node.collect(HangCase(job="slurm-7", reason="waiting"))
    assert "NCCL RAS: queried by the node of rank 0" in text


def test_the_logs_of_the_ranks_are_explained(node: Node) -> None:
    """The summary names cause and rank, and `explain.txt` has the lines that prove it."""
    with (node.root / "rank.out").open("w") as log:
        log.write(
            "step 7 | loss 2.0\n\x1b[31mtorch.OutOfMemoryError: CUDA out of memory. "
            "Tried to allocate 2.00 GiB. GPU 1 has a\n"
        )
        log.flush()
        node.rank(7, 1, log)
        node.rank(7, 2, log, MASTER_PORT="1")
    with (node.root / "own.out").open("w") as log:
        node.rank(7, 2, log)
    text, files, _ = node.collect(HangCase(job="slurm-7", reason="waiting"))
    assert re.search(r"What shows the cause\n  logs of slurm-7: cuda-oom: ", text), text
    told = files["explain.txt"].decode()
    assert f"PROOF      {node.root}/rank.out:2: " in told
    assert "\x1b" not in told


def test_what_is_no_log_hides_none(node: Node) -> None:
    """A directory and a FIFO that a pattern matches, and a file that may not be read."""
    place = node.root / "7"
    (place / "a").mkdir(parents=True)
    os.mkfifo(place / "b")
    (place / "c").symlink_to("c")
    (place / "d").write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 G")
    node.rank(7, 1)
    case = HangCase(job="slurm-7", reason="waiting")
    text, files, _ = node.collect(case, f"{node.root}/{{job}}/*", f"{node.root}/{{job}}/c/*")
    assert "logs of slurm-7: cuda-oom: " in text
    told = files["explain.txt"].decode()
    assert "Too many levels of symbolic links" in told
    assert "is not a regular file" not in told


@pytest.mark.parametrize(("logs", "said"), [(64, False), (65, True)])
def test_so_many_logs(node: Node, logs: int, *, said: bool) -> None:
    """Of more, which may show the cause, it is told that they were not read."""
    (node.root / "7").mkdir()
    for number in range(logs):
        (node.root / f"7/{number:02}").write_text("step 7\n")
    node.rank(7, 1)
    case = HangCase(job="slurm-7", reason="waiting")
    _, files, _ = node.collect(case, f"{node.root}/{{job}}/*")
    assert (f"{node.root}/7/64: at most 64 files are read" in files["explain.txt"].decode()) is said


def test_without_logs_it_is_said_why(node: Node) -> None:
    """A rank whose output is a pipe has no log that could be read."""
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "w") as pipe:
        node.rank(7, 1, pipe)
        text, files, _ = node.collect(HangCase(job="slurm-7", reason="waiting"))
    os.close(read_end)
    assert "job logs: no rank's output is a file" in text
    assert "explain.txt" not in files


def test_a_process_of_another_job_is_left_alone(node: Node) -> None:
    """Evidence of one job shows nothing of others."""
    mine, other = node.rank(7), node.rank(8)
    text, files, _ = node.collect(HangCase(job="slurm-7", reason="waiting"))
    assert f"pid {mine}" in text
    assert f"pid {other}" not in text
    assert f"rank-0-{mine}.kernel.txt" in files


def discovered(node: Node, case: HangCase) -> CollectedEvidence:
    """Return what is found of the ranks of a case, before anything is collected."""
    host, bundle = Host(procfs=node.root / "proc"), cast("Bundle", None)
    collection = Collection(case, host, bundle, node="", begun=NOW, py_spy=None, logs=LogSources())
    collection._discover()
    return collection.findings


@pytest.mark.parametrize(("ranks", "more"), [(64, []), (65, ["1 more rank"])])
def test_so_many_ranks(node: Node, ranks: int, more: list[str]) -> None:
    """Of more it is said how many are left out."""
    known = tuple((rank, 1000 + rank) for rank in range(ranks))
    found = discovered(node, HangCase(job="slurm-7", reason="waiting", ranks=known))
    assert [rank.pid for rank in found.ranks] == list(range(1000, 1064))
    assert [reason.partition(":")[0] for reason in found.missing] == more


def test_a_culprit_is_among_the_ranks_inspected(node: Node) -> None:
    """Whatever its number."""
    ranks = tuple((rank, 1000 + rank) for rank in range(100))
    case = HangCase(job="slurm-7", reason="process", ranks=ranks, culprits=((99, "is stopped"),))
    assert [rank.rank for rank in discovered(node, case).ranks] == [*range(63), 99]


def test_no_job_crowds_out_another(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all jobs' ranks those are looked at that `members` names first: users take turns."""
    found = [RankEvidence("slurm-9", 0, 900), *(RankEvidence("run-1", 0, pid) for pid in range(64))]
    value = members.MEMBERS.write(NodeMembers(found, 0, ["run-1", "slurm-9"], {}))
    monkeypatch.setattr(members, "search", lambda *_: Ended("ranks", 0.0, value))
    ranks = discovered(node, HangCase(job="", reason="requested")).ranks
    assert 900 in {rank.pid for rank in ranks}
    assert len(ranks) == 64


def dumped(directory: Path, user: int, *dumps: bytes) -> str:
    """Write dumps of ranks 0 on as a user's, and return the prefix of their paths."""
    directory.mkdir()
    for rank, content in enumerate(dumps):
        (directory / f"dump_{rank}").write_bytes(content)
        os.chown(directory / f"dump_{rank}", user, user)
    return str(directory / "dump_")


def scene_of_two_users(node: Node, place: Path, *, stranger_first: bool) -> tuple[list[int], int]:
    """Run a user's ranks 0 and 1, and a stranger's rank 1 of the same job; return pids."""
    done = entry(1, state="completed")
    mine = dumped(place / "mine", USER, dump(done, entry(2)), dump(done, entry(2)))
    alien = dumped(place / "alien", STRANGER, dump(done), dump(done))
    started: dict[int, list[int]] = {USER: [], STRANGER: []}
    ranks = [(USER, 0, mine), (USER, 1, mine)]
    for user, rank, prefix in (
        [(STRANGER, 1, alien), *ranks] if stranger_first else [*ranks, (STRANGER, 1, alien)]
    ):
        pid = node.rank(7, rank, user=user, TORCH_FR_DUMP_TEMP_FILE=prefix)
        started[user].append(pid)
        time.sleep(0.05)  # processes' ages are told apart by hundredths of a second
    return started[USER], started[STRANGER][0]


@pytest.mark.parametrize(
    ("since", "behind", "accused"),
    [(NOW, 1.0, True), (NOW, -1.0, False), (None, -29.0, True), (None, -31.0, False)],
)
def test_a_dump_of_another_time_accuses_nobody(
    node: Node, tmp_path: Path, *, since: float | None, behind: float, accused: bool
) -> None:
    """It counts from the last progress on, or close to the newest dump: an old one, of an earlier
    hang or job, shows its rank far behind.
    """
    done = entry(1, state="completed")
    prefix = dumped(tmp_path / "dumps", os.geteuid(), dump(done, entry(2)), dump(done))
    for rank, written in enumerate((NOW + 2.0, (since or NOW + 2.0) + behind)):
        os.utime(f"{prefix}{rank}", (written, written))
        node.rank(7, rank, TORCH_FR_DUMP_TEMP_FILE=prefix)
    case = HangCase(job="slurm-7", reason="waiting", since=since)
    text, files, _ = node.collect(case)
    assert ("rank 1 never entered all_reduce #2" in text) is accused
    assert sum(name.endswith("flight-recorder.json") for name in files) == 2


def test_a_new_dump_counts_whatever_its_file_server_s_clock_says(tmp_path: Path) -> None:
    """Its time is the server's, which may be behind the node's."""
    bundle = Bundle(tmp_path / "bundle", BUNDLE_BYTES, (os.geteuid(), os.getegid()))
    done = entry(1, state="completed")
    case = HangCase(job="slurm-7", reason="waiting", since=NOW)
    collection = Collection(
        case, Host(), bundle, node="", begun=NOW, py_spy=None, logs=LogSources()
    )
    for number, content in enumerate((dump(done, entry(2)), dump(done))):
        rank = RankEvidence("slurm-7", number, 100 + number)
        name = f"{rank.file}.flight-recorder.pickle"
        bundle.append(name, content)
        rank.facts["recorder"] = {"file": name, "note": "", "written": NOW - 3600.0}
        collection.findings.ranks.append(rank)
    collection._read_dumps()
    assert ["never entered" in line for line in collection.findings.collectives] == [True]


@as_root
@pytest.mark.parametrize("stranger_first", [False, True])
def test_another_user_s_rank_of_the_same_name_stays_out(
    node: Node, public_path: Path, *, stranger_first: bool
) -> None:
    """A bundle holds what is of its job's user alone, whichever of the two started first."""
    mine, alien = scene_of_two_users(node, public_path, stranger_first=stranger_first)
    job = f"slurm-7-uid{USER}" if stranger_first else "slurm-7"
    case = HangCase(job=job, reason="waiting", ranks=tuple(enumerate(mine)))
    text, files, whole = node.collect(case)
    of_ranks = {name for name in files if name.startswith("rank-")}
    assert of_ranks == {
        f"rank-{rank}-{pid}.{what}"
        for rank, pid in enumerate(mine)
        for what in ("kernel.txt", "flight-recorder.pickle", "flight-recorder.json")
    }
    assert "Ranks on this node: 2" in text
    assert f"pid {alien}" not in text
    assert "all 2 ranks entered all_reduce #2 of the default_pg" in text
    assert whole


@as_root
def test_files_of_two_users_never_mix(node: Node, public_path: Path) -> None:
    """In evidence of all jobs the same rank of two users has files and comparisons of its own."""
    mine, alien = scene_of_two_users(node, public_path, stranger_first=False)
    text, files, _ = node.collect(HangCase(job="", reason="requested"))
    entries = {
        pid: json.loads(files[f"rank-1-{pid}.flight-recorder.json"])["entries"]
        for pid in (mine[1], alien)
    }
    assert entries == {mine[1]: 2, alien: 1}
    assert f"pid {alien}" in text
    assert "slurm-7, all 2 ranks entered all_reduce #2 of the default_pg" in text
    assert "never entered" not in text


def memory(pid: int) -> int:
    """Return the bytes that a process and its children take together, without files' pages."""
    total = 0
    for member in (pid, *children(pid)):
        with contextlib.suppress(OSError):  # it has ended
            rollup = Path(f"/proc/{member}/smaps_rollup").read_text(encoding="ascii")
            found = re.search(r"^Pss_Anon: +(\d+) kB$", rollup, re.MULTILINE)
            total += int(found[1]) << 10 if found is not None else 0
    return total


def slowed_at() -> int:
    """Return how many bytes the service may have before the kernel slows it down."""
    unit = (Path(__file__).parents[2] / "systemd/dshealthd.service").read_text(encoding="utf-8")
    found = re.search(r"^MemoryHigh=(\d+)M$", unit, re.MULTILINE)
    assert found is not None
    return int(found[1]) << 20


def mapped() -> int:
    """Return the bytes that this process has mapped."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def collect_when_told(root: Path, told: Connection) -> None:
    """Say that all is imported, take evidence once that is answered, and say how it went."""
    told.send(None)
    told.recv()
    before = mapped()
    _, _, whole = collect(root, HangCase(job="slurm-7", reason="waiting"))
    told.send((whole, mapped() - before))


class Collected(NamedTuple):
    """Evidence that a process of its own has taken, and the bytes that this took."""

    bundle: Path
    whole: bool
    peak: int
    """The most memory of it and its children."""
    grown: int
    """By how much more it had mapped in the end."""

    @property
    def summary(self) -> str:
        """What the summary says."""
        return self.bundle.joinpath("summary.txt").read_text()


def collected(node: Node) -> Collected:
    """Take evidence in a process of its own.

    It is no fork: what that shares with this process would become its own memory as it runs.
    """
    spawning = multiprocessing.get_context("spawn")
    told, its = spawning.Pipe()
    process = spawning.Process(target=collect_when_told, args=(node.root, its))
    process.start()
    its.close()
    told.recv()
    assert process.pid is not None
    before = peak = memory(process.pid)
    told.send(None)
    while process.is_alive():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            peak = max(peak, memory(process.pid))
        time.sleep(0.05)
    assert process.exitcode == 0
    (bundle,) = (node.root / "state/evidence").iterdir()
    assert sum(file.stat().st_size for file in bundle.iterdir()) <= BUNDLE_BYTES + (1 << 20)
    whole, grown = told.recv()
    return Collected(bundle, whole, peak - before, grown)


@as_root
def test_large_dumps_of_all_ranks_at_once(node: Node, public_path: Path) -> None:
    """Of sparse dumps of all ranks a few are in memory at a time, and the bundle is bounded."""
    prefix = dumped(public_path / "dumps", USER, *[b""] * RANKS)
    for rank in range(RANKS):
        os.truncate(f"{prefix}{rank}", MAX_DUMP)
        node.rank(7, rank, user=USER, TORCH_FR_DUMP_TEMP_FILE=prefix)
    found = collected(node)
    assert "the bundle is full (an eighth of max_bytes)" in found.summary
    assert found.peak < RANKS * MAX_DUMP // 2 < slowed_at(), found


@as_root
def test_dumps_made_to_fill_the_memory(node: Node, public_path: Path) -> None:
    """Dumps that each need all memory that the parser of one may have are parsed in turn."""
    hostile = b"\x80\x02(" + b"}" * (MEMORY // 64 - (1 << 20)) + b"l."  # objects of 64 bytes
    prefix = dumped(public_path / "dumps", USER, *[hostile] * 2)
    for rank in range(2):
        node.rank(7, rank, user=USER, TORCH_FR_DUMP_TEMP_FILE=prefix)
    found = collected(node)
    assert found.summary.count("contents of its dump: ") == 2
    # A busy machine parses but a part of each before its time is over.
    assert MEMORY // 16 < found.peak < slowed_at()


def test_a_rank_whose_environment_tells_nothing_is_known_by_its_heartbeat(node: Node) -> None:
    """Where the environments cannot be read, the ranks that report are looked at all the same."""
    with subprocess.Popen(["sleep", "60"], env={}) as process:
        node.show(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        text, files, whole = node.collect(
            HangCase(job="slurm-7", reason="process", ranks=((5, process.pid),))
        )
        process.kill()
    assert f"rank 5, node-a, pid {process.pid}" in text
    assert "stopped" in text
    assert f"rank-5-{process.pid}.kernel.txt" in files
    assert whole


def test_a_rank_that_has_ended_meanwhile_is_said_to_be_gone(node: Node) -> None:
    """The rest of the bundle is made, and it is not whole."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    ranks = (5, process.pid), (0, node.rank(7))
    text, _, whole = node.collect(HangCase(job="slurm-7", reason="process", ranks=ranks))
    assert f"rank 5 (pid {process.pid}), the kernel's view: process {process.pid} is gone" in text
    assert not whole


def test_so_many_threads(tmp_path: Path) -> None:
    """The main one, and then the first by their numbers."""
    for thread in range(1, 201):
        (tmp_path / "150" / "task" / str(thread)).mkdir(parents=True)
    assert process._threads(Host(procfs=tmp_path), 150) == ["150", *map(str, range(1, 128))]


def test_a_rank_that_ends_meanwhile_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the two looks of a second at what it uses."""
    with subprocess.Popen(["sleep", "60"]) as child:

        def end(seconds: float) -> None:
            assert 0.0 <= seconds <= 1.0
            child.kill()
            child.wait()

        monkeypatch.setattr(time, "sleep", end)
        found = process.collect(lambda *_: None, Host(), child.pid, 5)
    assert (found["state"], found["cpu"]) == ("gone", None)


def test_kernel_lines_and_rounds_of_the_last_time_are_kept(node: Node) -> None:
    """The kernel's lines are kept as they were, and rounds of the last hour."""
    now = int(kernel_clock() * 1e6)
    os.mkfifo(node.root / "dev/kmsg")
    keeper = os.open(node.root / "dev/kmsg", os.O_RDWR)
    # A FIFO gives no records of its own: one is all that a read of it can hold.
    os.write(
        keeper,
        f"6,11,{now},-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus\n".encode(),
    )
    text, files, _ = node.collect(HangCase(job="", reason="requested"))
    os.close(keeper)
    assert b"NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus" in files["kernel-log.txt"]
    assert "kind light" in text
    assert "kind pair" not in text


def test_a_node_where_nothing_can_be_read_says_so(node: Node) -> None:
    """Without `/proc` and kernel log there is a bundle that says what is missing and why."""
    (node.root / "proc").rmdir()
    text, _, whole = node.collect(HangCase(job="slurm-7", reason="waiting", ranks=((5, 4711),)))
    assert (
        "environments of the ranks, and with them RAS and flight recorders: [Errno 2] No "
        "such file or directory"
    ) in text
    assert "kernel log: [Errno 2] No such file or directory" in text
    assert "metrics: no data from the agent" in text
    assert not whole
