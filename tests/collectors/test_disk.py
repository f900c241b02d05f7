"""Requests of disks, on a fixture and on this machine."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dshealthd.collectors import disk
from dshealthd.core.result import CollectionOutcome
from tests.collectors.bench import Bench, copied, named, values


def test_more_disks_than_are_shown(tmp_path: Path) -> None:
    """The number of series is bounded, and what is left out is counted."""
    machine = copied("disk", tmp_path)
    statistics, blocks = machine / "proc/diskstats", machine / "sys/block"
    line = next(row for row in statistics.read_text().splitlines() if " nvme0n1 " in row)
    disks = {(f"nvme{number}n1",) for number in range(32)}
    for (name,) in disks - {("nvme0n1",)}:
        shutil.copytree(blocks / "nvme0n1", blocks / name, symlinks=True)
        with statistics.open("a") as rows:
            rows.write(line.replace("nvme0n1", name) + "\n")
    result = Bench("disk", machine).collect()
    assert set(values(result, disk.IN_FLIGHT)) == disks


def test_disks_that_change(tmp_path: Path) -> None:
    """A disk that is exchanged while the agent runs is named by its new model; one without a model,
    as of some virtual machines, is shown all the same.
    """
    machine = copied("disk", tmp_path)
    bench, statistics = Bench("disk", machine), machine / "proc/diskstats"
    nvme = ("nvme0n1", "SAMSUNG MZQL23T8HCLS-00A07", "0")
    text, sda = statistics.read_text(), machine / "sys/block/sda"
    assert set(values(bench.collect(), disk.INFO)) == {nvme, ("sda", "ST4000NM0035", "1")}
    statistics.write_text(
        "".join(line for line in text.splitlines(keepends=True) if "sda" not in line)
    )
    assert set(values(bench.collect(), disk.INFO)) == {nvme}
    (sda / "device/model").unlink()
    (sda / "queue/rotational").unlink()
    statistics.write_text(text)
    assert set(values(bench.collect(), disk.INFO)) == {nvme, ("sda", "", "")}


@pytest.mark.skipif(not Path("/proc/diskstats").exists(), reason="a kernel without block devices")
def test_this_machine() -> None:
    """The counts lie between what the kernel says before and after, read another way."""

    def reads() -> dict[str, int]:
        return {
            place.parent.name: int(place.read_text().split()[0])
            for place in Path("/sys/block").glob("*/stat")
        }

    before, result, after = reads(), Bench("disk").collect(), reads()
    assert result.outcome is CollectionOutcome.OK
    for (metric, *labels), count in named(result, "disk_").items():
        if metric == "requests_total" and labels[1] == "read":
            assert before[labels[0]] <= count <= after[labels[0]]
