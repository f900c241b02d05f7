"""One user's process ends no look: whatever stands in its files, the others' jobs are read."""

from __future__ import annotations

import ast
import functools
import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import dshealthd
from dshealthd.core.collector import Fault, NotAvailable, Reason, Sample, SourceError
from dshealthd.core.result import CollectionResult, one_of_many
from dshealthd.jobs import environment
from tests.collectors.bench import Bench, write
from tests.jobs.machines import Machine

COLLECTORS = Path(dshealthd.__file__).parent / "collectors"
READERS = sorted(
    file.stem
    for file in COLLECTORS.glob("*.py")
    if "ProcessTable"
    in {node.id for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Name)}
)
"""The collectors that read the processes of training jobs, found by what they use."""
OPTIONS: dict[str, dict[str, object]] = {"job_logs": {"standard_streams": True}}
"""What a collector needs to do anything."""
VICTIM, HOSTILE = 1002, 1001
RUN = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.9",
    "MASTER_PORT": "29500",
}
VALUES = (
    "\x1d1",  # a separator of another kind
    "\u0663",  # a digit of another script
    "9" * 4000,
    "1e999",
    "0\n1\r2",
    "",
    "[" * 3000,
    "/../\udc80",
)


def job(root: Path, pid: int, variables: dict[str, str]) -> Path:
    """Add a process of a job of its own, with the files that collectors read."""
    place = Machine.process(
        machine(root), pid, RUN | {"SLURM_JOB_ID": str(pid)} | variables, start=pid
    )
    write(
        place, {"io": "write_bytes: 5", "cgroup": "0::/", "net/dev": "Inter-|\n face |\n eth0: 0 0"}
    )
    write(place, {"maps": "", "comm": "python", "cmdline": "python", "loginuid": str(pid)})
    return place


@functools.cache
def machine(root: Path) -> Machine:
    """Return the machine in a directory."""
    return Machine(root / "proc")


def collected(name: str, root: Path) -> CollectionResult:
    """Return the second collection, in which rates are known too."""
    bench = Bench(name, root, **OPTIONS.get(name, {}))  # type: ignore[arg-type] # options by name
    bench.collect()
    return bench.collect(20.0)


def of_victim(result: CollectionResult) -> set[tuple[str, ...]]:
    """Return the series of the other user's job."""
    return {
        (sample.metric.name, *sample.labels)
        for sample in result.samples
        if f"slurm-{VICTIM}" in sample.labels
    }


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A machine with one job."""
    write(tmp_path / "proc", {"net/tcp": "heading", "net/tcp6": "heading", "self/cgroup": "0::/"})
    job(tmp_path, VICTIM, {})
    return tmp_path


GROUPS = (("CUDA_VISIBLE_DEVICES",), tuple(environment.ALLOWED - RUN.keys() - {"SLURM_JOB_ID"}))


@pytest.mark.parametrize("name", READERS)
def test_values_of_an_environment(name: str, node: Path) -> None:
    """No value of any variable that is kept costs another job's series, or fails the collector."""
    alone = collected(name, node)
    for value, group in itertools.product(VALUES, GROUPS):
        job(node, HOSTILE, dict.fromkeys(group, value))
        both = collected(name, node)
        assert both.outcome is alone.outcome, both.detail
        assert both.reason is not Reason.INTERNAL, both.detail
        assert of_victim(both) >= of_victim(alone)
        assert Reason.INTERNAL not in {fault.reason for fault in both.faults}, both.faults


CONTENTS = (
    b"\xff\x1d\x85\0\r" * 50,
    b"write_bytes: " + b"9" * 5000 + b"\n" + b"9" * 400 + b" 1e999\n",
    b"",
    b"[" * 5000,
)


@pytest.mark.parametrize("name", READERS)
def test_files_of_a_process(name: str, node: Path) -> None:
    """No content of the files of a process costs another job's series, or fails the collector."""
    alone = collected(name, node)
    for content in CONTENTS:
        place = job(node, HOSTILE, {})
        for file in [*place.rglob("*")]:
            if file.is_file() and file.name not in {"environ", "stat"}:
                file.write_bytes(content)
        both = collected(name, node)
        assert (both.outcome, both.reason) == (alone.outcome, alone.reason), both.detail
        assert of_victim(both) >= of_victim(alone)
        assert Reason.INTERNAL not in {fault.reason for fault in both.faults}, both.faults
        shutil.rmtree(place)


@pytest.mark.parametrize(("error", "reason"), [
    (ValueError("no"), Reason.MALFORMED),
    (OverflowError("no"), Reason.MALFORMED),
    (PermissionError(13, "no"), Reason.PERMISSION_DENIED),
    (SourceError(Reason.TIMEOUT, "no"), Reason.TIMEOUT),
    (IndexError("no"), Reason.INTERNAL),
    (RecursionError("no"), Reason.INTERNAL),
])  # fmt: skip
def test_a_failure_costs_one(error: Exception, reason: Reason) -> None:
    """What was read before it is kept, and the failure has the part's name."""
    read = failing(error)
    (fault,) = one_of_many("job a", read)
    assert isinstance(fault, Fault)
    assert fault[:2] == ("job a", reason)


@pytest.mark.parametrize(
    "error",
    [NotAvailable("no"), MemoryError(), SourceError(Reason.CRASHED, "no", replace_worker=True)],
)
def test_what_is_not_about_one_ends_the_collection(error: Exception) -> None:
    """No source, no memory and a worker to replace are not one job's."""
    with pytest.raises(type(error)):
        list(one_of_many("job a", failing(error)))


def failing(error: Exception) -> Callable[[], Iterator[Sample | Fault]]:
    """Return a reader that fails."""

    def read() -> Iterator[Sample | Fault]:
        raise error
        yield  # type: ignore[unreachable] # a generator, as readers are

    return read


def test_the_victim_has_series(node: Path) -> None:
    """The collectors above could lose something: these have series of the job."""
    having = {name for name in READERS if of_victim(collected(name, node))}
    assert having >= {"job_environment", "job_activity", "nccl_ras", "open_files"}
