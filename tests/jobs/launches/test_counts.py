"""What is counted of ranks from outside: every launch and no other, and nobody is harmed."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dshealthd.jobs.launches import bpf
from dshealthd.jobs.launches.obstacle import Obstacle
from tests.jobs.launches import libraries
from tests.jobs.launches.machine import MARKS, Machine
from tests.jobs.launches.service import run, text_of, wait, wait_for_original_text
from tests.nccl import job as job_module
from tests.nccl.job import Job
from tests.processes import children

MAX_COMMUNICATORS = 64

pytestmark = MARKS
SIZE = 3
PTRACE_SEIZE = 0x4206
RIGHTS = "bpf", "perfmon", "sys_ptrace", "dac_read_search", "setuid", "setgid"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., tuple[Job, Machine]]]:
    """Return what starts a job, and a machine that has its ranks alone."""
    opened: list[Job | Machine] = []

    def started(size: int = SIZE, options: tuple[str, ...] = libraries.PUSH) -> tuple[Job, Machine]:
        folder = tmp_path / str(len(opened))
        folder.mkdir()
        job = Job(libraries.build(folder / "lib", options), size, folder)
        opened.append(job)
        for rank in job.ranks:
            rank.ask("sync")  # it has loaded its libraries
        machine = Machine(folder, [rank.pid for rank in job.ranks])
        opened.append(machine)
        return job, machine

    yield started
    for one in reversed(opened):
        one.close()


def of_rank(job: Job, found: dict[int, dict[str, Any]], rank: int) -> dict[str, Any]:
    """Return what a turn has found of a rank."""
    return found[job.ranks[rank].pid]


def only(rank: dict[str, Any]) -> dict[str, Any]:
    """Return the only communicator of a rank that is counted."""
    assert rank["refused"] is None, rank
    (one,) = rank["communicators"]
    assert isinstance(one, dict)
    return one


def test_counts_are_the_books(start: Callable[..., tuple[Job, Machine]]) -> None:
    """By rank and communicator every launch is counted once, sends apart; ranks of one communicator
    have one name for it.
    """
    job, machine = start()
    machine.turn()
    job.join()
    job.launch("world", "AllReduce", 20)
    job.launch("world", "Reduce", 3)  # whose communicator is on the stack
    job.launch("world", "Send1", 7, [0])
    job.launch("world", "Recv0", 7, [1])
    job.join("pair", [0, 2])
    for operation in ("AllGather", "ReduceScatter", "Broadcast"):
        job.launch("pair", operation, 5)
    found = machine.turn()
    for rank in range(SIZE):
        books = [book for book in job.books.values() if rank in book.members]
        counted = of_rank(job, found, rank)["communicators"]
        assert sorted(one["collectives"] for one in counted) == sorted(
            book.launched[rank].total() for book in books
        )
        assert sum(one["sends"] for one in counted) == (7 if rank < 2 else 0)
        assert {one["behind"] for one in counted} == {0}
        assert all(abs(time.monotonic() - one["last"]) < 60.0 for one in counted)
    names = [one["name"] for rank in found.values() for one in rank["communicators"]]
    assert {"", *names} - {""} == set(names)
    assert sorted(Counter(names).values()) == [2, SIZE]


def test_parts(start: Callable[..., tuple[Job, Machine]]) -> None:
    """What is split off has one name in all its ranks, and no other part has: of another color, of
    a later split in the same colors, of another parent, or of a part. A rank without a color has
    taken part; who has split and not launched is behind.
    """
    job, machine = start(4)
    machine.turn()
    job.join()
    job.join("other")
    job.split("one", [0, 0, 1, 1])
    job.split("two", [0, 0, 1, -1])
    job.split("three", [0, 0, 1, 1])
    job.split("four", [0, 0, 1, 1], "other")
    job.split("part", [0, 0], "one/0")
    missing = {"one/0": 1, "one/1": 2, "three/0": 3, "three/1": 4, "four/0": 5, "part/0": 6}
    for name, number in missing.items():
        job.launch(name, "AllReduce", 7)
        job.launch(name, "AllReduce", number, job.books[name].members[:1])
    job.launch("two/0", "AllReduce", 1)
    job.launch("world", "AllReduce", 8, [0, 1, 3])
    expected = [[0, 0], [0, 0, 0, 0], [0, 0, 8, 0], *([0, number] for number in range(1, 7))]
    assert machine.behind() == sorted(expected)
    assert machine.behind() == sorted(expected)
    job.destroy_all()
    job.join("new")
    job.split("one", [0, 1, 0, 1], "new")
    job.launch("one/0", "AllReduce", 2, [0])
    job.launch("one/0", "AllReduce", 1)
    assert machine.behind() == [[0, 0, 0, 0], [0, 2]]


def test_parts_of_what_was_there_before(start: Callable[..., tuple[Job, Machine]]) -> None:
    """How often it was split before is unknown: its parts are counted, and never compared."""
    job, machine = start(2)
    job.join()
    job.split("before", [0, 0])
    machine.turn()
    job.split("after", [0, 0])
    job.launch("after/0", "AllReduce", 3, [0])
    job.launch("after/0", "AllReduce", 2)
    assert machine.behind() == []
    found = machine.turn()
    counts = [one["collectives"] for rank in found.values() for one in rank["communicators"]]
    assert sorted(counts) == [0, 0, 2, 5]
    last = [one["last"] for rank in found.values() for one in rank["communicators"]]
    assert last.count(None) == 2


def test_while_breakpoints_are_set(
    start: Callable[..., tuple[Job, Machine]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are set one after another; what a rank makes and launches meanwhile is counted whole, or
    never compared.
    """
    job, machine = start(2)
    attach = bpf.attach
    names: list[str] = []

    def and_launch(*arguments: Any) -> int:
        link = attach(*arguments)
        names.append(f"c{len(names)}")
        job.join(names[-1], how="config")
        job.split(f"{names[-1]}s", [0, 0], names[-1])
        for name in (names[-1], f"{names[-1]}s/0"):
            for operation in ("AllReduce", "AllGather", "Reduce"):
                job.launch(name, operation, 1)
        return link

    with monkeypatch.context() as patch:
        patch.setattr(bpf, "attach", and_launch)
        machine.turn()
    assert len(names) > 8
    found = machine.behind()
    assert found
    assert not any(map(sum, found))


