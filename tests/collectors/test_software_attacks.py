"""What a user can name to the collector of versions gains that user nothing."""

from __future__ import annotations

import itertools
import os
import resource
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dshealthd.core.result import CollectionOutcome, CollectionResult
from tests.agents import Scrape, running
from tests.collectors.bench import Bench, sleeper
from tests.jobs.machines import TORCH
from tests.stopwatch import Stopwatch

MAX_VERSIONS = 4

USER = 4321
SUCCESS = "dshealthd_collector_last_success_timestamp_seconds"
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="runs processes of another user")


@pytest.fixture
def prefix(public_path: Path) -> Path:
    """An environment of the user, with a Python and nothing else."""
    found = public_path / "env"
    (found / "lib/python3.11/site-packages/torch/lib").mkdir(parents=True)
    return found


def run(prefix: Path) -> tuple[CollectionResult, float]:
    """Return what is told of a user's job in the environment, and the seconds it took."""
    variables = {**TORCH, "VIRTUAL_ENV": str(prefix), "SLURM_JOB_ID": str(os.getpid())}
    with sleeper(USER, variables):
        watch = Stopwatch()
        return Bench("software").collect(), watch.seconds()


def told(result: CollectionResult) -> dict[str, list[str]]:
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
    own = f"job slurm-{os.getpid()}"  # jobs of other tests may be at fault, too
    assert [fault.part for fault in result.faults if fault.part == own] == [own]
    assert "6.6.6" not in str(result)
    assert seconds < 20
    place.unlink()
    place.write_text("__version__ = '2.3.0'\n")
    assert told(run(prefix)[0]) == {"torch": ["2.3.0"], "python": ["3.11"]}


@pytest.fixture
def crowded() -> Iterator[Path]:
    """30,000 distributions of a user's in memory: half as many again as are listed."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        os.chmod(name, 0o755)
        site = os.path.join(name, "lib/python3.11/site-packages")
        os.makedirs(site)
        for number in range(30_000):
            os.mkdir(f"{site}/torch-{number}.0.dist-info")
        os.chown(site, USER, USER)
        yield Path(site)


def test_a_crowd_does_not_stop_the_agent(crowded: Path, tmp_path: Path) -> None:
    """A crowd that keeps changing costs one bounded listing, and gives as many series as an honest
    upgrade: the worker stays the one that was started first, and all else that it reads is fresh.
    """
    others = ("network", "open_files", "filesystem")
    config = "".join(f'[collectors.{name}]\ninterval = "500ms"\n' for name in ("software", *others))
    job = f"slurm-{os.getpid()}"
    variables = {**TORCH, "VIRTUAL_ENV": str(crowded.parents[2]), "SLURM_JOB_ID": str(os.getpid())}
    number = itertools.count(30_000)

    def sound(scrape: Scrape) -> bool:
        """Change what is listed, and tell whether the agent knows the job."""
        os.mkdir(crowded / f"torch-{next(number)}.0.dist-info")
        assert scrape.value("dshealthd_worker_starts_total", worker="storage") in {None, 0, 1}
        for name in ("software", *others):
            # 0 until it has been read for the first time
            if scrape.value(SUCCESS, collector=name):
                assert scrape.value("dshealthd_collector_up", collector=name) == 1, name
        known = scrape.all("dshealthd_software_info", training_job=job)
        assert len(known) <= MAX_VERSIONS + 1  # and the interpreter
        return len(scrape.all("dshealthd_software_info", training_job=job, component="torch")) > 0

    def successes(scrape: Scrape) -> list[float]:
        """Return when each collector of the worker has last read its source."""
        return [scrape.value(SUCCESS, collector=name) or 0.0 for name in ("software", *others)]

    with running(tmp_path, config) as agent, sleeper(USER, variables):
        first = successes(agent.wait(lambda scrape: sound(scrape) and all(successes(scrape))))
        last = agent.wait(
            lambda scrape: (
                sound(scrape)
                and all(
                    now >= then + 10.0 for now, then in zip(successes(scrape), first, strict=True)
                )
            )
        )
        torch = last.all("dshealthd_software_info", training_job=job, component="torch")
        assert len(torch) == MAX_VERSIONS
        assert last.value("dshealthd_worker_starts_total", worker="storage") == 1
        assert last.all("dshealthd_worker_failures_total", worker="storage") == []


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
