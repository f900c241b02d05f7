"""Pressure stall information, on a fixture and on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from dshealthd.collectors import pressure
from dshealthd.core.collector import Context, Reason
from dshealthd.core.host import Host
from dshealthd.core.result import CollectionOutcome, Result, attempt

FIXTURE = Path(__file__).parent / "fixtures" / "pressure"


def collect(procfs: Path) -> Result:
    """Collect once from a procfs."""
    context = Context(host=Host(procfs=procfs))
    return attempt(pressure.Pressure(pressure.Pressure.Options(), context))


def test_kernel_without_psi(tmp_path: Path) -> None:
    """A kernel without PSI is an ordinary one."""
    assert collect(tmp_path).outcome is CollectionOutcome.NOT_AVAILABLE


@pytest.mark.parametrize(
    "text", ["some\n", "some avg10=0.00 total=x\n", "some avg10=0.00\n", "some avg10 total\n"]
)
def test_malformed(tmp_path: Path, text: str) -> None:
    """A file that cannot be understood is an error, and no pressure of 0."""
    (tmp_path / "pressure").mkdir()
    (tmp_path / "pressure" / "cpu").write_text(text)
    result = collect(tmp_path)
    assert (result.outcome, result.reason) == (CollectionOutcome.ERROR, Reason.MALFORMED)
    assert not result.samples


@pytest.mark.skipif(not Path("/proc/pressure/cpu").exists(), reason="a kernel without PSI")
def test_this_machine() -> None:
    """The values lie between what the kernel says before and after."""

    def total() -> int:
        return int(Path("/proc/pressure/cpu").read_text().split("total=")[1].split()[0])

    before = total()
    result = collect(Path("/proc"))
    after = total()
    (value,) = (
        sample.value
        for sample in result.samples
        if sample.metric is pressure.STALLED and sample.labels == ("cpu", "some")
    )
    assert before <= round(value * 1e6) <= after