@pytest.mark.parametrize("kind", ["config", "scalable"])
def test_other_ways_to_begin(kind: str, start: Callable[..., tuple[Job, Machine]]) -> None:
    """Ranks of one communicator have one name for it however they join."""
    job, machine = start(2)
    machine.turn()
    job.join(how=kind)
    job.join("other", how=kind)
    job.split("part", [5, 5])
    for name, number in (("world", 1), ("other", 2), ("part/5", 3)):
        job.launch(name, "AllReduce", 7)
        job.launch(name, "AllReduce", number, [0])
    assert machine.behind() == [[0, 1], [0, 2], [0, 3]]


def test_from_the_middle_nobody_is_named(start: Callable[..., tuple[Job, Machine]]) -> None:
    """Whose communicator was there before is counted, and never compared."""
    job, machine = start()
    job.join()
    job.launch("world", "AllReduce", 2, [0])
    machine.turn()
    job.launch("world", "AllReduce", 5)
    for rank in machine.turn().values():
        one = only(rank)
        assert (one["collectives"], one["name"], one["behind"], one["late"]) == (5, "", None, None)


def test_a_new_communicator_at_an_old_address(start: Callable[..., tuple[Job, Machine]]) -> None:
    """What was counted of a destroyed communicator is not the next one's."""
    job, machine = start(2)
    machine.turn()
    job.join("first")
    job.launch("first", "AllReduce", 9)
    machine.turn()
    job.destroy_all()
    job.join("second")
    job.launch("second", "AllReduce", 1, [0])
    job.launch("second", "AllReduce", 1)
    counts = [only(of_rank(job, machine.turn(), rank)) for rank in range(2)]
    assert [(one["collectives"], one["behind"]) for one in counts] == [(2, 0), (1, 1)]


