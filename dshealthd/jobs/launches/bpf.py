"""The system call bpf(2) and its instructions, as far as counting launches needs them.

Layouts are those of `union bpf_attr` (linux/bpf.h), the number of the system call is that of
x86-64: the programs know its registers only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterator, Sequence

_SYS_BPF = 321
"""Of x86-64 (arch/x86/entry/syscalls/syscall_64.tbl)."""
_MAP_CREATE, _MAP_LOOKUP, _MAP_UPDATE, _MAP_DELETE, _MAP_NEXT, _PROG_LOAD = range(6)
_LINK_CREATE = 28
"""Commands, kinds of maps and programs, and helpers: enum bpf_cmd and so on in linux/bpf.h."""
HASH, ARRAY, LRU_HASH = 1, 2, 9
_KPROBE, _UPROBE_MULTI = 2, 48
_ATTRIBUTE = 128
"""Bytes of the attribute; the kernel takes a longer one than it knows if the rest is 0."""
LOOKUP, UPDATE, DELETE, KTIME, PID_TGID, READ_USER = 1, 2, 3, 5, 14, 112
"""Helpers of the kernel that programs call."""
_libc = ctypes.CDLL(None, use_errno=True)


def op(code: int, dst: int = 0, src: int = 0, off: int = 0, imm: int = 0) -> bytes:
    """Return one BPF instruction."""
    return struct.pack("<BBhi", code, src << 4 | dst, off, imm)


def add(register: int, number: int) -> bytes:
    """Return BPF code that adds a number to a register."""
    return op(0x07, register, imm=number)


def load(register: int, place: int, offset: int) -> bytes:
    """Return BPF code that loads eight bytes from where another register points."""
    return op(0x79, register, place, offset)


def store(place: int, offset: int, register: int) -> bytes:
    """Return BPF code that stores a register where another one points."""
    return op(0x7B, place, register, offset)


def increase(place: int, offset: int, register: int) -> bytes:
    """Return BPF code that adds a register atomically to eight bytes where another one points."""
    return op(0xDB, place, register, offset)


def pointer(register: int, place: int, offset: int = 0) -> bytes:
    """Return BPF code that copies a register, and adds a number to the copy."""
    return op(0xBF, register, place) + add(register, offset)


def number(register: int, value: int) -> bytes:
    """Return BPF code that sets a register."""
    return op(0xB7, register, imm=value)


def call(helper: int, descriptor: int | None = None) -> bytes:
    """Return BPF code that calls a helper of the kernel, with a map as first argument if given."""
    first = b"" if descriptor is None else op(0x18, 1, 1, imm=descriptor) + op(0)
    return first + op(0x85, imm=helper)


def unless(register: int, value: int, text: bytes) -> bytes:
    """Return BPF code that runs some instructions unless a register has a value."""
    return op(0x15, register, off=len(text) // 8, imm=value) + text


EXIT = number(0, 0) + op(0x95)


def if_null(text: bytes) -> bytes:
    """Return BPF code that runs some instructions if a helper returned no pointer."""
    return op(0x55, 0, off=len(text) // 8) + text


def create_map(kind: int, key: int, value: int, entries: int) -> int:
    """Return the descriptor of a new BPF map; sizes are in bytes. OSError."""
    return _bpf(_MAP_CREATE, "5I", kind, key, value, entries, 0)


def lookup(descriptor: int, key: bytes, size: int) -> bytes | None:
    """Return the value of a BPF map's key; None if it has none. OSError."""
    value = ctypes.create_string_buffer(size)
    try:
        _bpf(_MAP_LOOKUP, "I4xQQ", descriptor, key, value)
    except FileNotFoundError:
        return None
    return value.raw


def update(descriptor: int, key: bytes, value: bytes) -> None:
    """Set the value of a BPF map's key. OSError."""
    _bpf(_MAP_UPDATE, "I4xQQQ", descriptor, key, value, 0)


def delete(descriptor: int, key: bytes) -> None:
    """Remove a key from a BPF map, if it is there. OSError."""
    with contextlib.suppress(FileNotFoundError):
        _bpf(_MAP_DELETE, "I4xQ", descriptor, key)


def entries(descriptor: int, key_size: int, size: int, most: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and values of a BPF map, at most as many as it has places. OSError.

    A program may change it meanwhile: the kernel then begins anew, and keys come twice.
    """
    key: bytes | int = 0
    for _ in range(most):
        after = ctypes.create_string_buffer(key_size)
        try:
            _bpf(_MAP_NEXT, "I4xQQ", descriptor, key, after)
        except FileNotFoundError:
            return
        key = after.raw
        if (value := lookup(descriptor, key, size)) is not None:
            yield key, value


def load_program(text: bytes) -> int:
    """Return the descriptor of a program for uprobes, after the kernel has verified it. OSError."""
    # bpf_probe_read_user is for programs under a license that the kernel counts as GPL-compatible.
    return _bpf(
        _PROG_LOAD,
        "IIQQIIQII20xI",
        *(_KPROBE, len(text) // 8, text, b"Dual MIT/GPL\0", 0, 0, 0, 0, 0, _UPROBE_MULTI),
    )


def attach(program: int, path: str, offsets: Sequence[int], pid: int) -> int:
    """Link a BPF program to breakpoints in one process. Return the descriptor that holds them.
    OSError.
    """
    places = struct.pack(f"={len(offsets)}Q", *offsets)
    return _bpf(
        _LINK_CREATE,
        "IIIIQQQQIII",
        *(program, 0, _UPROBE_MULTI, 0, os.fsencode(path) + b"\0", places, 0, 0),
        *(len(offsets), 0, pid),
    )


def _bpf(command: int, layout: str, *values: bytes | int | ctypes.Array[ctypes.c_char]) -> int:
    """Make the system call; bytes and buffers stand for their addresses."""
    kept = [
        ctypes.create_string_buffer(value, len(value)) if isinstance(value, bytes) else value
        for value in values
    ]
    numbers = [value if isinstance(value, int) else ctypes.addressof(value) for value in kept]
    attribute = ctypes.create_string_buffer(struct.pack(layout, *numbers), _ATTRIBUTE)
    result = int(_libc.syscall(_SYS_BPF, command, attribute, _ATTRIBUTE))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"bpf: {os.strerror(code)}")
    return result
