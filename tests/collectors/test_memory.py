"""Host memory on this machine, and of a kernel that has only some of its files and fields."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from dshealthd.collectors import memory
from tests.collectors.bench import Bench, value, write


def test_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Total and available memory are what psutil says of the same moment."""
    (tmp_path / "proc").mkdir()
    for name in ("meminfo", "vmstat"):
        (tmp_path / "proc" / name).write_bytes(Path("/proc", name).read_bytes())
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path / "proc"))
    result, theirs = Bench("memory", tmp_path).collect(), psutil.virtual_memory()
    assert value(result, memory.TOTAL) == theirs.total
    assert value(result, memory.AVAILABLE) == theirs.available
    assert value(result, memory.SWAP_TOTAL) == psutil.swap_memory().total


def test_missing_fields_are_left_out(tmp_path: Path) -> None:
    """A kernel without huge pages and without an OOM counter gives no zeros for them."""
    meminfo = "MemTotal: 1024 kB\nMemAvailable: 512 kB"
    write(tmp_path, {"proc/meminfo": meminfo, "proc/vmstat": "nr_free_pages 7"})
    result = Bench("memory", tmp_path).collect()
    assert {sample.metric: sample.value for sample in result.samples} == {
        memory.TOTAL: 1048576,
        memory.AVAILABLE: 524288,
    }


@pytest.mark.parametrize(
    ("rows", "available"),
    [
        ("c_min 4 64\nc_max 4 4000\nsize 4 900\nuncompressed_size 4 1\n", 512 * 1024 + 900 - 64),
        ("c_min 4 64\nsize 4 64\n", 512 * 1024),
        ("c_min 4 64\nsize 4 8\n", 512 * 1024),
        ("a later format\n", 512 * 1024),
    ],
)
def test_zfs(tmp_path: Path, rows: str, available: int) -> None:
    """The cache of ZFS is available but for its least size, though the kernel counts it as used."""
    meminfo = "MemTotal: 1024 kB\nMemAvailable: 512 kB"
    arcstats = f"13 1 0x01 147 39984 6053 12\nname type data\nhits 4 7\n{rows}"
    write(tmp_path, {"proc/meminfo": meminfo, "proc/spl/kstat/zfs/arcstats": arcstats})
    assert value(Bench("memory", tmp_path).collect(), memory.AVAILABLE) == available


def test_names_must_match_whole() -> None:
    """A counter that a later kernel may add is not taken for the one that its name begins with."""
    assert memory.parse_oom_kills("oom_kill_memcg 5\noom_kill 3\n") == 3
    assert memory.parse_oom_kills("oom_kill_memcg 5\n") is None
    assert memory.parse_meminfo("ShmemHugePages: 2 kB\nMemTotal: 1 kB\n") == {"MemTotal": 1024}
