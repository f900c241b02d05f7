"""What the tests on genuine NCCL share: each needs its release built, and a job that is ended."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.nccl import build
from tests.nccl.job import Job
from tests.nccl.pytorch import wheel


@pytest.fixture
def libraries() -> Callable[[str], Path]:
    """Return the folder of a release's libraries, built if need be."""
    return build.build


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Return what starts jobs, each of a release and a size; they end with the test."""
    jobs: list[Job] = []

    def make(version: str, size: int, **environment: str) -> Job:
        folder = tmp_path / f"job-{len(jobs)}"
        folder.mkdir()
        jobs.append(Job(build.build(version), size, folder, environment))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()


@pytest.fixture
def cuda_torch() -> wheel.Wheel:
    """Return PyTorch's CUDA wheel, ready to run; skip where nobody says where it is."""
    if not os.environ.get(wheel.FOLDER):
        pytest.skip(f"{wheel.FOLDER} names no folder with PyTorch's CUDA wheel")
    return wheel.prepare()
