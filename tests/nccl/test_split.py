"""A rank that was stopped for longer than RAS waits goes on: the job is well and RAS is not."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.nccl.job import Job
from tests.nccl.node import Node

pytestmark = [pytest.mark.nccl, pytest.mark.timeout(600)]
STOP = 75.0
"""Seconds; RAS gives a process up after 60."""
SETTLED = 10.0
"""Seconds until both parts have given each other up. In the first of them one of three runs, on
2.28.9, had answers of both parts that proved no split.
"""
QUERIES = 40


@pytest.mark.parametrize("version", ["2.28.9", "2.30.7"])
def test_split(version: str, make_job: Callable[..., Job], tmp_path: Path) -> None:
    """Once either part has answered the state is split, and no rank is named any more."""
    job = make_job(version, 4)
    job.join()
    job.launch("world", "AllReduce", 5)
    node = Node(job, tmp_path)
    job.stop(3)
    time.sleep(STOP)
    job.resume(3)
    time.sleep(SETTLED)
    parts: set[bool] = set()
    states = []
    for _ in range(QUERIES):
        job.launch("world", "AllReduce", 1)
        result = node.sweep()
        states.append(node.state(result))
        parts.add(node.collector._jobs[job.name].responder == job.ranks[3].pid)
        if len(parts) == 2:
            assert states[-1] == "split"
            assert node.samples(result, "rank_trouble_info") == {}
    assert len(parts) == 2
    assert states.count("split") + states.count("answered") == QUERIES, states
    assert not job.ended()
