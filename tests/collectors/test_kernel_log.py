"""The kernel log: what counts, what is refused, and after a restart or a reboot."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dshealthd.collectors import kernel_log
from dshealthd.core.collector import Context, Fault, Metric, News, Reason, Worker
from dshealthd.core.host import Host
from dshealthd.core.options import Duration
from dshealthd.core.result import CollectionOutcome, CollectionResult, attempt
from dshealthd.linux.kmsg import KernelLogReader
from tests.collectors.bench import exposed, fill, reasons, tmpfs, unprivileged, values, write
from tests.journald import journald, reason_against
from tests.waiting import until

FIXTURE = Path(__file__).parent / "fixtures" / "kernel_log"
GPUS = ("0000:1b:00.0", "0000:4b:00.0", "0000:66:00.0", "0000:cb:00.0")
CODES = (
    13, 31, 32, 38, 43, 44, 45, 46, 48, 56, 57, 58, 61, 62, 63, 64, 68, 69, 74, 79, 92, 94, 95,
    109, 110, 119, 120, 121, 154,
)  # fmt: skip


class Machine:
    """A machine with four GPUs and a FIFO for a kernel log; its clocks are moved by hand."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.kmsg = base / "dev" / "kmsg"
        self.state = base / "state"
        self.boot_id = base / "proc" / "sys" / "kernel" / "random" / "boot_id"
        for directory in (self.kmsg.parent, self.state, self.boot_id.parent):
            directory.mkdir(parents=True)
        self.boot_id.write_text("3e57bd9a-f89b-4fe2-a24f-69bc0c2fd69f\n")
        os.mkfifo(self.kmsg)
        self.end = os.open(self.kmsg, os.O_RDWR | os.O_NONBLOCK)
        fcntl.fcntl(
            self.end, fcntl.F_SETFL, os.O_DIRECT | os.O_NONBLOCK
        )  # one write is one read, as with the device
        fcntl.fcntl(self.end, fcntl.F_SETPIPE_SZ, 1 << 20)  # room for 256 records
        devices = base / "sys" / "bus" / "pci" / "devices"
        for address, vendor, kind in [
            *((gpu, "0x10de", "0x030200") for gpu in GPUS),
            ("0000:c1:00.0", "0x10de", "0x068000"),  # NVSwitch
            ("0000:01:00.0", "0x1a03", "0x030000"),  # the board's own display
        ]:
            write(devices / address, {"vendor": vendor, "class": kind})
        self.monotonic = 1000.0
        self.options = kernel_log.KernelLogOptions()
        self.root = base
        self._made: list[kernel_log.KernelLog] = []

    def collector(self, *, state: bool = True) -> kernel_log.KernelLog:
        """Return a new collector, as a new agent makes it."""
        host = Host(
            procfs=self.base / "proc",
            sysfs=self.base / "sys",
            dev=self.base / "dev",
            rootfs=self.root,
        )
        context = Context(
            host=host,
            monotonic=lambda: self.monotonic,
            wall=lambda: 1_700_000_000.0 + self.monotonic,
            state=self.state if state else None,
        )
        self._made.append(kernel_log.KernelLog(self.options, context))
        return self._made[-1]

    def close(self) -> None:
        """End all agents, and the log."""
        for collector in self._made:
            close(collector)
        os.close(self.end)

    def log(self, records: Iterable[bytes]) -> None:
        """Put records into the log; at most 256 before they are read."""
        for record in records:
            os.write(self.end, record)

    def collect(self, collector: kernel_log.KernelLog, seconds: float = 1.0) -> CollectionResult:
        """Let time pass and collect."""
        self.monotonic += seconds
        result = attempt(collector, lambda: self.monotonic)
        writer = collector._writer
        if writer is None:
            return result
        until(lambda: not writer.busy)
        if result.outcome is not CollectionOutcome.OK or not (result.faults or writer.error):
            return result
        return attempt(collector, lambda: self.monotonic)  # which says what came of the write

    def saved(self) -> dict[str, object]:
        """Return what the state file holds."""
        document: dict[str, object] = json.loads((self.state / "kernel_log.json").read_text())
        return document


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """Return a machine with an empty log."""
    with contextlib.closing(Machine(tmp_path)) as machine:
        yield machine


