"""Host memory on a fixture, on this machine, and on files that make no sense."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil
import pytest

from dshealthd.collectors import memory
from dshealthd.core.collector import CollectorOptions, Context, Reason
from dshealthd.core.host import Host
from dshealthd.core.result import CollectionOutcome, Result, attempt

FIXTURE = Path(__file__).parent / "fixtures" / "memory"


def collected(procfs: Path) -> Result:
    """Collect once from a procfs."""
    context = Context(host=Host(procfs=procfs))
    return attempt(memory.HostMemory(CollectorOptions(), context))


def test_this_machine() -> None:
    """Total and available memory are what psutil says in the same moment, to within what changes
    between the two.
    """
    values = {sample.metric: sample.value for sample in collected(Path("/proc")).samples}
    theirs = psutil.virtual_memory()
    assert values[memory.TOTAL] == theirs.total
    assert values[memory.AVAILABLE] == pytest.approx(theirs.available, rel=0.05)
    assert values[memory.SWAP_TOTAL] == psutil.swap_memory().total


def test_missing_fields_are_left_out(tmp_path: Path) -> None:
    """A kernel without huge pages and without an OOM counter gives no zeros for them."""
    (tmp_path / "meminfo").write_text("MemTotal: 1024 kB\nMemAvailable: 512 kB\n", encoding="ascii")
    (tmp_path / "vmstat").write_text("nr_free_pages 7\n", encoding="ascii")
    result = collected(tmp_path)
    assert {sample.metric: sample.value for sample in result.samples} == {
        memory.TOTAL: 1048576,
        memory.AVAILABLE: 524288,
    }


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("meminfo", "MemTotal: lots kB\n"),
        ("meminfo", "MemTotal:\n"),
        ("meminfo", "MemTotal\n"),
        ("vmstat", "oom_kill\n"),
        ("vmstat", "nr_free_pages 7\noom_kill many\n"),
    ],
)
def test_malformed_files_are_named(tmp_path: Path, file: str, text: str) -> None:
    """A file that makes no sense is a fault `malformed` that names it, not a number."""
    shutil.copytree(FIXTURE / "proc", tmp_path / "proc")
    (tmp_path / "proc" / file).write_text(text, encoding="ascii")
    result = collected(tmp_path / "proc")
    (fault,) = result.faults
    assert (fault.part, fault.reason) == (file, Reason.MALFORMED)
    assert f"proc/{file}: " in fault.detail


@pytest.mark.parametrize("missing", ["meminfo", "vmstat"])
def test_one_file_is_missing(tmp_path: Path, missing: str) -> None:
    """What one of the files tells is there without the other, whose absence is a fault."""
    shutil.copytree(FIXTURE / "proc", tmp_path / "proc")
    (tmp_path / "proc" / missing).unlink()
    result = collected(tmp_path / "proc")
    assert result.outcome is CollectionOutcome.OK
    assert [(fault.part, fault.reason) for fault in result.faults] == [(missing, Reason.NOT_FOUND)]
    metrics = {sample.metric for sample in result.samples}
    assert (memory.TOTAL in metrics, memory.OOM_KILLS in metrics) == (
        missing != "meminfo",
        missing != "vmstat",
    )


def test_names_must_match_whole() -> None:
    """A counter that a later kernel may add is not taken for the one that its name begins with."""
    assert memory.parse_oom_kills("oom_kill_memcg 5\noom_kill 3\n") == 3
    assert memory.parse_oom_kills("oom_kill_memcg 5\n") is None
    assert memory.parse_meminfo("ShmemHugePages: 2 kB\nMemTotal: 1 kB\n") == {"MemTotal": 1024}


def test_no_procfs_is_an_error(tmp_path: Path) -> None:
    """A missing file is an error that names it."""
    result = collected(tmp_path)
    assert (result.outcome, result.reason) == (CollectionOutcome.ERROR, Reason.NOT_FOUND)
    assert "meminfo" in result.detail
