"""The reader of the journal, on files that the genuine journald writes meanwhile."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshealthd.core.collector import NotAvailable, Reason, SourceError
from dshealthd.core.host import Host
from dshealthd.linux.journal import JournalReader
from dshealthd.linux.kmsg import KERNEL, KernelLogRecord
from tests.journald import journald, reason_against
from tests.linux.damaged_journal import Journal

genuine = pytest.mark.skipif(bool(reason_against()), reason=reason_against())
XID = "NVRM: Xid (PCI:0000:66:00): 79, pid=1, GPU has fallen off the bus."


def reader(root: Path, position: int = 0) -> JournalReader:
    """Return a reader of the journal of a host."""
    return JournalReader(Host(rootfs=root), time.monotonic, position)


def everything(journal: JournalReader) -> list[KernelLogRecord]:
    """Return what is new."""
    return list(journal.read(1_000_000, 60.0))


def messages(journal: JournalReader) -> list[str]:
    """Return the messages that are new."""
    return [record.message for record in everything(journal)]


@genuine
@pytest.mark.parametrize(
    "form",
    [{}, {"SYSTEMD_JOURNAL_COMPACT": "0"}, {"SYSTEMD_JOURNAL_KEYED_HASH": "0"}],
    ids=["compact", "regular", "unkeyed"],
)
def test_every_record_once(tmp_path: Path, form: dict[str, str]) -> None:
    """Each form of a file is read to its end, then what comes, across rotations of the file."""
    with journald(tmp_path, form) as daemon:
        journal = reader(daemon.root)
        assert messages(journal) == ["Linux version 6.1.0"]
        assert journal.drained
        daemon.say(XID, "one", "two")
        assert messages(journal) == [XID, "one", "two"]
        assert messages(journal) == []
        many = [f"line {number}" for number in range(200)]
        daemon.say(*many)
        daemon.control("--rotate")
        daemon.say("after")
        assert messages(journal) == [*many, "after"]
        daemon.control("--rotate")
        daemon.say("at last")
        assert messages(journal) == ["at last"]
        assert messages(reader(daemon.root)) == [
            *("Linux version 6.1.0", XID, "one", "two"),
            *many,
            "after",
            "at last",
        ]
        journal.close()


@genuine
def test_goes_on_where_it_was(tmp_path: Path) -> None:
    """A reader that is told a position has only later records; one beyond the end is noticed."""
    with journald(tmp_path) as daemon:
        daemon.say("one", "two")
        first = reader(daemon.root)
        everything(first)
        daemon.say("three")
        second = reader(daemon.root, first.position)
        assert messages(second) == ["three"]
        assert not second.behind()
        astray = reader(daemon.root, second.position + 100)
        assert messages(astray) == []
        assert astray.behind()


@genuine
def test_only_what_the_kernel_says(tmp_path: Path) -> None:
    """What a service logs is no record; what one writes to /dev/kmsg has another facility."""
    with journald(tmp_path) as daemon:
        daemon.kernel.say(XID, facility=1)
        daemon.say("end")
        found = everything(reader(daemon.root))
        assert [record.message for record in found if record.facility == KERNEL] == [
            "Linux version 6.1.0",
            "end",
        ]
        assert [record.facility for record in found if "Xid" in record.message] == [1]
        # "Journal started" of journald itself is among the entries.
        assert "Journal started" in daemon.control("--output=cat")


@genuine
def test_times_are_the_kernels(tmp_path: Path) -> None:
    """A record's time is the kernel's own, not that of its entry."""
    with journald(tmp_path) as daemon:
        daemon.kernel.say("long ago", seconds=12.5)
        daemon.say("end")
        times = {record.message: record.timestamp for record in everything(reader(daemon.root))}
        assert times["long ago"] == pytest.approx(12.5)


@genuine
def test_reads_a_part_at_a_time(tmp_path: Path) -> None:
    """As many records as are asked for; the next call has the rest."""
    with journald(tmp_path) as daemon:
        daemon.say("one", "two", "three")
        journal = reader(daemon.root)
        parts = [[record.message for record in journal.read(3, 60.0)] for _ in range(3)]
        assert parts == [["Linux version 6.1.0", "one", "two"], ["three"], []]


@genuine
def test_earlier_boots_are_left_out(tmp_path: Path) -> None:
    """Entries of other boots are not read, whether they fill an array or share it."""
    with journald(tmp_path) as daemon:
        daemon.say(*(f"line {number}" for number in range(60)))
        boot = tmp_path / "proc/sys/kernel/random/boot_id"
        boot.parent.mkdir(parents=True)
        boot.write_text("3e57bd9a-f89b-4fe2-a24f-69bc0c2fd69f\n", encoding="ascii")
        host = Host(rootfs=daemon.root, procfs=tmp_path / "proc")
        assert list(JournalReader(host, time.monotonic).read(1000, 60.0)) == []


@genuine
@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.95])
def test_a_damaged_file_is_left_out(
    tmp_path: Path, share: float, caplog: pytest.LogCaptureFixture
) -> None:
    """An older file that ends early or holds garbage costs its own records."""
    with journald(tmp_path) as daemon:
        daemon.say(*(f"line {number}" for number in range(60)))
        daemon.control("--rotate")
        daemon.say("after")
        (old,) = daemon.files.glob("system@*")
        whole = old.read_bytes()
        used = len(whole.rstrip(b"\0"))
        for damage in (whole[: int(used * share)], whole[: int(used * share)] + b"\xff" * 100_000):
            old.unlink()
            old.write_bytes(damage)
            caplog.clear()
            found = messages(reader(daemon.root))
            assert found[-1] == "after"
            assert "old file of the journal is left out" in caplog.text
        copy = tmp_path / "copy"
        shutil.copytree(daemon.root, copy)
        (active,) = (copy / "run/log/journal").rglob("system.journal")
        with active.open("r+b") as file:
            file.truncate(4096)
        with pytest.raises(SourceError) as raised:
            everything(reader(copy))
        assert raised.value.reason is Reason.MALFORMED


def lines_of(root: Path) -> tuple[list[str], str]:
    """Return the messages of a made journal, and why a part of it could not be read."""
    journal = JournalReader(Host(rootfs=root, procfs=root / "proc"), time.monotonic)
    found: list[str] = []
    try:
        found += (record.message for record in journal.read(1000, 5.0))
    except SourceError as error:
        return found, str(error)
    finally:
        journal.close()
    return found, ""


def test_made_journal(tmp_path: Path) -> None:
    """What the damage below is done to is a journal: all of its entries are read, and those of no
    other file beside it.
    """
    root = Journal().write(tmp_path)
    (active,) = root.rglob("system.journal")
    for other in ("user-1000.journal", "system.txt"):
        active.with_name(other).write_bytes(active.read_bytes())
    found = lines_of(root)
    assert found == ([f"line {number}" for number in range(6)], "")


def test_an_entry_that_is_counted_first(tmp_path: Path) -> None:
    """Until its place is written, and the array of it linked, there is no such entry; then it is
    read.
    """
    journal = Journal(7)
    journal.put(journal.first + 16, 0)
    root = journal.write(tmp_path)
    log = JournalReader(Host(rootfs=root, procfs=root / "proc"), time.monotonic)
    assert messages(log) == ["line 0", "line 1", "line 2"]
    journal.put(journal.first + 16, journal.second)
    journal.put(journal.second + 48, 0)
    journal.write(tmp_path)
    assert messages(log) == ["line 3", "line 4", "line 5"]
    journal.put(journal.second + 48, journal.entries[6])
    journal.write(tmp_path)
    assert messages(log) == ["line 6"]
    log.close()


@pytest.mark.parametrize(("fields", "read"), [(65_000, 6), (66_000, 0)])
def test_chain_of_fields(tmp_path: Path, fields: int, read: int) -> None:
    """Some ten thousand other fields may come before the one that is looked for."""
    journal = Journal()
    (bucket,) = struct.unpack_from("<Q", journal.content, 120)
    journal.put(bucket, len(journal.content) + -len(journal.content) % 8)
    for number in range(fields):
        place = journal.add_field(b"FIELD%d" % number, 0)
        journal.put(place + 24, len(journal.content) + -len(journal.content) % 8)
    journal.add_field(b"_TRANSPORT", journal.kernel)
    found, reason = lines_of(journal.write(tmp_path))
    assert len(found) == read
    assert ("more than" in reason) is not bool(read)


FAR = 2**63 + 8
DAMAGE: dict[str, Callable[[Journal], None]] = {
    "array followed by itself": lambda journal: journal.put(journal.second + 16, journal.second),
    "array followed by an earlier one": lambda journal: journal.put(
        journal.second + 16, journal.first
    ),
    "array without room": lambda journal: journal.put(journal.second + 8, 24),
    "array beyond any file": lambda journal: journal.put(journal.first + 16, FAR),
    "first array beyond any file": lambda journal: journal.put(journal.kernel + 48, FAR),
    "table that is no multiple": lambda journal: journal.put(128, 17),
    "table beyond the end": lambda journal: journal.put(120, 1 << 40),
    "table beyond any file": lambda journal: journal.put(120, FAR),
    "field shorter than its head": lambda journal: journal.put(journal.kernel + 8, 17),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damage_has_an_end_and_a_reason(damage: Callable[[Journal], None], tmp_path: Path) -> None:
    """A chain that leads back, and a place that no file has, end the file, and say so."""
    journal = Journal()
    damage(journal)
    journal.put(journal.kernel + 56, 1 << 40)  # so many entries are never reached
    _, reason = lines_of(journal.write(tmp_path))
    assert "system.journal" in reason


@pytest.mark.parametrize("place", [FAR, 1 << 40, 0x110], ids=["far", "beyond the end", "a datum"])
def test_a_damaged_entry_costs_itself(place: int, tmp_path: Path) -> None:
    """The entries before and after one that cannot be read are read, and the loss is said."""
    journal = Journal()
    journal.put(journal.first + 24, place)  # in place of the second entry
    found, reason = lines_of(journal.write(tmp_path))
    assert found == ["line 0", "line 2", "line 3", "line 4", "line 5"]
    assert "1 entry" in reason


@given(st.data())
def test_any_damage(data: st.DataObject) -> None:
    """Whatever the bytes are, reading them ends, and ends with records or a reason."""
    journal = Journal()
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(journal.content) - 8))
        journal.put(at, data.draw(st.sampled_from([0, 1, at, FAR, 2**64 - 1, 24, 272])))
    with tempfile.TemporaryDirectory() as directory:
        lines_of(journal.write(Path(directory)))


def test_no_journal(tmp_path: Path) -> None:
    """Without a journal the source is not available, and says where it was looked for."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/machine-id").write_text("a" * 32 + "\n", encoding="ascii")
    with pytest.raises(NotAvailable, match=f"run/log/journal/{'a' * 32} or .*var/log/journal"):
        everything(reader(tmp_path))