@pytest.fixture
def collector(machine: Machine) -> kernel_log.KernelLog:
    """Return the collector of an agent that has just started there."""
    return machine.collector()


def xid(sequence: int, code: int = 79, gpu: str = "0000:66:00", facility: int = 0) -> bytes:
    """Return a record with an Xid."""
    return (
        f"{facility << 3 | 4},{sequence},{sequence * 1000},-;NVRM: Xid (PCI:{gpu}): {code}, "
        "pid=1, name=x, y\n"
    ).encode()


def noise(sequence: int) -> bytes:
    """Return a record that means nothing."""
    return (
        f"6,{sequence},{sequence * 1000},-;usb 1-1: new high-speed USB device number 2 using "
        "xhci_hcd\n"
    ).encode()


def total(result: CollectionResult, metric: Metric = kernel_log.XIDS) -> float:
    """Return the sum over all labels."""
    return sum(values(result, metric).values())


def lost(result: CollectionResult) -> float:
    """Return how many records were lost."""
    return values(result, kernel_log.LOST)[()]


def close(collector: kernel_log.KernelLog) -> None:
    """Close a collector, and wait until it is saved."""
    collector.close()
    if (writer := collector._writer) is not None:
        until(lambda: not writer.busy)


def test_new_errors_of_gpus_are_told(machine: Machine, collector: kernel_log.KernelLog) -> None:
    """An Xid that comes while the agent runs has the GPUs looked at; one that was there has not."""
    told: list[News] = []
    collector.context.tell = told.append
    machine.log([xid(1)])
    machine.collect(collector)
    assert told == []
    machine.log([noise(2)])
    machine.collect(collector)
    assert told == []
    machine.log([xid(3), xid(4, facility=1)])
    machine.collect(collector)
    assert told == [News.GPU_ERROR]


def test_a_gpu_that_comes_to_the_bus(machine: Machine, collector: kernel_log.KernelLog) -> None:
    """An address that is no GPU's is looked up again after a minute."""
    gpu = machine.base / "sys/bus/pci/devices" / GPUS[0]
    gone = gpu.rename(machine.base / "gone")
    for number, (seconds, named) in enumerate([(1, False), (59, False), (2, True)], 1):
        machine.log([xid(number, gpu=GPUS[0].removesuffix(".0"))])
        if number == 2:
            gone.rename(gpu)
        gpus = {
            labels[0] for labels in values(machine.collect(collector, seconds), kernel_log.XIDS)
        }
        assert gpus == ({"0"} if named else {""})


def test_a_slot_that_lost_its_gpu(machine: Machine, collector: kernel_log.KernelLog) -> None:
    """What a port says of its link is told of the GPU at the other end, also once that is off the
    bus; what the bridge above says is told of that.
    """
    gpu = machine.base / "sys/bus/pci/devices" / GPUS[0]
    port = machine.base / "sys/devices/pci0000:15/0000:15:01.0/0000:1a:00.0"
    port.mkdir(parents=True)
    gpu.symlink_to(gpu.rename(port / GPUS[0]))
    gpu.with_name("0000:1b:00.1").symlink_to(port / GPUS[0])  # a function of it
    machine.collect(collector)
    gpu.unlink()
    machine.log(
        f"4,{number},{number},-;pcieport {address}: pciehp: Slot(1): Link Down\n".encode()
        for number, address in enumerate(("0000:1a:00.0", "0000:15:01.0"), 1)
    )
    counts = values(machine.collect(collector), kernel_log.EVENTS)
    assert {device for (event, device), count in counts.items() if count} == {
        GPUS[0],
        "0000:15:01.0",
    }


