"""The BPF programs that run in the kernel when a rank enters a function of NCCL, and their maps.

Each looks up the process first, and does nothing for one that is not counted. Then it counts the
hit, and keeps by process and communicator what `Counts` has.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from typing import NamedTuple

from dshealthd.jobs.launches import bpf
from dshealthd.jobs.launches.bpf import (
    EXIT,
    add,
    call,
    if_null,
    increase,
    load,
    number,
    op,
    pointer,
    store,
    unless,
)

_COLLECTIVES = {
    "ncclAllReduce": 5,
    "ncclBroadcast": 5,
    "ncclReduce": 6,
    "ncclAllGather": 4,
    "ncclReduceScatter": 5,
    "ncclAlltoAll": 4,
    "ncclGather": 5,
    "ncclScatter": 5,
}
ORDERED: Mapping[str, int] = {
    f"{name}{form}": argument
    for name, argument in _COLLECTIVES.items()
    for form in ("", "Config")  # since NCCL 2.32; neither form calls the other
}
"""Collectives, which all ranks of a communicator launch in the same order, and which argument is
the communicator. `ncclBcast` calls `ncclBroadcast`.
"""
UNORDERED: Mapping[str, int] = {
    "ncclSend": 4,
    "ncclRecv": 4,
    "ncclPutSignal": 9,
    "ncclSignal": 4,
    "ncclWaitSignal": 2,
}
"""Which ranks launch as often as they have peers; the last three since NCCL 2.29."""
INIT = ("ncclCommInitRank", "ncclCommInitRankConfig")
"""Whose unique id is passed by value: above the return address."""
SCALABLE = ("ncclCommInitRankScalable",)
"""Whose unique ids are in an array, the same for all ranks; since NCCL 2.23."""
SPLIT = ("ncclCommSplit",)
DESTROY = ("ncclCommDestroy", "ncclCommAbort")
FUNCTIONS = frozenset((*ORDERED, *UNORDERED, *INIT, *SCALABLE, *SPLIT, *DESTROY))

MAX_PROCESSES = 64
"""Four ranks for each GPU of the largest nodes."""
MAX_COMMUNICATORS = 64
"""Communicators that are kept of one process; with tensor, pipeline, data and expert parallelism a
rank has some ten. No process can use up the places of another.
"""
PLACES = MAX_PROCESSES * MAX_COMMUNICATORS
"""Places of each map: far more than it takes of processes, and of communicators whose
initialization was seen and not read yet.
"""
RING = 64
"""Latest launches whose times are kept; a power of two."""
_ID = 40
"""Bytes kept of ncclUniqueId: a random number and the address of the root (NCCL: bootstrap.h)."""
_COUNT, _SENDS, _FIRST, _LAST, _SPLITS, _TIMES = 0, 8, 16, 24, 32, 40
_COUNTS = struct.Struct(f"={_TIMES // 8 + RING}Q")
_INIT = struct.Struct(f"={_ID}sQI4xQ")
"""Of the register with the rank, an int, the other half is undefined."""
_SPLIT = struct.Struct(f"=QQi{_ID - 20}x")
"""What a split has in place of a unique id."""
_VALUE = -16 - _INIT.size
"""Where on the stack programs put an `_INIT` together."""
_KEY = struct.Struct("=QQ")
_PROCESS = struct.Struct("=QQQ")
_HITS, _REFUSED, _KEPT = 0, 8, 16
_ARGUMENTS = (112, 104, 96, 88, 72, 64)
"""Offsets in pt_regs of rdi, rsi, rdx, rcx, r8, r9."""
_STACK = 152  # rsp
_NO_EXIST = 1  # BPF_NOEXIST


class Counts(NamedTuple):
    """What was counted of one process's communicator; times are in ns of CLOCK_MONOTONIC."""

    collectives: int
    sends: int
    """Sends and receives."""
    first: int
    """When it was launched in, or split, first."""
    last: int
    """When it was launched in last; 0 if never."""
    times: dict[int, int]
    """When the latest collectives were launched, by their number from 0."""


class Split(NamedTuple):
    """Where a communicator was split off: what NCCL itself makes the new one's hash of."""

    parent: tuple[int, int]
    """Address, and `Counts.first`."""
    number: int
    """How often this rank had split the parent before. All its ranks do, in one order: those
    without a color take part, too (NCCL: ncclCommInitChildComm counts them as well)."""
    color: int


