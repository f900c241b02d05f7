"""A small file of the journal, in the regular layout, and what damage makes of it."""

from __future__ import annotations

import struct
from pathlib import Path

DATA, FIELD, ENTRY, TABLE, ARRAY = 1, 2, 3, 4, 6
BOOT = bytes(range(16))
MACHINE = "0" * 32


class Journal:
    """Objects of a journal by their places, as appended: `first` entry, then arrays."""

    def __init__(self, entries: int = 6) -> None:
        """Lay out so many entries of the kernel: the first alone, two in an array, the rest."""
        self.content = bytearray(272)
        self.kernel = self._data(b"_TRANSPORT=kernel")
        shared = [self.kernel, self._data(b"SYSLOG_FACILITY=0"), self._data(b"PRIORITY=3")]
        field = self.add_field(b"_TRANSPORT", self.kernel)
        table = self._add(TABLE, struct.pack("<QQ", field, field) + bytes(64))
        self.entries = [
            self._entry(number, [*shared, self._data(b"MESSAGE=line %d" % number)])
            for number in range(entries)
        ]
        self.first = self._array(self.entries[1:3])
        self.second = self._array(self.entries[3:])
        self.put(self.first + 16, self.second)
        self.put(self.kernel + 40, self.entries[0], self.first, entries)
        struct.pack_into("<8s", self.content, 0, b"LPKSHHRH")
        self.put(120, table + 16, 16)
        self.put(168, 1)

    def put(self, place: int, *numbers: int) -> None:
        """Write numbers of 64 bits at a place."""
        struct.pack_into(f"<{len(numbers)}Q", self.content, place, *numbers)

    def write(self, root: Path) -> Path:
        """Write the file where journald of a host has it, and return the host's root."""
        directory = root / "run/log/journal" / MACHINE
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "system.journal").write_bytes(self.content)
        (root / "etc").mkdir(exist_ok=True)
        (root / "etc/machine-id").write_text(f"{MACHINE}\n", encoding="ascii")
        boot = root / "proc/sys/kernel/random/boot_id"
        boot.parent.mkdir(parents=True, exist_ok=True)
        boot.write_text(f"{BOOT.hex()}\n", encoding="ascii")
        return root

    def add_field(self, name: bytes, newest: int) -> int:
        """Append a field with its newest value, and return where it is."""
        return self._add(FIELD, struct.pack("<QQQ", 0, 0, newest) + name)

    def _add(self, kind: int, payload: bytes) -> int:
        self.content.extend(bytes(-len(self.content) % 8))
        place = len(self.content)
        self.content += struct.pack("<BB6xQ", kind, 0, 16 + len(payload)) + payload
        return place

    def _data(self, content: bytes) -> int:
        return self._add(DATA, bytes(48) + content)

    def _entry(self, number: int, items: list[int]) -> int:
        head = struct.pack("<QQQ", number + 1, 0, 5_000_000) + BOOT + bytes(8)
        return self._add(ENTRY, head + b"".join(struct.pack("<QQ", item, 0) for item in items))

    def _array(self, items: list[int]) -> int:
        return self._add(ARRAY, struct.pack(f"<{len(items) + 1}Q", 0, *items))
