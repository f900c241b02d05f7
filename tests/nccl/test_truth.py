"""The comparison with the books of a job sees a wrong field of an answer, whichever it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from dshealthd.jobs.ras.status import Communicator, Lag, RasRankState, Status, Trouble
from tests.nccl.job import Job
from tests.nccl.node import Node
from tests.nccl.truth import differences, place

pytestmark = [pytest.mark.nccl, pytest.mark.timeout(600)]
VERSION = "2.30.7"


def test_each_field(make_job: Callable[..., Job], tmp_path: Path) -> None:
    """A right answer has no difference; with any one field changed it has."""
    job = make_job(VERSION, 4)
    job.join()
    job.launch("world", "AllReduce", 5)
    job.hold()
    job.launch("world", "AllReduce", 2, [0, 1, 3])
    job.kill(3)
    status = Node(job, tmp_path).status()
    assert list(differences(job, status, VERSION)) == []
    (world,) = status.communicators
    wrong: dict[str, Any] = {
        "size": 5,
        "states": {RasRankState.RUNNING: 4},
        "marks": {**world.marks, 0: 9},
        "behind": (Lag(1, "AllReduce", 2, place(job, 1)),),
        "troubles": (Trouble(2, "unresponsive", place(job, 2)),),
    }
    # A name is NCCL's own invention: only that it is unique can be said.
    assert wrong.keys() | {"name"} == {field.name for field in fields(Communicator)}
    answers: dict[str, Status] = {
        name: replace(status, communicators=(replace(world, **{name: value}),))
        for name, value in wrong.items()
    }
    answers["version"] = replace(status, version="2.30.6")
    answers["ranks"] = replace(status, ranks={place(job, 0): 1})
    answers["communicators"] = replace(status, communicators=())
    answers["name"] = replace(status, communicators=(world, world))
    for name, answer in answers.items():
        assert list(differences(job, answer, VERSION)), name
