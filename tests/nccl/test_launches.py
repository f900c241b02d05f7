"""Launches counted from outside a genuine NCCL are those of the job's books."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.launches.machine import Machine
from tests.nccl.job import Job

pytestmark = [
    pytest.mark.nccl,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may set breakpoints"),
]
SIZE = 4
OPERATIONS = ("AllReduce", "Broadcast", "Reduce", "AllGather", "ReduceScatter")


@pytest.mark.parametrize("version", ["2.27.7", "2.28.9", "2.30.7"])
def test_counts(version: str, make_job: Callable[..., Job], tmp_path: Path) -> None:
    """By rank and communicator, of one that is split off as well; who skips is behind, and while a
    stream is held nobody is.
    """
    job = make_job(version, SIZE)
    for rank in job.ranks:
        rank.ask("sync")
    machine = Machine(tmp_path, [rank.pid for rank in job.ranks])
    try:
        machine.turn()
        job.join()
        job.join("pair", [1, 3])
        job.split("halves", [0, 0, 1, 1])
        for times, operation in enumerate(OPERATIONS, 3):
            for name in ("world", "pair", "halves/0", "halves/1"):
                job.launch(name, operation, times)
        found = machine.turn()
        compared = 0
        for rank in job.ranks:
            books = [book for book in job.books.values() if rank.number in book.members]
            counted = found[rank.pid]["communicators"]
            assert sorted(one["collectives"] for one in counted) == sorted(
                book.launched[rank.number].total() for book in books
            )
            compared += sum(one["behind"] == 0 for one in counted)
        assert compared == SIZE + 2  # of the world and the pair: a split has no name
        job.hold()
        job.launch("world", "AllReduce", 3)
        assert behind(machine, job) == [0, 0, 0, 0]
        job.launch("world", "AllReduce", 2, [0, 1, 3])
        assert behind(machine, job) == [0, 0, 2, 0]
        assert not job.ended()
    finally:
        machine.close()


def behind(machine: Machine, job: Job) -> list[Any]:
    """Return by how many collectives of the world each rank is behind."""
    found = machine.turn()
    return [
        one["behind"]
        for rank in job.ranks
        for one in found[rank.pid]["communicators"]
        if one["size"] == SIZE
    ]