def test_a_late_host(start: Callable[..., tuple[Job, Machine]]) -> None:
    """The median time after the first rank is that by which a rank is late."""
    job, machine = start(2)
    machine.turn()
    job.join()
    for _ in range(16 + 4):
        job.launch("world", "AllReduce", 1, [0])
        time.sleep(0.03)
        job.launch("world", "AllReduce", 1, [1])
    first, second = (only(of_rank(job, machine.turn(), rank))["late"] for rank in range(2))
    assert first == 0.0
    assert second >= 0.03


def test_beyond_the_budget(
    start: Callable[..., tuple[Job, Machine]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that launches too often is left alone for ten minutes, which is said; the others and a
    rank just below are counted. It then counts anew.
    """
    job, machine = start(2)
    clock = {"now": 1000.0}
    machine.context.monotonic = lambda: clock["now"]
    library = job.folder / "lib/libnccl.so.2"

    def turn(after: float) -> dict[int, dict[str, Any]]:
        clock["now"] += after
        return machine.turn()

    turn(0.0)
    job.join()  # a hit of each
    job.launch("world", "AllReduce", 5000, [0])
    job.launch("world", "AllReduce", 4999, [1])
    found = turn(1.0)
    assert of_rank(job, found, 0)["refused"] is Obstacle.OVER_BUDGET
    assert of_rank(job, found, 0)["communicators"] == []
    assert only(of_rank(job, found, 1))["collectives"] == 4999
    for memory, file in text_of(job.ranks[0].pid, library, {"ncclAllReduce"}).values():
        assert memory == file
    assert of_rank(job, turn(600.0 - 1), 0)["refused"] is Obstacle.OVER_BUDGET
    assert of_rank(job, turn(2.0), 0)["refused"] is None
    job.launch("world", "AllReduce", 3)
    assert only(of_rank(job, turn(1.0), 0))["collectives"] == 3
    monkeypatch.undo()


def test_never_under_a_debugger(start: Callable[..., tuple[Job, Machine]]) -> None:
    """A rank with a tracer is left, and not attached to while it has one."""
    job, machine = start(2)
    libc, pid = ctypes.CDLL(None, use_errno=True), job.ranks[0].pid
    assert of_rank(job, machine.turn(), 0)["refused"] is None
    assert libc.ptrace(PTRACE_SEIZE, pid, None, None) == 0
    for _ in range(2):
        found = machine.turn()
        assert of_rank(job, found, 0)["refused"] is Obstacle.DEBUGGER
        assert of_rank(job, found, 1)["refused"] is None
    for memory, file in text_of(
        pid, job.folder / "lib/libnccl.so.2", {"ncclAllReduce", "ncclSend"}
    ).values():
        assert memory == file


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (libraries.PUSH, None),
        (libraries.ENDBR64, None),
        (libraries.MOVES, None),
        (libraries.OTHER, Obstacle.SINGLE_STEPPED),
    ],
)
def test_the_first_instruction(
    options: tuple[str, ...],
    refusal: Obstacle | None,
    start: Callable[..., tuple[Job, Machine]],
) -> None:
    """Of operations only a push takes a breakpoint, also after endbr64; what makes a communicator,
    and so names it, may begin otherwise.
    """
    job, machine = start(1, options)
    machine.turn()
    job.join()
    job.launch("world", "AllReduce", 4)
    rank = of_rank(job, machine.turn(), 0)
    assert rank["refused"] is refusal
    counted = [(one["collectives"], one["name"] != "") for one in rank["communicators"]]
    assert counted == ([] if refusal else [(4, True)])


def test_too_many_communicators(start: Callable[..., tuple[Job, Machine]]) -> None:
    """What has no place is said; the rank is not compared any more, another one is counted."""
    job, machine = start(2)
    machine.turn()
    job.join()
    for number in range(MAX_COMMUNICATORS):
        job.join(f"c{number}", [0])
        job.launch(f"c{number}", "AllReduce", 1)
    job.launch("world", "AllReduce", 1)
    first, second = (of_rank(job, machine.turn(), rank) for rank in range(2))
    assert first["refused"] is Obstacle.TOO_MANY_COMMUNICATORS
    assert len(first["communicators"]) == MAX_COMMUNICATORS
    assert only(second)["behind"] is None


def test_a_script_that_starts_the_rank(tmp_path: Path) -> None:
    """The process that has NCCL is the rank's, not the shell that its launcher started."""
    lib = libraries.build(tmp_path / "lib")
    script = Path(job_module.__file__).with_name("rank.py")
    environment = {
        "PATH": os.environ["PATH"],
        "NCCLSIM_LIB": str(lib),
        "LOCAL_RANK": "0",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    shell = subprocess.Popen(
        ["sh", "-c", f"{sys.executable} {script}; exit 3"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
        bufsize=1,
    )
    assert shell.stdin is not None
    assert shell.stdout is not None
    machine = Machine(tmp_path, [shell.pid])
    try:
        assert machine.turn()[shell.pid]["refused"] is Obstacle.NO_LIBRARY
        shell.stdin.write("sync\n")
        assert shell.stdout.readline().startswith("ok")
        (pid,) = children(shell.pid)
        machine.add(pid)
        found = machine.turn()
        assert {pid: None} == {each: rank["refused"] for each, rank in found.items()}
    finally:
        machine.close()
        shell.stdin.close()
        assert shell.wait(60) == 3
        shell.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_end_leaves_the_original_bytes(
    number: signal.Signals, start: Callable[..., tuple[Job, Machine]], tmp_path: Path
) -> None:
    """However the service ends, the rank's text is as it was, and the rank goes on."""
    job, machine = start(1)
    library = job.folder / "lib/libnccl.so.2"
    names = {"ncclAllReduce", "ncclReduce", "ncclSend", "ncclCommInitRank", "ncclCommDestroy"}
    service, output = run(tmp_path, machine.procfs)
    try:
        wait(output, lambda found: found["ranks"] and found["ranks"][0]["refused"] is None)
        for name, (memory, file) in text_of(job.ranks[0].pid, library, names).items():
            assert memory[0] == 0xCC, name
            assert memory[1:] == file[1:]
    finally:
        service.send_signal(number)
        service.wait(60)
    wait_for_original_text(job.ranks[0].pid, library, names)
    assert output.exists() is (number is signal.SIGKILL)
    job.join()
    job.launch("world", "AllReduce", 3)
    assert not job.ended()


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv here")
@pytest.mark.parametrize("missing", [None, *RIGHTS])
def test_each_right_is_needed(
    missing: str | None, start: Callable[..., tuple[Job, Machine]], tmp_path: Path
) -> None:
    """With the six capabilities of the unit a rank is counted; without any one of them the service
    says that it is denied, and touches nothing.
    """
    job, machine = start(1)
    machine.watch.close()
    kept = ",".join(f"+{right}" for right in RIGHTS if right != missing)
    service, output = run(tmp_path, machine.procfs, "setpriv", "--bounding-set", f"-all,{kept}")
    try:
        found = wait(
            output,
            lambda found: found["refused"] or any(one["refused"] is None for one in found["ranks"]),
        )
    finally:
        service.terminate()
        service.wait(60)
    assert found["refused"] == (None if missing is None else "denied")
    assert bool(found["ranks"]) is (missing is None)
    assert not job.ended()
