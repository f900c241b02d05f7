"""What a bundle keeps of the kernel's log."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from dshealthd.config import config
from dshealthd.core.host import Host
from dshealthd.evidence import kernel_log
from dshealthd.evidence.service import log_sources
from dshealthd.linux.forked import Missing
from dshealthd.linux.kmsg import KernelLogRecord, kernel_clock
from tests.journald import journald, reason_against
from tests.kernel_log import KernelLog


def kept(host: Host, *, journal: bool = False) -> list[str]:
    """Return the lines that a bundle keeps of a host's kernel log, without their times."""
    pieces: list[tuple[str, bytes]] = []
    kernel_log.collect(lambda *piece: pieces.append(piece), host, journal=journal)
    assert {name for name, _ in pieces} == {"kernel-log.txt"}
    return [line.decode().partition("] ")[2] for _, line in pieces]


def test_the_lines_of_a_quarter_of_an_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older ones are left out, by the kernel's clock: no adjustment of the time by NTP, which adds
    up over months, makes a new line old. What a process has written is marked.
    """
    clocks = {time.CLOCK_MONOTONIC: 8_001_000.0, time.CLOCK_MONOTONIC_RAW: 8_000_000.0}
    monkeypatch.setattr(time, "clock_gettime", clocks.__getitem__)
    log = KernelLog(tmp_path / "kmsg")
    log.say("too old", seconds=7_999_099.9)
    log.say("just in", seconds=7_999_100.0)
    log.say("NVRM: Xid", facility=3)
    log.say("last")
    assert kept(Host(dev=tmp_path)) == [
        *("Linux version 6.1.0\n", "just in\n", "(facility 3) NVRM: Xid\n", "last\n"),
    ]
    log.close()


def test_so_many_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last two thousand, of as many as the log has, for 20 s at most."""
    now, asked = kernel_clock(), []
    lines = [
        KernelLogRecord(0, number, now, whole=True, message=f"{number}") for number in range(2001)
    ]

    def read(*bounds: float) -> list[KernelLogRecord]:
        asked.append(bounds)
        return lines

    reader = SimpleNamespace(read=read, drained=True, close=lambda: None)
    monkeypatch.setattr(kernel_log, "kernel_log_reader", lambda *_, **__: reader)
    assert kept(Host()) == [f"{number}\n" for number in range(1, 2001)]
    assert asked == [(200_000, 20.0)]


@pytest.mark.skipif(bool(reason_against()), reason=reason_against())
def test_lines_of_the_journal_where_the_collector_reads_it(tmp_path: Path) -> None:
    """A container that is not privileged has no kernel log but the journal's."""
    place = tmp_path / "dshealthd.toml"
    place.write_text("[collectors.kernel_log]\njournal = true\n")
    journal = log_sources(config.load(place)).journal
    with journald(tmp_path) as daemon:
        daemon.say("NVRM: Xid", "last")
        assert kept(Host(rootfs=daemon.root), journal=journal)[-2:] == ["NVRM: Xid\n", "last\n"]


def test_a_journal_that_is_absent_is_told(tmp_path: Path) -> None:
    """The bundle says why it has no kernel log."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/machine-id").write_text("0123456789abcdef0123456789abcdef\n")
    with pytest.raises(Missing, match="there is no journal in"):
        kept(Host(rootfs=tmp_path), journal=True)


def test_a_log_that_is_not_read_to_its_end_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its newest lines, which matter most, are not silently absent."""
    monkeypatch.setattr(kernel_log, "MAX_RECORDS", 2)
    log = KernelLog(tmp_path / "kmsg")
    log.say("one")
    log.say("two")
    with pytest.raises(Missing, match="the newest lines are missing"):
        kept(Host(dev=tmp_path))
    log.close()