def test_golden(machine: Machine) -> None:
    """A realistic log gives exactly the expected exposition."""
    records = (FIXTURE / "kmsg.txt").read_text().replace("\n ", "\0 ").splitlines()
    machine.log(record.replace("\0", "\n").encode() + b"\n" for record in records)
    result = machine.collect(machine.collector())
    assert result.outcome is CollectionOutcome.OK
    assert not result.faults
    assert exposed(result.samples) == (FIXTURE / "expected.prom").read_text()


@pytest.mark.skipif(bool(reason_against()), reason=reason_against())
def test_the_journal(machine: Machine, tmp_path: Path) -> None:
    """From the journal errors are counted alike, in a worker, and a new agent goes on where the
    last one was; what the kernel's own log lost is not known, and positions of the two are not
    mixed up.
    """
    shutil.copy("/proc/sys/kernel/random/boot_id", machine.boot_id)
    machine.log([xid(0, 48)])
    before = machine.collector()
    machine.collect(before)
    close(before)
    machine.options = kernel_log.KernelLogOptions(journal=True)
    assert kernel_log.KernelLog.runs_in(machine.options) is Worker.LOGS
    with journald(tmp_path / "journal") as daemon:
        machine.root = daemon.root
        daemon.say("NVRM: Xid (PCI:0000:66:00): 79, pid=1, name=x, y")
        first = machine.collector()
        result = machine.collect(first)
        assert result.outcome is CollectionOutcome.OK
        assert values(result, kernel_log.XIDS) == {("2", "0000:66:00.0", "79"): 1.0}
        assert not values(result, kernel_log.LOST)
        close(first)
        daemon.say("NVRM: Xid (PCI:0000:66:00): 79, again", "NVRM: Xid (PCI:0000:1b:00): 48, once")
        second = machine.collector()
        found = values(machine.collect(second), kernel_log.XIDS)
        assert found == {("2", "0000:66:00.0", "79"): 2.0, ("0", "0000:1b:00.0", "48"): 1.0}
        assert values(machine.collect(second), kernel_log.EVENTS)["oom_kill", ""] == 0.0


def test_a_journal_that_hangs_is_a_fault(machine: Machine) -> None:
    """While the journal's disk hangs nothing touches it, and what was counted stays."""
    machine.options = kernel_log.KernelLogOptions(journal=True)
    collector = machine.collector()
    stuck = Fault("journal", Reason.STUCK, "the disk hangs")
    collector.context.entering = {"journal": stuck}.get
    assert machine.collect(collector).faults == (stuck,)


def test_old_lines_are_no_new_ones(machine: Machine) -> None:
    """A log that takes several collections to read shows no count that rises meanwhile; an agent
    that goes on where another was shows what that one had counted at once.
    """
    machine.options = kernel_log.KernelLogOptions(read_records=2)
    line = b"3,%d,1,-;nvme nvme%d: Removing after probe failure status: -19\n"
    machine.log(line % (number, number % 2) for number in range(5))
    first = machine.collector()
    shown = [values(machine.collect(first), kernel_log.EVENTS) for _ in range(3)]
    assert shown[:2] == [{}, {}]
    assert shown[2]["nvme_failure", "nvme0"] == 3
    assert shown[2]["nvme_failure", "nvme1"] == 2
    close(first)
    machine.log(line % (number, 0) for number in range(5, 8))
    again = values(machine.collect(machine.collector()), kernel_log.EVENTS)
    assert again["nvme_failure", "nvme0"] == 5


def test_nothing_new_is_cheap(machine: Machine, collector: kernel_log.KernelLog) -> None:
    """Without a new record the very same samples are given again."""
    machine.log([xid(0)])
    first = machine.collect(collector)
    second = machine.collect(collector)
    assert second.samples == first.samples
    assert all(one is other for one, other in zip(first.samples, second.samples, strict=True))


