"""The NCCL that a process has mapped, and where in it breakpoints may go."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from dshealthd.core.host import Host, Signature, read_bytes, signature
from dshealthd.jobs.launches.obstacle import Obstacle, Refused
from dshealthd.jobs.launches.programs import FUNCTIONS, INIT, MAX_PROCESSES, ORDERED, UNORDERED
from dshealthd.jobs.nccl.release import MAPS_LIMIT, UnknownRelease, opened, parse_maps
from dshealthd.linux.elf import Function, functions

_ENDBR64 = b"\xf3\x0f\x1e\xfa"
_NECESSARY = frozenset((*INIT[:1], "ncclAllReduce"))
_KEPT = MAX_PROCESSES
"""Libraries whose functions are remembered: one for each rank at most."""


class OpenedNccl(NamedTuple):
    """An open library, and the offsets of the functions that can be counted."""

    descriptor: int
    offsets: Mapping[str, int]


class MappedNccl:
    """A reader of the libraries of processes, which parses each file once."""

    def __init__(self, host: Host) -> None:
        """Read processes of this host."""
        self._host = host
        self._known: dict[Signature, dict[str, Function]] = {}

    @contextlib.contextmanager
    def opened(self, pid: int) -> Iterator[OpenedNccl]:
        """Yield the library of NCCL in a process. `Refused`, OSError."""
        maps = read_bytes(self._host.proc(f"{pid}/maps"), MAPS_LIMIT)
        mapped = [one for one in parse_maps(maps) if one.may_contain_nccl]
        own = [one for one in mapped if one.is_nccl]
        if not mapped:
            raise Refused(Obstacle.NO_LIBRARY)
        if len(own) > 1:
            raise Refused(Obstacle.UNREADABLE, "it has mapped more than one NCCL")
        one = (own or mapped)[0]
        with contextlib.ExitStack() as stack:
            try:
                descriptor = stack.enter_context(opened(self._host, pid, one))
            except (UnknownRelease, OSError, ValueError, ArithmeticError) as error:
                raise Refused(Obstacle.UNREADABLE, f"{one.path}: {error}") from error
            found = self._functions(descriptor)
            if not found.keys() >= _NECESSARY:
                # PyTorch is often built with NCCL linked in; its functions are hidden there.
                reason = Obstacle.UNREADABLE if own else Obstacle.STATIC_LIBRARY
                raise Refused(reason, f"{one.path} does not export NCCL's functions")
            yield OpenedNccl(descriptor, places(found))

    def _functions(self, descriptor: int) -> dict[str, Function]:
        key = signature(os.fstat(descriptor))
        if key not in self._known:
            if len(self._known) >= _KEPT:
                self._known.clear()
            try:
                self._known[key] = functions(descriptor, FUNCTIONS)
            except (OSError, struct.error, ValueError, ArithmeticError) as error:
                raise Refused(Obstacle.UNREADABLE, f"not a sound library: {error}") from error
        return self._known[key]


def places(found: Mapping[str, Function]) -> dict[str, int]:
    """Return the offsets for breakpoints. `Refused` if an operation would be single-stepped.

    Only a `push` is emulated, at some 1 µs a call; another instruction takes 7 to 9 µs, with a
    trap of its own: too much for what is called at each launch, not for what makes or ends a
    communicator (NVIDIA's `ncclCommInitRankConfig` begins with a `mov`). After `endbr64`, the next
    instruction takes the breakpoint.
    """
    offsets = {}
    for name, (offset, code) in found.items():
        skipped = 4 * code.startswith(_ENDBR64)
        first = code[skipped + code[skipped : skipped + 1].startswith(b"\x41") :]
        pushes = first[:1] and 0x50 <= first[0] <= 0x57  # noqa: PLR2004 - rax to rdi, r8 to r15
        if not pushes and name in {*ORDERED, *UNORDERED}:
            raise Refused(Obstacle.SINGLE_STEPPED, f"{name} does not begin with push")
        offsets[name] = offset + skipped
    return offsets