class Init(NamedTuple):
    """An initialization that a process began."""

    slot: int
    """The address at which NCCL puts the communicator's."""
    origin: bytes | Split
    """What all ranks of the communicator have in common, and no other has: a unique id, or where it
    was split off."""
    rank: int
    """Its own; of a split it is unknown."""
    at: int


class Hits(NamedTuple):
    """How often BPF programs ran for one process."""

    hits: int
    refused: int
    """Launches that were not counted, for want of a place."""


class Maps:
    """The maps that BPF programs and this process share; all entries are by process."""

    def __init__(self) -> None:
        """Create them; OSError if that is not permitted."""
        self._descriptors: list[int] = []
        self.processes = self._create(bpf.HASH, 8, _PROCESS.size)
        self.counts = self._create(bpf.HASH, _KEY.size, _COUNTS.size)
        self.inits = self._create(bpf.LRU_HASH, _KEY.size, _INIT.size)
        self.zeros = self._create(bpf.ARRAY, 4, _COUNTS.size, 1)

    def _create(self, kind: int, key: int, value: int, places: int = PLACES) -> int:
        self._descriptors.append(bpf.create_map(kind, key, value, places))
        return self._descriptors[-1]

    def close(self) -> None:
        """Close the BPF maps."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def admit(self, pid: int) -> None:
        """Let BPF programs count the launches of a process, from 0. OSError."""
        self.forget(pid)
        bpf.update(self.processes, struct.pack("=Q", pid), bytes(_PROCESS.size))

    def forget(self, pid: int) -> None:
        """Remove a process and its launches from the BPF maps. OSError."""
        bpf.delete(self.processes, struct.pack("=Q", pid))
        for descriptor, size in ((self.counts, _COUNTS.size), (self.inits, _INIT.size)):
            for key, _ in list(bpf.entries(descriptor, _KEY.size, size, PLACES)):
                if _KEY.unpack(key)[0] == pid:
                    bpf.delete(descriptor, key)

    def hits(self, pid: int) -> Hits:
        """Return how often BPF programs ran for a process so far. OSError."""
        value = bpf.lookup(self.processes, struct.pack("=Q", pid), _PROCESS.size)
        return Hits(*(_PROCESS.unpack(value)[:2] if value else (0, 0)))

    def read(self) -> dict[tuple[int, int], Counts]:
        """Return the launches in BPF maps, by process and communicator's address. OSError."""
        found = {}
        for key, value in bpf.entries(self.counts, _KEY.size, _COUNTS.size, PLACES):
            pid, communicator = _KEY.unpack(key)
            count, sends, first, last, _, *times = _COUNTS.unpack(value)
            # The oldest few may be overwritten while the kernel copies the value.
            numbers = range(max(0, count - RING + 4), count)
            kept = {each: times[each % RING] for each in numbers}
            found[pid, communicator] = Counts(count, sends, first, last, kept)
        return found

    def initialized(self) -> list[tuple[int, Init]]:
        """Return the communicators' initializations in BPF maps, with their processes. OSError."""
        found = []
        for key, value in bpf.entries(self.inits, _KEY.size, _INIT.size, PLACES):
            pid, slot = _KEY.unpack(key)
            unique, parent, rank, at = _INIT.unpack(value)
            origin: bytes | Split = unique
            if parent:
                first, number, color = _SPLIT.unpack(unique)
                origin = Split((parent, first), number, color)
            found.append((pid, Init(slot, origin, rank, at)))
        return found


def _enter(maps: Maps) -> bytes:
    """Begin: r6 the registers of the process, r8 its entry, -16 of the stack its pid."""
    text = pointer(6, 1) + call(bpf.PID_TGID) + op(0x77, imm=32) + store(10, -16, 0)
    text += pointer(2, 10, -16) + call(bpf.LOOKUP, maps.processes) + if_null(EXIT)
    return text + pointer(8, 0) + number(1, 1) + increase(8, _HITS, 1)