@pytest.mark.parametrize("facility", [1, 23])
def test_other_facility(machine: Machine, facility: int, collector: kernel_log.KernelLog) -> None:
    """FAULT 20: a program's Xid in the kernel log is refused, and no loss."""
    machine.log([xid(0, facility=facility), xid(1)])
    result = machine.collect(collector)
    assert total(result) == 1
    assert lost(result) == 0


class Flood:
    """A `read(2)` of 80,000 Xid lines of 29 kinds on four GPUs, some of them overwritten."""

    count = 80_000

    def __init__(self) -> None:
        lines = (
            f"NVRM: Xid (PCI:{gpu[:-2]}): {code}, pid=1, name=x, y\n"
            for gpu, code in itertools.product(GPUS, CODES)
        )
        self._lines = [line.encode() for line in lines]
        self._sequence = 0
        self.given = 0

    def __call__(self, _descriptor: int, _size: int) -> bytes:
        """Give the next record."""
        if self._sequence >= self.count:
            raise BlockingIOError(errno.EAGAIN, "nothing new")
        sequence = self._sequence
        if sequence % 10_000 == 5_000:
            self._sequence += 123
            raise BrokenPipeError(errno.EPIPE, "overwritten")
        self._sequence += 1
        self.given += 1
        return b"4,%d,%d,-;%s" % (sequence, sequence, self._lines[sequence % len(self._lines)])


def test_flood(machine: Machine) -> None:
    """FAULT 16: of 80,000 Xid lines of 29 kinds each is counted or counted as lost."""
    machine.options = kernel_log.KernelLogOptions(read_records=4_000, read_time=Duration(0.5))
    collector = machine.collector()
    flood = Flood()
    collector._reader = KernelLogReader("/dev/null", lambda: machine.monotonic, read=flood)
    rounds = Flood.count // machine.options.read_records + 1
    for _ in range(rounds):
        before = flood.given
        result = machine.collect(collector)
        assert flood.given - before <= machine.options.read_records
    assert total(result) == flood.given
    assert total(result) + lost(result) == Flood.count
    assert len(values(result, kernel_log.XIDS)) == len(GPUS) * len(CODES)
    assert {labels[0] for labels in values(result, kernel_log.XIDS)} == {"0", "1", "2", "3"}
    assert (machine.state / "kernel_log.json").stat().st_size < 64 << 10


def test_series_limit(machine: Machine, collector: kernel_log.KernelLog) -> None:
    """Addresses and numbers without end make no series without end."""
    for first in range(0, 600, 200):
        machine.log(
            xid(number, number + 1, f"{number:04x}:00:00") for number in range(first, first + 200)
        )
        machine.collect(collector)
    machine.log([xid(600, 4711), noise(601), b"3,602,1,-;TCP: time wait bucket table overflow\n"])
    result = machine.collect(collector)
    assert total(result) == 601
    assert len(values(result, kernel_log.XIDS)) == 251  # of 500, as each has its time, too
    assert values(result, kernel_log.XIDS)["", "", "other"] == 351
    assert values(result, kernel_log.EVENTS)["time_wait_overflow", ""] == 1


def test_many_devices(machine: Machine) -> None:
    """Of a storm, 32 devices are named, by the next agent too; others count together."""
    names = {f"sd{number}": 1 for number in range(32)}
    seen: list[bytes] = []
    for first, last, more in ((0, 35, {"other": 3}), (35, 37, {"other": 5})):
        seen += (
            f"3,{number},1,-;I/O error, dev sd{number}, sector 0\n".encode()
            for number in range(first, last)
        )
        machine.log(seen)
        collector = machine.collector()
        events = values(machine.collect(collector), kernel_log.EVENTS)
        shown = {device: count for (event, device), count in events.items() if event == "io_error"}
        assert {device: count for device, count in shown.items() if device} == names | more
        close(collector)