def test_old_files_on_disk(tmp_path: Path) -> None:
    """Files on disk are old where journald writes to memory: it is told to, or the disk is
    read-only. A directory in memory without its file is nothing.
    """
    root = Journal().write(tmp_path)
    (memory,) = (root / "run/log/journal").iterdir()
    disk = root / "var/log/journal" / memory.name
    disk.mkdir(parents=True)
    lines = [f"line {number}" for number in range(6)]
    assert lines_of(root) == (lines, "")
    (disk / "system@old.journal").write_bytes((memory / "system.journal").read_bytes())
    (disk / "system.journal").write_bytes(bytes(8))
    assert lines_of(root) == (lines, "")
    (memory / "system.journal").replace(disk / "system.journal")
    (disk / "system@old.journal").unlink()
    assert lines_of(root) == (lines, "")


def test_a_newer_format_is_said(tmp_path: Path) -> None:
    """A file with features that this release does not know is an error, not an empty log."""
    files = tmp_path / "run/log/journal" / ("a" * 32)
    files.mkdir(parents=True)
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/machine-id").write_text("a" * 32 + "\n", encoding="ascii")
    (files / "system.journal").write_bytes(b"LPKSHHRH" + bytes(4) + b"\x20" + bytes(300))
    with pytest.raises(SourceError, match="newer systemd"):
        everything(reader(tmp_path))


@genuine
def test_needs_no_capability(tmp_path: Path) -> None:
    """Root without any capability reads the files, as in a pod that is not privileged."""
    with journald(tmp_path) as daemon:
        daemon.say(XID)
        program = (
            "import sys, time; from pathlib import Path\nfrom dshealthd.core.host import Host; "
            "from dshealthd.linux.journal import JournalReader\nread = "
            "JournalReader(Host(rootfs=Path(sys.argv[1])), time.monotonic).read(99, "
            "60.0)\nprint([record.message for record in read][-1])"
        )
        bare = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]
        command = [*bare, "python3", "-c", program, str(daemon.root)]
        environment = {**os.environ, "PYTHONPATH": "."}
        said = subprocess.check_output(command, text=True, timeout=60, env=environment)
        assert said == f"{XID}\n"
        assert {file.stat().st_mode & 0o777 for file in daemon.files.iterdir()} == {0o640}
