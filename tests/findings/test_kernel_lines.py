"""What lines of the kernel's log lead to: the finding, its part and its severity."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dshealthd.collectors.gpu import INFO
from dshealthd.collectors.job_environment import RANKS
from dshealthd.collectors.kernel_log import EVENTS, KernelLog, KernelLogOptions
from dshealthd.core.collector import Context, Fault, Sample
from dshealthd.core.host import Host
from dshealthd.core.options import Duration
from dshealthd.findings.judgement import seen
from dshealthd.findings.limits import Limits
from dshealthd.findings.past import Past
from dshealthd.findings.series import Series
from tests import kernel_log

TABLE = Path(__file__).with_name("kernel_lines.txt")
NODE = (
    INFO(1.0, *({"gpu": "3", "pci": "0000:66:00.0"}.get(name, "") for name in INFO.dimensions)),
    RANKS(8.0, "llama", "run"),
)


def _cases() -> Iterator[Any]:
    head, lines = "", []
    for row in [*TABLE.read_text(encoding="utf-8").splitlines(), "-"]:
        if row.startswith("#"):
            continue
        if row.startswith("  "):
            lines.append(row[2:])
            continue
        if lines:
            what, _, times = re.sub(r" x(\d+)$", r"\n\1", head).partition("\n")
            yield pytest.param(what, lines, int(times or 1), id=f"{head}: {lines[0][:40]}")
        head, lines = row, []


class Log:
    """The kernel's log of a node, and the collector that reads it."""

    def __init__(self, base: Path) -> None:
        """Begin with an empty one."""
        self.end = kernel_log.KernelLog(base / "dev" / "kmsg")
        context = Context(
            host=Host(procfs=base, sysfs=base, dev=base / "dev", rootfs=base),
            monotonic=lambda: 0.0,
            wall=lambda: 0.0,
        )
        self._collector = KernelLog(KernelLogOptions(read_time=Duration(0.5)), context)

    def read(self) -> list[Sample]:
        """Return what the collector yields."""
        return [sample for sample in self._collector.collect() if not isinstance(sample, Fault)]

    def close(self) -> None:
        """Close both ends."""
        self._collector.close()
        self.end.close()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    """Give a kernel's log."""
    made = Log(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize(("expected", "lines", "times"), list(_cases()))
def test_finding_of_lines(expected: str, lines: list[str], times: int, log: Log) -> None:
    """A corrected error is none, a fault has its severity, and the part is what the lines name."""
    past = Past()
    list(seen(Series((*log.read(), *NODE), Limits(), past, 0.0), node="n", name="", wall=0.0).found)
    for _ in range(times):
        for line in lines:
            log.end.say(line)
        read = log.read()
    series = Series((*read, *NODE), Limits(), past, 10.0)
    judged = seen(series, node="n", name="", wall=10.0)
    assert judged.failed == {}
    found = [(each.name, each.part, str(each.severity)) for each in judged.found.values()]
    name, _, rest = expected.partition(" | ")
    if name == "-":
        assert found == []
        return
    part, severity, reason = rest.split(" | ")
    assert found == [(name, part, severity)]
    (finding,) = judged.found.values()
    assert reason in finding.detail
    assert finding.part in finding.detail


def test_devices_are_bounded(log: Log) -> None:
    """A storm of one event over more devices than are kept hides no device of another event."""
    for number in range(200):
        log.end.say(f"pcieport 0000:{number:02x}:00.0: AER: device recovery failed")
    log.end.say("nvme nvme0: Removing after probe failure status: -19")
    counts = {sample.labels: sample.value for sample in log.read() if sample.metric is EVENTS}
    recoveries = {key[1]: n for key, n in counts.items() if key[0] == "pcie_recovery_failed"}
    assert len(recoveries) == 34  # with the ones that name none, and the others
    assert sum(recoveries.values()) == 200
    assert recoveries["other"] == 168
    assert counts["nvme_failure", "nvme0"] == 1
