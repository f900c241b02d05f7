"""The kernel's records in systemd's journal, read from its files.

Only records that journald itself has taken from the kernel (`_TRANSPORT=kernel`), which no other
process can forge, and only those of the present boot. Files are read with pread(2) alone: neither
an index that is being changed nor a file that is cut off harms the reader.

Source: https://systemd.io/JOURNAL_FILE_FORMAT/, and journal-def.h of systemd 257.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import struct
from collections.abc import Callable, Iterator

from dshealthd.core.collector import NotAvailable, Reason, SourceError
from dshealthd.core.host import Host, read
from dshealthd.core.text import plural
from dshealthd.linux.kmsg import CLOCK_EVERY, KernelLogReader, KernelLogRecord, LogReader

log = logging.getLogger(__name__)

DIRECTORIES = ("run/log/journal", "var/log/journal")
"""Where journald keeps its files: in memory until the next boot, or on disk.

Once it writes to disk, it removes those in memory. Where it does not, as `Storage=volatile` or a
read-only disk has it, those on disk are of earlier boots.
"""
ACTIVE = "system.journal"
"""The file that is written to; older ones have names that begin alike."""
_HEADER = struct.Struct("<8s4xI104xQQ32xQ")
"""Signature, incompatible flags, place and size of the table of fields, number of the first
entry."""
_SIGNATURE = b"LPKSHHRH"
_COMPACT = 16
_UNDERSTOOD = 31
"""Incompatible flags up to systemd 257: data by xz, lz4 or zstd, keyed hashes, compact."""
_OBJECT = struct.Struct("<BB6xQ")
_DATA, _FIELD, _ENTRY, _ARRAY = 1, 2, 3, 6
_COMPRESSED = 7
"""Flags of data that is compressed: of 512 bytes and more, longer than any record that matters."""
_LARGEST = 1 << 24
"""Bytes of an object, as a check: arrays of entries are the largest."""
_CHAIN = 1 << 16
"""Most steps to find the kernel's entries: some hundred fields, and a handful of transports."""
_END = 1 << 63
"""No place in a file is beyond it."""
_ITEMS = 512
"""Entries of an array that are read at a time."""
_TRANSPORT, _KERNEL = b"_TRANSPORT", b"_TRANSPORT=kernel"
_MESSAGE, _FACILITY, _TIME = b"MESSAGE", b"SYSLOG_FACILITY", b"_SOURCE_MONOTONIC_TIMESTAMP"
_PAYLOAD = 1024
"""Bytes of a field that are looked at; the kernel's records have fewer."""


class _Damaged(Exception):
    """A file is not what journald writes."""