def test_gap(machine: Machine, collector: kernel_log.KernelLog) -> None:
    """FAULT 17: records that were overwritten before they were read are counted as lost."""
    machine.log([xid(0), xid(5)])
    result = machine.collect(collector)
    assert (total(result), lost(result)) == (2, 4)


def test_restart(machine: Machine) -> None:
    """FAULT 19: a new agent counts on."""
    first = machine.collector()
    machine.log([noise(0), xid(1), xid(2), noise(3)])
    machine.collect(first)
    close(first)
    second = machine.collector()
    machine.log(
        [noise(0), xid(1), xid(2), noise(3), xid(4), noise(5), xid(6)]
    )  # the device gives its whole ring to whoever opens it
    result = machine.collect(second)
    assert values(result, kernel_log.XIDS) == {("2", "0000:66:00.0", "79"): 4}
    assert lost(result) == 0


def test_times(machine: Machine) -> None:
    """An Xid has the time of its line where it was there before us, else the time of reading it."""
    machine.monotonic = 100_000.0
    first = machine.collector()
    machine.log([xid(1, 48), noise(2)])
    before = values(machine.collect(first), kernel_log.LAST_XID)
    assert before["2", "0000:66:00.0", "48"] == 1_700_000_000.001, "its own time, soon after boot"
    machine.collect(first)
    machine.log([xid(3, 119)])
    live = values(machine.collect(first), kernel_log.LAST_XID)
    assert live["2", "0000:66:00.0", "119"] == 1_700_000_000.0 + machine.monotonic
    close(first)
    machine.monotonic += 5_000.0
    second = machine.collector()
    machine.log([xid(1, 48), noise(2), xid(3, 119), xid(4, 79)])
    resumed = values(machine.collect(second), kernel_log.LAST_XID)
    assert resumed["2", "0000:66:00.0", "79"] == 1_700_000_000.0 + machine.monotonic
    assert resumed["2", "0000:66:00.0", "119"] == live["2", "0000:66:00.0", "119"]


def test_last_of_each_kind(machine: Machine, collector: kernel_log.KernelLog) -> None:
    """What Xid 154 requests has the time of its last line."""
    line = "4,%d,%d,-;NVRM: Xid (PCI:0000:66:00): 154, GPU recovery action changed from %s to %s\n"
    none, reset = "0x0 (None)", "0x1 (GPU Reset Required)"
    lines = line % (0, 1000, none, reset), line % (1, 2_000_000, reset, none)
    machine.log(map(str.encode, lines))
    shown = values(machine.collect(collector), kernel_log.LAST_RECOVERY)
    assert shown == {
        ("2", "0000:66:00.0", "gpu_reset"): 1_700_000_000.001,
        ("2", "0000:66:00.0", "none"): 1_700_000_002.0,
    }


def test_killed(machine: Machine) -> None:
    """After a kill between two saves each record is counted exactly once."""
    first = machine.collector()
    machine.log([xid(0)])
    machine.collect(first)
    machine.log([xid(1), xid(2)])
    assert total(machine.collect(first)) == 3
    assert machine.saved()["position"] == 1, "the next save is not due yet"
    second = machine.collector()
    first._reader.close()
    machine.log([xid(0), xid(1), xid(2), xid(3)])
    assert total(machine.collect(second)) == 4


def test_overwritten_between_agents(machine: Machine) -> None:
    """What was overwritten while no agent ran adds to what was lost before."""
    first = machine.collector()
    machine.log([xid(0), xid(2)])
    assert lost(machine.collect(first)) == 1
    close(first)
    second = machine.collector()
    machine.log([xid(13)])
    result = machine.collect(second)
    assert (total(result), lost(result)) == (3, 11)


def test_reboot(machine: Machine) -> None:
    """FAULT 19: after a reboot counting starts afresh, with the log since the boot."""
    first = machine.collector()
    machine.log([xid(0), xid(1, 48)])
    machine.collect(first)
    close(first)
    machine.boot_id.write_text("00000000-0000-4000-8000-000000000000\n")
    second = machine.collector()
    machine.log([noise(0), xid(1, 63)])
    result = machine.collect(second)
    assert values(result, kernel_log.XIDS) == {("2", "0000:66:00.0", "63"): 1}
    assert not result.faults


