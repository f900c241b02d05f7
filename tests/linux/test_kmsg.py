"""The kernel log's records, on a scripted `read(2)`, and on the real device."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from dshealthd.core.collector import Reason, SourceError
from dshealthd.linux.kmsg import KERNEL, KernelLogReader, KernelLogRecord, parse
from tests.jobs.machines import Clock


class Script:
    """A `read(2)` that gives records and raises errors as listed, then EAGAIN for ever."""

    def __init__(self, *steps: bytes | int) -> None:
        self.steps = list(steps)
        self.calls = 0

    def __call__(self, _descriptor: int, _size: int) -> bytes:
        """Do the next step."""
        self.calls += 1
        if not self.steps:
            raise BlockingIOError(errno.EAGAIN, "nothing new")
        step = self.steps.pop(0)
        if isinstance(step, int):
            raise OSError(step, os.strerror(step))
        return step


def line(sequence: int, message: str = "usb 1-1: new device", facility: int = KERNEL) -> bytes:
    """Return a record as the kernel writes it."""
    return (
        f"{facility << 3 | 6},{sequence},{sequence * 1000},-;{message}\n SUBSYSTEM=usb\n".encode()
    )


def reader(*steps: bytes | int, position: int = 0, clock: Clock | None = None) -> KernelLogReader:
    """Return a reader of scripted steps."""
    return KernelLogReader("/dev/null", clock or Clock(), position, Script(*steps))


def numbers(records: Iterable[KernelLogRecord]) -> list[int]:
    """Return the sequence numbers."""
    return [record.sequence for record in records]


@pytest.mark.parametrize(("raw", "record"), [
    (b"6,339,5140900,-;NET: Registered\n", (0, 339, 5.1409, True, "NET: Registered")),
    (
        b"4,340,5690716,-,caller=T17;udevd[80]: x\n SUBSYSTEM=acpi\n DEVICE=+acpi:P:00\n",
        (0, 340, 5.690716, True, "udevd[80]: x"),
    ),
    (b"12,341,6000000,-;written by a user\n", (1, 341, 6.0, True, "written by a user")),
    (b"30,342,6000001,-;systemd[1]: a;b,c\n", (3, 342, 6.000001, True, "systemd[1]: a;b,c")),
    (b"6,343,6000002,c;, a fragment\n", (0, 343, 6.000002, False, ", a fragment")),
    ((b"6,344,6000003,+;and one of older "
      b"kernels\n"), (0, 344, 6.000003, False, "and one of older kernels")),
    (b"6,345,6000004,-;\n", (0, 345, 6.000004, True, "")),
])  # fmt: skip
def test_record(raw: bytes, record: tuple[object, ...]) -> None:
    """Facility, number, time, wholeness and message are told."""
    assert parse(raw) == record


@pytest.mark.parametrize("raw", [
    b"", b"no record", b"6,1,2;three fields\n", b"6,x,2,-;no number\n", b"6,-1,2,-;negative\n",
    b"6,1,2,-",
])  # fmt: skip
def test_malformed_record(raw: bytes) -> None:
    """What is no record is refused with a ValueError."""
    with pytest.raises(ValueError, match=r"."):
        parse(raw)


def test_reads_until_empty() -> None:
    """Records come in order, the end is known, and the next read goes on from there."""
    log = reader(line(0), line(1))
    assert numbers(log.read(100, 1.0)) == [0, 1]
    assert log.drained
    assert (log.position, log.lost) == (2, 0)
    assert numbers(log.read(100, 1.0)) == []


def test_malformed_is_counted() -> None:
    """A record that makes no sense is counted and passed over; its number is a lost one."""
    log = reader(line(0), b"nonsense", line(2))
    assert numbers(log.read(100, 1.0)) == [0, 2]
    assert log.lost == 1


def test_bounded_in_records_and_time() -> None:
    """One read takes no more records than asked for, and ends when its time is up."""
    log = reader(*(line(number) for number in range(1000)))
    assert numbers(log.read(10, 1.0)) == list(range(10))
    assert len(numbers(log.read(1000, 0.0))) < 100
    assert not log.drained
    assert numbers(log.read(1000, 1.0))[-1] == 999
    assert log.lost == 0


@pytest.mark.parametrize("end", [b"", errno.ENODEV, errno.EIO])
def test_closing_again_and_again(end: bytes | int) -> None:
    """FAULT 18: a log that closes at every read is opened ever less often."""
    clock = Clock()
    script = Script()
    log = KernelLogReader("/dev/null", clock, read=script)
    reasons = []
    for _ in range(600):
        script.steps = [end]
        try:
            list(log.read(100, 1.0))
        except SourceError as error:
            reasons.append(error.reason)
        except OSError:
            pass
        clock.now += 1.0
    assert set(reasons) == {Reason.NOT_FOUND if end == errno.ENODEV else Reason.IO_ERROR}
    assert script.calls == 600 - len(reasons)
    assert script.calls <= 16
    script.steps = [line(0)]
    clock.now += 60.0
    assert numbers(log.read(100, 1.0)) == [0]
    script.steps = [end]
    with pytest.raises(OSError, match=r"."):
        list(log.read(100, 1.0))
    clock.now += 1.0
    script.steps = [line(1)]
    assert numbers(log.read(100, 1.0)) == [1], "the back-off starts afresh"


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="no /dev/kmsg here")
def test_real_device() -> None:
    """This machine's log is understood, in order, and begins with the running kernel."""
    log = KernelLogReader("/dev/kmsg", time.monotonic)
    try:
        records = list(log.read(1_000_000, 5.0))
    except PermissionError:
        pytest.skip("reading the kernel log is not permitted")
    finally:
        log.close()
    assert log.drained
    assert numbers(records) == list(range(records[0].sequence, records[-1].sequence + 1))
    if records[0].sequence == 0:
        assert records[0].message.startswith("Linux version ")
        assert Path("/proc/version").read_text().startswith(records[0].message[:40])
