"""What a user can name to the collector of versions gains that user nothing."""

from __future__ import annotations

import os
import resource
import struct
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from dshealthd.collectors.software import Software
from dshealthd.core.collector import Context
from dshealthd.core.host import Host
from dshealthd.core.result import CollectionOutcome, Result, attempt
from dshealthd.jobs.installation import MAX_VERSIONS
from tests.jobs.machines import TORCH
from tests.stopwatch import Stopwatch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

USER = 4321
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="runs processes of another user")


@pytest.fixture
def prefix(public_path: Path) -> Path:
    """An environment of the user, with a Python and nothing else."""
    found = public_path / "env"
    (found / "lib/python3.11/site-packages/torch/lib").mkdir(parents=True)
    return found


def run(prefix: Path) -> tuple[Result, float]:
    """Return what is told of a job of the user in the environment, and the seconds it took, less other work."""
    context = Context(host=Host(), monotonic=time.monotonic, wall=time.time)
    variables = {**TORCH, "VIRTUAL_ENV": str(prefix), "SLURM_JOB_ID": str(os.getpid())}
    command = ["/bin/sleep", "600"]
    with subprocess.Popen(command, env=variables, user=USER, group=USER, extra_groups=[]) as child:
        watch = Stopwatch()
        result = attempt(Software(Software.Options(), context), time.monotonic)
        seconds = watch.seconds()
        child.kill()
    return result, seconds


def told(result: Result) -> dict[str, list[str]]:
    """Return the versions of the user's job by component."""
    found: dict[str, list[str]] = {}
    for metric, labels, _ in result.samples:
        if metric.name == "dshealthd_software_info" and labels[3] == f"slurm-{os.getpid()}":
            found.setdefault(labels[0], []).append(labels[1])
    return found


def secret(place: Path) -> None:
    """Put a link to a file that only root can read."""
    hidden = place.parents[5] / "hidden.py"
    hidden.write_text("__version__ = '6.6.6'\n")
    hidden.chmod(0o600)
    place.symlink_to(hidden)


def fifo(place: Path) -> None:
    """Put a FIFO that only root can open."""
    os.mkfifo(place, 0o600)


def device(place: Path) -> None:
    """Put a link to a device that never ends."""
    place.symlink_to("/dev/zero")


@pytest.mark.parametrize("put", [secret, fifo, device])
def test_nothing_is_read_through_an_environment(prefix: Path, put: Callable[[Path], None]) -> None:
    """Neither a root-only file nor a FIFO nor a device gives a version, or is waited for."""
    place = prefix / "lib/python3.11/site-packages/torch/version.py"
    put(place)
    result, seconds = run(prefix)
    assert result.outcome is CollectionOutcome.OK
    assert told(result) == {}
    assert [fault.part for fault in result.faults] == [f"job slurm-{os.getpid()}"]
    assert "6.6.6" not in str(result)
    assert seconds < 20
    place.unlink()
    place.write_text("__version__ = '2.3.0'\n")
    assert told(run(prefix)[0]) == {"torch": ["2.3.0"], "python": ["3.11"]}


def test_a_crowd_of_distributions(prefix: Path) -> None:
    """66,000 names of them cost one bounded listing, and give as many series as an honest upgrade."""
    site = prefix / "lib/python3.11/site-packages"
    for number in range(66_000):
        # what it leads to does not matter; directories take a minute to remove
        (site / f"torch-{number}.0.dist-info").symlink_to("nowhere")
    result, seconds = run(prefix)
    assert len(told(result)["torch"]) == MAX_VERSIONS
    assert seconds < 20


def test_versions_are_versions(prefix: Path) -> None:
    """Free text in the place of a version is no label."""
    place = prefix / "lib/python3.11/site-packages/torch/version.py"
    place.write_text("__version__ = 'call +1 555 now'\ncuda = '" + "9" * 60_000 + "'\n")
    assert told(run(prefix)[0]) == {"python": ["3.11"]}


def test_a_library_of_holes(prefix: Path) -> None:
    """An ELF file of a TiB, whose table of sections has all sizes at their maximum, is left."""
    site = prefix / "lib/python3.11/site-packages"
    (site / "torch/version.py").write_text("__version__ = '2.3.0'\ncuda = '12.1'\n")
    header = b"\x7fELF\x02\x01\x01".ljust(40, b"\0") + struct.pack("<Q", 64) + b"\0" * 10
    with (site / "torch/lib/libnccl.so.2").open("wb") as file:
        file.write(header + struct.pack("<3H", 0xFFFF, 0xFFFF, 0xFFFE))
        file.truncate(1 << 40)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = told(run(prefix)[0])
    assert (found["torch"], found["cuda"], "nccl" in found) == (["2.3.0"], ["12.1"], False)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10
