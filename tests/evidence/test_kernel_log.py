"""What a bundle keeps of the kernel's log."""

from __future__ import annotations

import time
from pathlib import Path

from dshealthd.core.host import Host
from dshealthd.evidence import kernel_log
from tests.kernel_log import KernelLog


def test_the_lines_of_a_quarter_of_an_hour(tmp_path: Path) -> None:
    """Older ones are left out; what a process has written is marked."""
    log, now = KernelLog(tmp_path / "kmsg"), time.clock_gettime(time.CLOCK_MONOTONIC)
    log.say("too old", seconds=now - 901)
    log.say("just in", seconds=now - 870)
    log.say("NVRM: Xid", facility=3)
    log.say("last")
    kept: list[tuple[str, bytes]] = []
    kernel_log.collect(lambda *piece: kept.append(piece), Host(dev=tmp_path))
    log.close()
    assert {name for name, _ in kept} == {"kernel-log.txt"}
    lines = [line.decode().partition("] ")[2] for _, line in kept]
    assert lines == ["Linux version 6.1.0\n", "just in\n", "(facility 3) NVRM: Xid\n", "last\n"]
