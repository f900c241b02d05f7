"""The limits of what is read of jobs' logs, with a case on either side of each."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from dshealthd.collectors.job_logs import SKIPPED
from dshealthd.explain.facts import Recognized
from tests.collectors.bench import value
from tests.collectors.test_job_logs import OOM, Node, states

MEBIBYTE = 1 << 20
CHATTER = "step 2 | loss 2.0 of so many\n"


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """A node whose watch reads as much as it likes, with a rank that has begun to write."""
    made = Node(tmp_path, standard_streams=True)
    made.rank(50, 1, "/logs/a.out")
    made.write("a.out", CHATTER)
    made.collector._watch._spent = lambda: 0.0
    made.sweep()
    return made


def filled(size: int) -> str:
    """Return chatter of so many bytes."""
    return (CHATTER * (size // len(CHATTER) + 1))[: size - 1] + "\n"


def recognized(node: Node) -> Recognized:
    """Return what was recognized in the logs of the job."""
    found: Recognized = node.collector._watch._jobs["slurm-12"].recognizer.found
    return found


@pytest.mark.parametrize(("more", "skipped"), [(0, 0), (1, 7 * MEBIBYTE + 1)])
def test_what_is_left_out_of_a_log_that_grows(node: Node, more: int, skipped: int) -> None:
    """Up to 8 MiB are read; of more only the last mebibyte."""
    node.write("a.out", filled(8 * MEBIBYTE + more))
    assert value(node.sweep(), SKIPPED) == skipped


@pytest.mark.parametrize(("size", "known"), [(MEBIBYTE - 1, True), (MEBIBYTE + 1, False)])
def test_a_log_that_was_there_before(node: Node, size: int, *, known: bool) -> None:
    """Its last mebibyte is read."""
    node.rank(51, 2, "/logs/b.out")
    node.write("b.out", OOM + filled(size - len(OOM) + 1)[1:])
    node.sweep(10.0)
    assert bool(recognized(node).events) is known
    assert node.collector._watch.skipped == 0


@pytest.mark.parametrize(("seconds", "found"), [(8.9, {"followed": 1}), (9.1, {"followed": 2})])
def test_when_files_are_searched(node: Node, seconds: float, found: dict[str, int]) -> None:
    """Each ten seconds; processes are looked at each five."""
    node.rank(51, 2, "/logs/b.out")
    node.write("b.out", CHATTER)
    node.sweep(1.0)
    assert states(node.sweep(seconds)) == found


@pytest.mark.parametrize(("before", "found"), [(59.0, "followed"), (61.0, "foreign")])
def test_a_log_written_before_its_job(tmp_path: Path, before: float, found: str) -> None:
    """Belongs to it if that was a minute ago at most: a launcher opens it."""
    node = Node(tmp_path, standard_streams=True)
    node.rank(50, 1, "/logs/a.out", start="100")
    written = node.write("a.out", CHATTER)
    now = time.time()
    node.context.wall = lambda: now
    begun = now - 10_000.0 + 1.0  # the machine is up for so long, the rank a second less
    os.utime(written, (begun - before, begun - before))
    assert states(node.sweep(0.0)) == {found: 1}


def test_so_many_failures_of_a_job_are_kept(node: Node) -> None:
    """Two thousand, however many ranks fail."""
    node.write("a.out", "".join(f"[rank{rank}]: {OOM}" for rank in range(2001)))
    node.sweep()
    assert (len(recognized(node).events), recognized(node).dropped) == (2000, 1)
