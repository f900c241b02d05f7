"""Launches counted from outside a genuine NCCL are those of the job's books."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from dshealthd.jobs.launches.library import places
from dshealthd.jobs.launches.programs import FUNCTIONS, ORDERED, UNORDERED
from dshealthd.linux.elf import functions
from tests.jobs.launches.machine import machine_of
from tests.jobs.launches.service import run, text_of, wait, wait_for_original_text
from tests.nccl.header import launching
from tests.nccl.job import Job
from tests.nccl.sources import RELEASES

pytestmark = [
    pytest.mark.nccl,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may set breakpoints"),
    pytest.mark.parametrize("version", RELEASES),
]
SIZE = 4
OPERATIONS = ("AllReduce", "Broadcast", "Reduce", "AllGather", "ReduceScatter")
SINCE_2_28 = ("AlltoAll", "Gather", "Scatter")


def test_what_takes_a_stream_is_counted(version: str, libraries: Callable[[str], Path]) -> None:
    """Each function of a release that launches is counted by its communicator, but for one that
    calls another; the library exports them, and each can take a breakpoint.
    """
    lib = libraries(version)
    found = launching((lib.parent / "include/nccl.h").read_text())
    known = {**ORDERED, **UNORDERED}
    assert found == {name: known[name] for name in found}
    with (lib / "libnccl.so.2").open("rb") as file:
        exported = places(functions(file.fileno(), FUNCTIONS)).keys()
    assert found.keys() == exported & known.keys()


def test_counts(version: str, make_job: Callable[..., Job], tmp_path: Path) -> None:
    """By rank and communicator, of one that is split off as well; who skips is behind, and while a
    stream is held nobody is.
    """
    job = make_job(version, SIZE)
    operations = OPERATIONS + SINCE_2_28 * (int(version.split(".")[1]) >= 28)
    with machine_of(tmp_path, job) as machine:
        machine.turn()
        job.join()
        job.join("pair", [1, 3])
        job.split("halves", [0, 0, 1, 1])
        for times, operation in enumerate(operations, 3):
            for name in ("world", "pair", "halves/0", "halves/1"):
                job.launch(name, operation, times)
        job.send("world", 0, 1, 5)
        found = machine.turn()
        compared = 0
        for rank in job.ranks:
            books = [book for book in job.books.values() if rank.number in book.members]
            counted = found[rank.pid]["communicators"]
            assert sorted(one["collectives"] for one in counted) == sorted(
                book.launched[rank.number].total() for book in books
            )
            assert sum(one["sends"] for one in counted) == (5 if rank.number < 2 else 0)
            compared += sum(one["behind"] == 0 for one in counted)
        assert compared == SIZE + 2 + SIZE  # of the world, the pair and either half
        job.hold()
        job.launch("world", "AllReduce", 3)
        equal = [[0, 0], [0, 0], [0, 0], [0, 0, 0, 0]]
        assert machine.behind() == equal
        job.launch("world", "AllReduce", 2, [0, 1, 3])
        assert machine.behind() == [*equal[:3], [0, 0, 2, 0]]
        assert not job.ended()


@pytest.mark.parametrize("how", ["init", "config", "scalable"])
def test_parts(how: str, version: str, make_job: Callable[..., Job], tmp_path: Path) -> None:
    """However the world was joined, each part of it has one name in all its ranks, and its own: of
    another color, of a later split in the same colors, of a part. Without a color, too, a rank
    takes part in a split.
    """
    job = make_job(version, SIZE)
    with machine_of(tmp_path, job) as machine:
        machine.turn()
        job.join(how=how)
        job.split("one", [0, 0, 1, 1])
        job.split("two", [0, 0, -1, -1])
        job.split("three", [7, 7, 1, 1])
        job.split("part", [0, 0], "one/0")
        names = ["one/0", "one/1", "two/0", "three/7", "three/1", "part/0"]
        for name in names:
            job.launch(name, "AllReduce", 7)
        assert machine.behind() == [*([[0, 0]] * len(names)), [0, 0, 0, 0]]
        for number, name in enumerate(names, 1):
            job.launch(name, "AllReduce", number, job.books[name].members[:1])
        expected = [*([0, number] for number in range(1, 1 + len(names))), [0, 0, 0, 0]]
        assert machine.behind() == sorted(expected)
        job.destroy("three/1", 3)
        assert [0, 5] not in machine.behind()
        assert not job.ended()


def test_the_end_leaves_the_original_bytes(
    version: str, make_job: Callable[..., Job], libraries: Callable[[str], Path], tmp_path: Path
) -> None:
    """SIGKILL of the service while ranks launch removes each breakpoint, and the ranks go on."""
    job = make_job(version, 2)
    with machine_of(tmp_path, job) as machine:
        procfs = machine.procfs
    library = libraries(version) / "libnccl.so.2"
    with library.open("rb") as file:
        names = set(functions(file.fileno(), FUNCTIONS))
    service, output = run(tmp_path, procfs)
    try:
        wait(output, lambda found: [one["refused"] for one in found["ranks"]] == [None, None])
        job.join()
        for rank in job.ranks:
            assert all(
                memory != file for memory, file in text_of(rank.pid, library, names).values()
            )
            rank.say("do world AllReduce 50000")
    finally:
        service.send_signal(signal.SIGKILL)
        service.wait(60)
    for rank in job.ranks:
        wait_for_original_text(rank.pid, library, names)
        rank.hear()
    job.launch("world", "AllReduce", 3)
    assert not job.ended()