class _File:
    def __init__(self, place: str, boot: bytes) -> None:
        """Open it; `boot` is the ID of the present boot."""
        self.place = place
        self._boot = boot
        self._descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        opened = os.fstat(self._descriptor)
        self.key = opened.st_dev, opened.st_ino
        self.damaged = 0
        """Entries that cannot be read; `damage` says why the first one cannot."""
        self.damage = ""
        self._kernel = 0
        """Where `_TRANSPORT=kernel` is; 0 while there is no such entry."""
        self._array = 0
        self._index = 0
        self._taken = 0
        self._known: dict[int, tuple[bytes, bytes] | None] = {}
        """Fields that many entries share, by their place."""
        header = os.pread(self._descriptor, _HEADER.size, 0).ljust(_HEADER.size, b"\0")
        signature, flags, self._fields, self._fields_size, first = _HEADER.unpack(header)
        self._first: int = first
        if signature != _SIGNATURE or flags & ~_UNDERSTOOD:
            self.close()
            raise _Damaged(f"{place}: not a journal, or one of a newer systemd (flags {flags:#x})")
        compact = bool(flags & _COMPACT)
        self._payload = 72 if compact else 64
        self._item = struct.Struct("<I" if compact else "<Q")
        self._stride = 4 if compact else 16

    @property
    def first(self) -> int:
        """Return the number of a journal file's first entry; 0 while there is none."""
        if not self._first:
            with contextlib.suppress(_Damaged):  # cut off, which reading it will say
                self._first = self._number(168)
        return self._first

    def close(self) -> None:
        os.close(self._descriptor)

    def records(self) -> Iterator[KernelLogRecord | None]:
        """Yield the kernel's records since the last call; None for an entry of another boot, or one
        that is damaged.

        Raise _Damaged if no further entry can be found, OSError if the file cannot be read.
        """
        try:
            for place in self._entries():
                yield self._whole_record(place)
        except struct.error as error:
            raise _Damaged(f"{self.place}: {error}") from error

    def _whole_record(self, place: int) -> KernelLogRecord | None:
        """Return the kernel log record of an entry; None if damaged, as `damaged` then tells."""
        try:
            return self._record(place)
        except (_Damaged, struct.error, ValueError, ArithmeticError) as error:
            self.damaged += 1
            self.damage = self.damage or f"{self.place}: the entry at {place}: {error}"
            return None

    def _read(self, place: int, size: int) -> bytes:
        if size < 0 or place + size >= _END:
            raise _Damaged(f"{self.place}: no {size} bytes at {place}")
        content = os.pread(self._descriptor, size, place)
        if len(content) < size:
            raise _Damaged(f"{self.place} ends before byte {place + size}")
        return content

    def _following(self, place: int, link: int) -> int:
        """Return where an object's successor is, as the link in it says; 0 if there is none.

        journald appends fields and arrays to their chains, so a successor is further on: a chain
        that leads back is damage, and would have no end.
        """
        following = self._number(place + link)
        if following and following <= place:
            message = f"{self.place}: the object at {place} is followed by the one at {following}"
            raise _Damaged(message)
        return following

    def _object(self, place: int, kind: int) -> tuple[int, int]:
        """Return flags and size of the object of a kind at a place."""
        found, flags, size = _OBJECT.unpack(self._read(place, _OBJECT.size))
        if found != kind or not _OBJECT.size <= size <= _LARGEST:
            raise _Damaged(f"{self.place}: no object of type {kind} at {place}")
        return flags, size

    def _number(self, place: int) -> int:
        return int.from_bytes(self._read(place, 8), "little")

    def _find(self) -> int:
        """Return where the data `_TRANSPORT=kernel` is; 0 if no entry has it yet."""
        table = self._read(self._fields, min(self._fields_size, _LARGEST))
        steps = itertools.count()
        for place, _ in struct.iter_unpack("<QQ", table):
            while place:
                self._step(steps)
                _, size = self._object(place, _FIELD)
                if self._read(place + 40, size - 40) == _TRANSPORT:
                    return self._value(self._number(place + 32), steps)
                place = self._following(place, 24)  # noqa: PLW2901 - the next one in the chain
        return 0

    def _step(self, steps: Iterator[int]) -> None:
        if next(steps) >= _CHAIN:
            raise _Damaged(f"{self.place}: more than {_CHAIN} fields and transports")

    def _value(self, place: int, steps: Iterator[int]) -> int:
        """Return where `_TRANSPORT=kernel` is in the chain of values that begins at a place."""
        while place:
            self._step(steps)
            _, size = self._object(place, _DATA)
            if self._read(place + self._payload, size - self._payload) == _KERNEL:
                return place
            place = self._number(place + 32)  # the newest value comes first
        return 0

    def _entries(self) -> Iterator[int]:
        """Yield the places of entries of the kernel that were not yielded yet."""
        self._kernel = self._kernel or self._find()
        if not self._kernel:
            return
        first, array, count = struct.unpack("<QQQ", self._read(self._kernel + 40, 24))
        if count and not self._taken:
            self._taken = 1
            yield first
        self._array = self._array or array
        while self._taken < count and self._array:
            _, size = self._object(self._array, _ARRAY)
            room = (size - 24) // self._item.size
            if room < 1:
                raise _Damaged(f"{self.place}: an array of entries without any at {self._array}")
            if not self._index and self._taken + room <= count and self._is_old(room):
                self._index = room
                self._taken += room
            if self._index >= room:
                following = self._following(self._array, 16)
                if not following:
                    return
                self._array, self._index = following, 0
                continue
            most = min(room - self._index, count - self._taken, _ITEMS)
            where = self._array + 24 + self._index * self._item.size
            items = self._read(where, most * self._item.size)
            for (place,) in self._item.iter_unpack(items):
                if not place:  # counted, but not written yet
                    return
                self._index += 1
                self._taken += 1
                yield place

    def _is_old(self, room: int) -> bool:
        """Return whether an array's last entry, and so each of them, is of an earlier boot."""
        where = self._array + 24 + (room - 1) * self._item.size
        (place,) = self._item.unpack(self._read(where, self._item.size))
        return bool(place) and self._read(place + 40, 16) != self._boot

    def _record(self, place: int) -> KernelLogRecord | None:
        """Return the kernel log record of a journal's entry; None if it is of another boot."""
        _, size = self._object(place, _ENTRY)
        content = self._read(place, size)
        if content[40:56] != self._boot:
            return None
        sequence, _, monotonic = struct.unpack_from("<QQQ", content, 16)
        fields = dict(
            field
            for at in range(64, size - self._item.size + 1, self._stride)
            if (field := self._field(*self._item.unpack_from(content, at))) is not None
        )
        facility = int(fields.get(_FACILITY, b"-1"))
        microseconds = int(fields.get(_TIME, monotonic))
        text = fields.get(_MESSAGE, b"").partition(b"\n")[0].decode("utf-8", "replace")
        # a record's own order
        return KernelLogRecord(facility, sequence, microseconds / 1e6, True, text)  # noqa: FBT003

    def _field(self, place: int) -> tuple[bytes, bytes] | None:
        if place in self._known:
            return self._known[place]
        flags, size = self._object(place, _DATA)
        found = None
        if not flags & _COMPRESSED:
            payload = self._read(place + self._payload, min(size - self._payload, _PAYLOAD))
            name, _, value = payload.partition(b"=")
            if name in {_MESSAGE, _FACILITY, _TIME}:
                found = name, value
            if name not in {_MESSAGE, _TIME} and len(self._known) < _ITEMS:
                self._known[place] = found
        return found


