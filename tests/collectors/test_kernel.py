"""The kernel's state and settings, on a fixture and on this machine."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshealthd.collectors import kernel
from dshealthd.core.collector import Context, Metric, Reason
from dshealthd.core.host import Host
from dshealthd.core.result import CollectionOutcome, Result, attempt

FIXTURE = Path(__file__).parent / "fixtures" / "kernel"


def collector(base: Path) -> kernel.Kernel:
    """Return a collector that reads `proc` and `sys` of a directory."""
    context = Context(host=Host(procfs=base / "proc", sysfs=base / "sys"))
    return kernel.Kernel(kernel.Kernel.Options(), context)


def collect(base: Path) -> Result:
    """Collect once."""
    return attempt(collector(base))


def value(result: Result, metric: Metric, *labels: str) -> float:
    """Return the one value of a series."""
    (found,) = (
        sample.value
        for sample in result.samples
        if sample.metric is metric and sample.labels == labels
    )
    return found


def test_missing_settings(tmp_path: Path) -> None:
    """What a kernel does not have is left out, and the rest is there."""
    shutil.copytree(FIXTURE, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "proc" / "sys")
    shutil.rmtree(tmp_path / "sys")
    result = collect(tmp_path)
    assert result.outcome is CollectionOutcome.OK
    names = {sample.metric for sample in result.samples}
    assert names == {kernel.UPTIME, kernel.LOAD, kernel.THREADS, kernel.PARAMETER}


@pytest.mark.parametrize("path", ["loadavg", "uptime", "sys/vm/swappiness"])
@pytest.mark.parametrize("text", ["", "x", "1 2 x y z"])
def test_malformed(tmp_path: Path, path: str, text: str) -> None:
    """A file that cannot be understood is a fault of its own; the others are read."""
    shutil.copytree(FIXTURE, tmp_path, dirs_exist_ok=True)
    (tmp_path / "proc" / path).write_text(text)
    if path == "uptime" and text.startswith("1"):
        return
    result = collect(tmp_path)
    assert result.outcome is CollectionOutcome.OK
    assert [(fault.part, fault.reason) for fault in result.faults] == [(path, Reason.MALFORMED)]
    assert value(result, kernel.SYSCTL, "vm.max_map_count") > 0


@pytest.mark.parametrize(
    ("missing", "metric"),
    [("uptime", kernel.UPTIME), ("loadavg", kernel.THREADS), ("cmdline", kernel.PARAMETER)],
)
def test_one_file_is_missing(tmp_path: Path, missing: str, metric: Metric) -> None:
    """A missing file costs what it alone tells, and is a fault."""
    whole = {sample.metric for sample in collect(FIXTURE).samples}
    shutil.copytree(FIXTURE, tmp_path, dirs_exist_ok=True)
    (tmp_path / "proc" / missing).unlink()
    result = collect(tmp_path)
    assert [(fault.part, fault.reason) for fault in result.faults] == [(missing, Reason.NOT_FOUND)]
    lost = {metric, kernel.LOAD} if missing == "loadavg" else {metric}
    assert {sample.metric for sample in result.samples} == whole - lost


def test_nothing_can_be_read(tmp_path: Path) -> None:
    """Without any of its files the collector is down."""
    result = collect(tmp_path)
    assert (result.outcome, result.reason) == (CollectionOutcome.ERROR, Reason.NOT_FOUND)


def test_settings_are_read_once_a_minute(tmp_path: Path) -> None:
    """Settings are kept between reads; what moves is read each time."""
    shutil.copytree(FIXTURE, tmp_path, dirs_exist_ok=True)
    clock = [0.0]
    context = Context(
        host=Host(procfs=tmp_path / "proc", sysfs=tmp_path / "sys"),
        monotonic=lambda: clock[0],
    )
    subject = kernel.Kernel(kernel.Kernel.Options(), context)
    attempt(subject)
    (tmp_path / "proc/sys/vm/swappiness").write_text("1\n")
    (tmp_path / "proc/loadavg").write_text("1.00 1.00 1.00 1/7 1\n")
    result = attempt(subject)
    assert value(result, kernel.SYSCTL, "vm.swappiness") == 60
    assert value(result, kernel.THREADS) == 7
    clock[0] += 60.0
    assert value(attempt(subject), kernel.SYSCTL, "vm.swappiness") == 1


@given(st.text(max_size=200))
def test_any_command_line(text: str) -> None:
    """Whatever the command line holds, the labels are bounded: known names, short plain values."""
    for name, content in kernel.parse_command_line(text).items():
        assert name in kernel.PARAMETERS
        assert len(content) <= 64


@pytest.mark.parametrize(("text", "count"), [("0\n", 1), ("0-1\n", 2), ("0-3,8,10-11\n", 7)])
def test_cpus(text: str, count: int) -> None:
    """A list of CPUs is counted."""
    assert kernel.parse_cpus(text) == count


def test_this_machine() -> None:
    """CPUs, threads and settings agree with what others read in the same moment."""
    result = collect(Path("/"))
    assert result.outcome is CollectionOutcome.OK
    assert abs(value(result, kernel.UPTIME) - time.clock_gettime(time.CLOCK_BOOTTIME)) < 5
    assert value(result, kernel.CPUS) == psutil.cpu_count()
    assert value(result, kernel.SYSCTL, "vm.swappiness") == int(
        Path("/proc/sys/vm/swappiness").read_text()
    )
    assert 0 < value(result, kernel.THREADS) < value(result, kernel.THREADS_LIMIT)
