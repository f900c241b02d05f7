"""Requests of disks, on made-up machines and on this one."""

from __future__ import annotations

from pathlib import Path

import pytest

from dshealthd.collectors import disk
from dshealthd.core.collector import Context, Reason
from dshealthd.core.host import Host
from dshealthd.core.result import CollectionOutcome, Result, attempt

STATISTICS = """\
   7       0 loop0 43 1 692 24 438 1007 3754 2429 0 2400 4705 0 0 0 0 292 2250
 259       0 nvme0n1 1000 5 8000 2500 400 9 16000 1600 3 3000 4100 0 0 0 0 0 0
 259       1 nvme0n1p1 900 5 7000 2000 400 9 16000 1600 0 3000 3600 0 0 0 0 0 0
   8       0 sda 10 0 80 90 0 0 0 0 0 90 90
 253       0 dm-0 10 0 80 90 0 0 0 0 0 90 90 0 0 0 0 0 0
  11       0 sr0 1 0 8 9 0 0 0 0 0 9 9
"""
"""As Linux 6.1 and, in the lines with eleven numbers, 4.14 write them."""


@pytest.fixture
def machine(tmp_path: Path) -> Host:
    """A machine with an NVMe drive, a rotating disk, an optical drive, and what is no disk."""
    host = Host(procfs=tmp_path / "proc", sysfs=tmp_path / "sys")
    host.procfs.mkdir()
    (host.procfs / "diskstats").write_text(STATISTICS)
    for name, model, rotational in (
        ("nvme0n1", "SAMSUNG MZQL23T8HCLS-00A07  \n", "0\n"),
        ("sda", "ST4000NM0035    \n", "1\n"),
        ("sr0", "DVD\n", "1\n"),
    ):
        place = host.sysfs / "block" / name
        (place / "device").mkdir(parents=True)
        (place / "queue").mkdir()
        (place / "device" / "model").write_text(model)
        (place / "queue" / "rotational").write_text(rotational)
    for name in ("loop0", "dm-0"):
        (host.sysfs / "block" / name / "queue").mkdir(parents=True)
    return host


def look(host: Host, max_disks: int = 32) -> Result:
    """Collect once."""
    context = Context(host=host)
    return attempt(disk.Disk(disk.DiskOptions(max_disks=max_disks), context))


def samples(result: Result) -> dict[tuple[str, ...], float]:
    """Return the values by the metric's name and labels."""
    return {
        (sample.metric.name.removeprefix("dshealthd_disk_"), *sample.labels): sample.value
        for sample in result.samples
    }


def test_disks(machine: Host) -> None:
    """Disks are shown in base units; partitions, what is made of disks, and media are not."""
    assert samples(look(machine)) == {
        ("dshealthd_disks_left_out",): 0,
        ("requests_total", "nvme0n1", "read"): 1000,
        ("request_seconds_total", "nvme0n1", "read"): 2.5,
        ("bytes_total", "nvme0n1", "read"): 8000 * 512,
        ("requests_total", "nvme0n1", "write"): 400,
        ("request_seconds_total", "nvme0n1", "write"): 1.6,
        ("bytes_total", "nvme0n1", "write"): 16000 * 512,
        ("requests_in_flight", "nvme0n1"): 3,
        ("info", "nvme0n1", "SAMSUNG MZQL23T8HCLS-00A07", "0"): 1,
        ("requests_total", "sda", "read"): 10,
        ("request_seconds_total", "sda", "read"): 0.09,
        ("bytes_total", "sda", "read"): 80 * 512,
        ("requests_total", "sda", "write"): 0,
        ("request_seconds_total", "sda", "write"): 0,
        ("bytes_total", "sda", "write"): 0,
        ("requests_in_flight", "sda"): 0,
        ("info", "sda", "ST4000NM0035", "1"): 1,
    }


def test_more_disks_than_are_shown(machine: Host) -> None:
    """The number of series is bounded, and what is left out is counted."""
    found = samples(look(machine, max_disks=1))
    assert found[("dshealthd_disks_left_out",)] == 1
    assert {labels[1] for labels in found if len(labels) > 1} == {"nvme0n1"}


def test_disk_that_says_nothing_of_itself(machine: Host) -> None:
    """A disk without model, as of some virtual machines, is shown all the same."""
    (machine.sysfs / "block/sda/device/model").unlink()
    (machine.sysfs / "block/sda/queue/rotational").unlink()
    assert samples(look(machine))["info", "sda", "", ""] == 1


def test_disk_that_comes_and_goes(machine: Host) -> None:
    """A disk that is exchanged while the agent runs is named by its new model."""
    context = Context(host=machine)
    collector = disk.Disk(disk.DiskOptions(), context)

    def models() -> set[str]:
        result = attempt(collector)
        return {key[2] for key in samples(result) if key[0] == "info"}

    assert "ST4000NM0035" in models()
    file = machine.procfs / "diskstats"
    file.write_text(
        "".join(line for line in STATISTICS.splitlines(keepends=True) if "sda" not in line)
    )
    assert models() == {"SAMSUNG MZQL23T8HCLS-00A07"}
    (machine.sysfs / "block/sda/device/model").write_text("HUS726T4TALA6L4\n")
    file.write_text(STATISTICS)
    assert "HUS726T4TALA6L4" in models()


def test_kernel_without_statistics(tmp_path: Path) -> None:
    """A kernel without disk statistics is an ordinary one."""
    host = Host(procfs=tmp_path, sysfs=tmp_path)
    assert look(host).outcome is CollectionOutcome.NOT_AVAILABLE


@pytest.mark.parametrize("text", ["8 0 sda 1\n", "8 0 sda 1 2 3 4 5 6 7 8 x\n", "\n"])
def test_malformed(machine: Host, text: str) -> None:
    """A file that cannot be understood is an error that names it, and no disk without requests."""
    (machine.procfs / "diskstats").write_text(text)
    result = look(machine)
    assert (result.outcome, result.reason) == (CollectionOutcome.ERROR, Reason.MALFORMED)
    assert "diskstats" in result.detail
    assert not result.samples


@pytest.mark.skipif(not Path("/proc/diskstats").exists(), reason="a kernel without block devices")
def test_this_machine() -> None:
    """The counts lie between what the kernel says before and after, read another way."""

    def reads() -> dict[str, int]:
        return {
            place.parent.name: int(place.read_text().split()[0])
            for place in Path("/sys/block").glob("*/stat")
        }

    before = reads()
    result = look(Host())
    after = reads()
    assert result.outcome is CollectionOutcome.OK
    shown = {
        key[1]: value
        for key, value in samples(result).items()
        if key[::2] == ("requests_total", "read")
    }
    assert dict.fromkeys(shown, True) == {
        name: before[name] <= value <= after[name] for name, value in shown.items()
    }