def _argument(position: int) -> bytes:
    """Put an argument at -8 of the stack; from the seventh on they are above the return address."""
    if position < len(_ARGUMENTS):
        return load(1, 6, _ARGUMENTS[position]) + store(10, -8, 1)
    above = 8 * (position - len(_ARGUMENTS) + 1)
    text = load(3, 6, _STACK) + add(3, above) + pointer(1, 10, -8) + number(2, 8)
    return text + call(bpf.READ_USER)


def _count(maps: Maps, argument: int) -> bytes:
    """Point r7 to what is kept of the communicator in this argument, and have the time in r0."""
    refuse = number(1, 1) + increase(8, _REFUSED, 1) + EXIT
    find = pointer(2, 10, -16) + call(bpf.LOOKUP, maps.counts)
    new = load(1, 8, _KEPT)
    new += op(0xA5, 1, off=len(refuse) // 8, imm=MAX_COMMUNICATORS) + refuse  # if less, go on
    new += op(0x62, 10, 0, -20, 0) + pointer(2, 10, -20) + call(bpf.LOOKUP, maps.zeros)
    new += if_null(EXIT) + pointer(3, 0) + pointer(2, 10, -16) + number(4, _NO_EXIST)
    new += call(bpf.UPDATE, maps.counts)
    new += if_null(number(1, 1) + increase(8, _KEPT, 1)) + find  # 0: it was added
    text = _enter(maps) + _argument(argument) + find + if_null(new) + if_null(refuse)
    text += pointer(7, 0) + call(bpf.KTIME)
    return text + load(1, 7, _FIRST) + op(0x55, 1, off=1) + store(7, _FIRST, 0)


def launch(maps: Maps, argument: int, *, ordered: bool) -> bytes:
    """Return the BPF program that counts launches; this argument is the communicator."""
    text = _count(maps, argument) + store(7, _LAST, 0)
    if ordered:
        text += load(1, 7, _COUNT) + pointer(2, 1) + op(0x57, 2, imm=RING - 1)
        text += op(0x67, 2, imm=3) + op(0x0F, 2, 7) + store(2, _TIMES, 0)
        text += add(1, 1) + store(7, _COUNT, 1)
    else:
        text += number(1, 1) + increase(7, _SENDS, 1)
    return text + EXIT


def _keep(maps: Maps, slot: int) -> bytes:
    """Keep an initialization, with the slot that is in this argument, and end."""
    text = _argument(slot) + pointer(2, 10, -16) + pointer(3, 10, _VALUE) + number(4, 0)
    return text + call(bpf.UPDATE, maps.inits) + EXIT


def initialize(maps: Maps, *, scalable: bool) -> bytes:
    """Return the BPF program that keeps who initializes which communicator."""
    text = _enter(maps) + number(1, 0) + store(10, _VALUE + _ID, 1)
    text += load(1, 6, _ARGUMENTS[2]) + store(10, _VALUE + _ID + 8, 1)  # the rank
    text += call(bpf.KTIME) + store(10, _VALUE + _ID + 16, 0)
    unique = load(3, 6, _ARGUMENTS[4]) if scalable else load(3, 6, _STACK) + add(3, 8)
    text += unique + pointer(1, 10, _VALUE) + number(2, _ID) + call(bpf.READ_USER)
    return text + _keep(maps, 0)


def split(maps: Maps) -> bytes:
    """Return the BPF program that keeps which communicator is split, and how."""
    text = _count(maps, 0) + store(10, _VALUE + _ID + 16, 0)
    text += load(1, 10, -8) + store(10, _VALUE + _ID, 1)
    text += load(1, 7, _FIRST) + store(10, _VALUE, 1)
    text += load(1, 7, _SPLITS) + store(10, _VALUE + 8, 1) + add(1, 1) + store(7, _SPLITS, 1)
    text += load(1, 6, _ARGUMENTS[1]) + store(10, _VALUE + 16, 1)
    text += number(1, 0)
    for place in (*range(24, _ID, 8), _ID + 8):
        text += store(10, _VALUE + place, 1)
    return text + _keep(maps, 3)


def destroy(maps: Maps) -> bytes:
    """Return the BPF program that forgets a communicator, whose address the next one may get."""
    text = _enter(maps) + _argument(0) + pointer(2, 10, -16) + call(bpf.DELETE, maps.counts)
    return text + unless(0, 0, EXIT) + number(1, -1) + increase(8, _KEPT, 1) + EXIT