def test_state_is_written_rarely(machine: Machine) -> None:
    """The state is written after a count, at most every few seconds; otherwise rarely."""
    collector = machine.collector()
    machine.log([xid(0)])
    machine.collect(collector)
    place = machine.state / "kernel_log.json"
    written = place.stat().st_ino
    for number in range(1, 4):
        machine.log([xid(number)])
        machine.collect(collector)
    assert place.stat().st_ino == written
    machine.collect(collector, 5.0)
    assert machine.saved()["position"] == 4
    written = place.stat().st_ino
    machine.log([noise(4)])
    machine.collect(collector, 30.0)
    assert place.stat().st_ino == written, "a line of no interest is not worth a write"
    machine.collect(collector, 3600.0)
    assert machine.saved()["position"] == 5
    written = place.stat().st_ino
    machine.collect(collector, 3600.0)
    close(collector)
    assert place.stat().st_ino == written
    assert sorted(os.listdir(machine.state)) == ["kernel_log.json"]


BOOT = '"boot_id":"3e57bd9a-f89b-4fe2-a24f-69bc0c2fd69f","version":1'


@pytest.mark.parametrize("content", [
    "", "{", "[]", '{"version":1}',
    f"{{{BOOT}}}",
    f'{{{BOOT},"position":-1,"lost":0,"counts":[]}}',
    f'{{{BOOT},"position":"5","lost":0,"counts":[]}}',
    f'{{{BOOT},"position":5,"lost":0,"counts":[["dshealthd_unknown_total",[],1]]}}',
    f'{{{BOOT},"position":5,"lost":0,"counts":[["dshealthd_xid_errors_total",["a"],1]]}}',
    f'{{{BOOT},"position":5,"lost":0,"counts":[["dshealthd_xid_errors_total",["a","b"],"x"]]}}',
    f'{{{BOOT},"position":5,"lost":0,"counts":7}}',
    f'{{{BOOT.replace(":1", ":2")},"position":5,"lost":0,"counts":[]}}',
    "\0" * 4096,
])  # fmt: skip
def test_broken_state(machine: Machine, content: str, caplog: pytest.LogCaptureFixture) -> None:
    """A state file that makes no sense is reported once, replaced, and stops nothing."""
    (machine.state / "kernel_log.json").write_text(content)
    collector = machine.collector()
    machine.log([xid(0)])
    machine.state.chmod(0o500)
    result = machine.collect(collector)
    machine.state.chmod(0o700)
    assert total(result) == 1
    assert len(caplog.records) >= 1
    machine.log([xid(1)])
    result = machine.collect(collector, 6.0)
    assert total(result) == 2
    assert not result.faults
    assert machine.saved()["position"] == 2


def test_position_of_another_log(machine: Machine) -> None:
    """A saved position that the log never reached is given up, not waited for."""
    state = f'{{{BOOT},"position":900,"lost":3,"counts":[]}}'
    (machine.state / "kernel_log.json").write_text(state)
    collector = machine.collector()
    machine.log([xid(0)])
    result = machine.collect(collector)
    assert lost(result) == 0
    machine.log([xid(0), xid(1)])  # the device, opened anew, gives all again
    result = machine.collect(collector)
    assert total(result) == 2


def test_state_directory_is_missing(machine: Machine) -> None:
    """Without a place for the state everything counts, with a fault until there is one."""
    machine.state.rmdir()
    collector = machine.collector()
    machine.log([xid(0)])
    result = machine.collect(collector)
    assert total(result) == 1
    assert reasons(result) == {"state": Reason.NOT_FOUND}
    assert result.outcome is CollectionOutcome.OK
    machine.state.mkdir()
    assert not machine.collect(collector, 6.0).faults
    assert machine.saved()["position"] == 1


