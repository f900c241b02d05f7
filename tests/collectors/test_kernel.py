"""The kernel's state and settings, on a fixture and on this machine."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import psutil
import pytest

from dshealthd.collectors import kernel
from dshealthd.core.result import CollectionOutcome
from tests.collectors.bench import Bench, copied, value


def test_missing_settings(tmp_path: Path) -> None:
    """What a kernel does not have is left out, and the rest is there."""
    base = copied("kernel", tmp_path)
    shutil.rmtree(base / "proc/sys")
    shutil.rmtree(base / "sys")
    result = Bench("kernel", base).collect()
    assert (result.outcome, result.faults) == (CollectionOutcome.OK, ())
    names = {sample.metric for sample in result.samples}
    assert names == {kernel.UPTIME, kernel.LOAD, kernel.THREADS}


@pytest.mark.parametrize(("text", "count"), [("0\n", 1), ("0-1\n", 2), ("0-3,8,10-11\n", 7)])
def test_cpus(text: str, count: int) -> None:
    """A list of CPUs is counted."""
    assert kernel.parse_cpus(text) == count


def test_this_machine() -> None:
    """CPUs, threads and settings agree with what others read in the same moment."""
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    result = Bench("kernel").collect()
    after = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert result.outcome is CollectionOutcome.OK
    uptime, threads = value(result, kernel.UPTIME), value(result, kernel.THREADS)
    assert before - 0.01 <= (uptime or 0) <= after  # the kernel cuts it to hundredths
    assert value(result, kernel.CPUS) == psutil.cpu_count()
    swappiness = int(Path("/proc/sys/vm/swappiness").read_text())
    assert value(result, kernel.SYSCTL, "vm.swappiness") == swappiness
    assert 0 < (threads or 0) < (value(result, kernel.THREADS_LIMIT) or 0)
