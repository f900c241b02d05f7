"""What training jobs write, from the counters of their processes."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from dshealthd.collectors.job_writes import WRITES, parse_io
from dshealthd.core.collector import Reason
from tests.collectors.bench import Bench, Values, reasons, values
from tests.jobs.machines import TORCH, Machine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

IO = "rchar: 5\nwchar: 7\nread_bytes: 9\nwrite_bytes: {}\ncancelled_write_bytes: 4\n"


class Scene(Bench):
    """A rank and its data loader, of one job, and the collector."""

    def __init__(self, path: Path) -> None:
        super().__init__("job_writes", path)
        self.machine = Machine(path / "proc")
        for pid in (10, 11):
            self.machine.process(pid, {**TORCH, "SLURM_JOB_ID": "7"})
            self.writes(pid, 1000)

    def writes(self, pid: int, count: int) -> None:
        """Have a process have written so many bytes."""
        (self.machine.root / str(pid) / "io").write_text(IO.format(count))

    def look(self) -> tuple[Values, dict[str, Reason]]:
        """Return the rate of each job, ten seconds later, and the faults."""
        result = self.collect(10.0)
        return values(result, WRITES), reasons(result)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """A job whose processes have been looked at once."""
    made = Scene(tmp_path)
    assert made.look() == ({}, {})
    return made


def test_a_job_that_writes(scene: Scene) -> None:
    """All its processes count, since the look before."""
    scene.writes(10, 1000 + 2 * 10**7)
    scene.writes(11, 1500)
    rates, faults = scene.look()
    assert (rates, faults) == ({("slurm-7",): 2e6 + 50}, {})
    assert scene.look() == ({("slurm-7",): 0.0}, {})


def test_a_process_that_cannot_be_read_is_no_zero(scene: Scene) -> None:
    """It is a fault; its job's other processes count, and without any nothing is told of the job."""
    first, other = (scene.machine.root / str(pid) / "io" for pid in (10, 11))
    first.write_text("")
    scene.writes(11, 1500)
    assert scene.look() == ({("slurm-7",): 50.0}, {"process 10": Reason.MALFORMED})
    for place in (first, other):
        place.unlink()
        place.mkdir()
    assert scene.look() == ({}, dict.fromkeys(("process 10", "process 11"), Reason.IO_ERROR))
    for place in (first, other):
        place.rmdir()
    assert scene.look() == ({}, {})  # they have ended


def test_what_the_kernel_does_not_tell() -> None:
    """A kernel without these counters is an error, not a job that writes nothing."""
    with pytest.raises(ValueError, match="no write_bytes"):
        parse_io(b"rchar: 5\n")


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that writes eight megabytes as its input ends, and waits."""
    program = (
        "import os, sys, time; sys.stdin.read(); f = open(sys.argv[1], 'wb');"
        "f.write(bytes(8 << 20)); f.flush(); os.fsync(f.fileno()); print(flush=True); time.sleep(99)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "checkpoint")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        yield process
        process.kill()


def test_this_kernel_counts_a_save(writer: subprocess.Popen[bytes]) -> None:
    """What a genuine process saves to a file is in its counter."""
    with open(f"/proc/{writer.pid}/io", "rb") as file:
        before = parse_io(file.read())
    assert writer.stdin is not None
    assert writer.stdout is not None
    writer.stdin.close()
    writer.stdout.readline()
    with open(f"/proc/{writer.pid}/io", "rb") as file:
        assert parse_io(file.read()) - before >= 8 << 20