def test_no_boot_id(machine: Machine) -> None:
    """Without a boot id nothing is saved, as nobody could tell what it is worth."""
    machine.boot_id.unlink()
    collector = machine.collector()
    machine.log([xid(0)])
    result = machine.collect(collector)
    assert total(result) == 1
    assert [fault.reason for fault in result.faults] == [Reason.NOT_FOUND]
    close(collector)
    assert not os.listdir(machine.state)


def test_full_disk(machine: Machine) -> None:
    """A full tmpfs of 64 KiB leaves the old state as it was."""
    with tmpfs(machine.state, "size=64k"):
        collector = machine.collector()
        machine.log([xid(0)])
        machine.collect(collector)
        before = machine.saved()
        fill(machine.state)
        machine.log([xid(1)])
        result = machine.collect(collector, 6.0)
        assert total(result) == 2
        assert [fault.reason for fault in result.faults] == [Reason.IO_ERROR]
        assert machine.saved() == before
        assert sorted(os.listdir(machine.state)) == ["ballast", "kernel_log.json"]
        (machine.state / "ballast").unlink()
        assert not machine.collect(collector, 6.0).faults
        assert machine.saved()["position"] == 2
        close(collector)


def test_absent(machine: Machine) -> None:
    """A machine without a kernel log is an ordinary one."""
    machine.kmsg.unlink()
    collector = machine.collector()
    assert "kmsg" in (kernel_log.KernelLog.absent(machine.options, collector.host) or "")
    assert machine.collect(collector).outcome is CollectionOutcome.NOT_AVAILABLE


@pytest.fixture
def public() -> Iterator[Machine]:
    """Return a machine whose files every user can find."""
    with tempfile.TemporaryDirectory() as base:
        os.chmod(base, 0o755)
        with contextlib.closing(Machine(Path(base))) as machine:
            yield machine


def test_no_permission(public: Machine) -> None:
    """A log that may not be read is an error that says so, not a machine without faults."""
    machine = public
    machine.kmsg.chmod(0)
    collector = machine.collector(state=False)
    with unprivileged():
        result = machine.collect(collector)
        again = machine.collect(collector, 0.5)
    for outcome in (result, again):
        assert outcome.outcome is CollectionOutcome.ERROR
        assert outcome.reason is Reason.PERMISSION_DENIED
        assert not outcome.samples
    machine.kmsg.chmod(0o600)
    assert machine.collect(collector, 60.0).outcome is CollectionOutcome.OK


def test_log_that_closes(machine: Machine, collector: kernel_log.KernelLog) -> None:
    """FAULT 18: it is an error beside all that was counted; its reader opens it again."""
    machine.log([xid(0)])
    machine.collect(collector)
    steps = [b"", xid(1), b""]
    collector._reader = KernelLogReader(
        "/dev/null", lambda: machine.monotonic, 1, lambda _descriptor, _size: steps.pop(0)
    )
    for counted in (1, 2):
        result = machine.collect(collector, 60.0)
        assert (result.outcome, result.reason) == (CollectionOutcome.ERROR, Reason.IO_ERROR)
        assert total(result) == counted


@pytest.mark.parametrize(("why", "reason", "detail"), [
    (Reason.TIMEOUT, Reason.TIMEOUT, "it is not saved"),
    (OSError(28, "full"), Reason.IO_ERROR, "it is not saved: [Errno 28] full"),
])  # fmt: skip
def test_why_the_state_is_not_saved(
    why: Exception | Reason, reason: Reason, detail: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is the collector's fault with the error, if there is one, and logged once."""
    collector: Any = SimpleNamespace(_fault=None)
    for _ in range(2):
        kernel_log.KernelLog._troubled(collector, "it is not saved", why)
    assert collector._fault == Fault("state", reason, detail)
    assert caplog.messages == [f"kernel_log: {detail}"]
