"""`dshealthd explain` on the logs that genuine NCCL writes with NCCL_DEBUG=INFO."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from dshealthd.explain import command
from dshealthd.explain.finding import Finding
from tests.nccl import build
from tests.nccl.job import Job

pytestmark = [pytest.mark.nccl, pytest.mark.timeout(600)]

VERSIONS = ("2.27.7", "2.28.9", "2.30.7")
SIZE = 4
PATIENCE = 30.0
"""Seconds for the ranks to fail, beside other work."""


def explained(
    version: str,
    folder: Path,
    act: Callable[[Job], object],
    environment: Mapping[str, str] | None = None,
    wrap: tuple[Mapping[str, str], ...] = (),
) -> Finding:
    """Run a job, and return what its logs say. What it does may fail and may hang."""
    finished = threading.Event()
    settings = {"NCCL_DEBUG": "INFO", **(environment or {})}
    with Job(build.build(version), SIZE, folder, settings, wrap) as job:

        def run() -> None:
            with contextlib.suppress(AssertionError, BrokenPipeError):  # NCCL refused a call
                act(job)
            finished.set()

        threading.Thread(target=run, daemon=True).start()
        finished.wait(PATIENCE)
        time.sleep(1.0)  # the others end of it
    recognizer, _ = command.read([str(path) for path in sorted(folder.glob("nccl-*.log"))])
    return command.conclude(recognizer)


def end_well(job: Job) -> None:
    """Train, and destroy all communicators."""
    job.join()
    job.split("pair", [0, 0, 1, 1])
    job.launch("world", "AllReduce", 3)
    job.destroy_all()


def lose(job: Job) -> None:
    """Kill rank 3, and have the others make a communicator with it."""
    job.join()
    job.launch("world", "AllReduce", 3)
    job.kill(3)
    for rank in job.ranks[:3]:
        rank.say("split world late 0 0")
    for rank in job.ranks[:3]:
        assert rank.process.stdout is not None
        rank.process.stdout.readline()


@pytest.mark.parametrize("version", VERSIONS)
def test_well(version: str, tmp_path: Path) -> None:
    """A job that ends well has no failure, however much NCCL says."""
    finding = explained(version, tmp_path, end_well)
    assert finding.outcome == "nothing"
    assert list(tmp_path.glob("nccl-*.log"))


@pytest.mark.parametrize("version", VERSIONS)
def test_lost_peer(version: str, tmp_path: Path) -> None:
    """A rank that was killed is named, or no rank is; no GPU of another rank is given for it."""
    finding = explained(version, tmp_path, lose)
    assert (finding.outcome, finding.slug) == ("found", "nccl-remote-error")
    assert finding.ranks in {(3,), ()}
    assert finding.gpu in {3, None}
    assert finding.proof


@pytest.mark.parametrize("version", VERSIONS)
def test_no_interface(version: str, tmp_path: Path) -> None:
    """NCCL_SOCKET_IFNAME that names nothing is found."""
    finding = explained(version, tmp_path, Job.join, {"NCCL_SOCKET_IFNAME": "=nope0"})
    assert (finding.outcome, finding.slug) == ("found", "nccl-environment")
    assert finding.ranks == ()


@pytest.mark.parametrize("version", VERSIONS)
def test_one_gpu_twice(version: str, tmp_path: Path) -> None:
    """Two ranks on one GPU are both named."""
    finding = explained(version, tmp_path, Job.join, wrap=({}, {}, {}, {"LOCAL_RANK": "0"}))
    assert (finding.outcome, finding.slug) == ("found", "device-ordinal")
    assert set(finding.ranks) <= {0, 3}