def _failure(error: _Damaged | OSError) -> SourceError | OSError:
    """Return what the collector raises for the file that is written to."""
    return error if isinstance(error, OSError) else SourceError(Reason.MALFORMED, str(error))


def _is_short(error: _Damaged | OSError) -> bool:
    """Return whether this process lacks descriptors or memory, and no file is to blame."""
    return isinstance(error, OSError) and error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOMEM}


class JournalReader(LogReader):
    """Reads the kernel's records from the journal continuously, every record once.

    A record's number is that of its entry, which other services' entries share: gaps are ordinary,
    and what journald itself has missed is not counted.
    """

    def __init__(self, host: Host, monotonic: Callable[[], float], position: int = 0) -> None:
        """Prepare to read from entry number `position` on. Nothing is opened yet."""
        super().__init__(monotonic, position)
        self.host = host
        self._boot = b""
        self._files: dict[tuple[int, int], _File] = {}
        """By device and inode, as rotation renames files."""
        self._done: set[tuple[int, int]] = set()
        """Older files that have been read, or cannot be."""
        self._damage: list[str] = []

    def read(self, most: int, seconds: float) -> Iterator[KernelLogRecord]:
        """Yield new records of the journal, at most `most` within `seconds`; the rest comes next
        time.

        Raise OSError or SourceError if the journal or a part of it cannot be read, NotAvailable if
        there is none.
        """
        until = self._monotonic() + seconds
        count = 0
        for key, name in self._open_new():
            file = self._files[key]
            try:
                for record in file.records():
                    count += 1
                    if record is not None:
                        self._newest = max(self._newest, record.sequence)
                        if record.sequence >= self.position:
                            self.position = record.sequence + 1
                            yield record
                    if count >= most or (not count % CLOCK_EVERY and self._monotonic() >= until):
                        return
            except (_Damaged, OSError) as error:
                self._drop(key)
                if name == ACTIVE or _is_short(error):  # journald will begin another one
                    raise _failure(error) from error
                log.warning("the rest of an old file of the journal is left out: %s", error)
                self._done.add(key)
                continue
            if file.damaged:
                self._damage.append(f"{plural(file.damaged, 'entry', 'entries')}: {file.damage}")
                file.damaged, file.damage = 0, ""
            if name != ACTIVE:
                self._drop(key)
                self._done.add(key)
        self.drained = True
        if self._damage:  # said once, after all that could be read
            message = f"cannot be read: {'; '.join(self._damage)}"
            self._damage.clear()
            raise SourceError(Reason.MALFORMED, message)

    def close(self) -> None:
        """Close the journal's files."""
        for key in list(self._files):
            self._drop(key)

    def _drop(self, key: tuple[int, int]) -> None:
        self._files.pop(key).close()

    def _open_new(self) -> list[tuple[tuple[int, int], str]]:
        """Open new journal files; return key and name of those to read, the oldest first."""
        if not self._boot:
            boot = read(self.host.proc("sys/kernel/random/boot_id"))
            self._boot = bytes.fromhex(boot.strip().replace("-", ""))
        names = {}
        directory = self._place()
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.name.startswith("system") and entry.name.endswith((".journal", "nal~")):
                    found = entry.stat(follow_symlinks=False)
                    names[found.st_dev, found.st_ino] = entry.name
        for key in self._files.keys() - names.keys():  # deleted, as journald keeps only so many
            self._drop(key)
        self._done &= names.keys()
        for key, name in names.items():
            if key not in self._files and key not in self._done:
                place = f"{directory}/{name}"
                try:
                    file = _File(place, self._boot)
                except FileNotFoundError:  # renamed or deleted meanwhile
                    continue
                except (_Damaged, OSError) as error:
                    if name == ACTIVE or _is_short(error):
                        raise _failure(error) from error
                    log.warning("an old file of the journal is left out: %s", error)
                    self._done.add(key)
                else:
                    if file.key == key:
                        self._files[key] = file
                    else:  # rotated meanwhile: both are found the next time
                        file.close()
        return sorted(
            ((key, names[key]) for key in self._files),
            key=lambda found: (found[1] == ACTIVE, self._files[found[0]].first),
        )

    def _place(self) -> str:
        """Return the directory of this machine's journal."""
        machine = read(self.host.root("etc/machine-id")).strip()
        places = [f"{self.host.root(directory)}/{machine}" for directory in DIRECTORIES]
        written = (place for place in places if os.path.exists(f"{place}/{ACTIVE}"))
        any_files = (place for place in places if os.path.isdir(place))
        found = next(itertools.chain(written, any_files), None)
        if found is None:
            raise NotAvailable(f"there is no journal in {' or '.join(places)}")
        return found


def kernel_log_reader(
    host: Host, monotonic: Callable[[], float], *, journal: bool
) -> KernelLogReader | JournalReader:
    """Return a reader of the kernel log, in the journal or in `/dev/kmsg`."""
    if journal:
        return JournalReader(host, monotonic)
    return KernelLogReader(host.device("kmsg"), monotonic)
