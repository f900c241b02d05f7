"""Breakpoints at NCCL's functions in single processes: how this kernel can set them, if at all.

All are held by descriptors: however this process ends, the kernel removes them. Returns of
functions are never probed, which changes the stack of the process, and on Linux 6.11 to 6.13 kills
processes whose seccomp filter does not know the system call uretprobe.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import defaultdict
from collections.abc import Mapping

from dshealthd.core.host import Host, lines_of, read
from dshealthd.jobs.launches import bpf, programs
from dshealthd.jobs.launches.obstacle import Obstacle, Refused, refused_by_kernel
from dshealthd.linux.elf import functions

_RIGHTS = {
    "CAP_DAC_READ_SEARCH": 2,
    "CAP_SETGID": 6,
    "CAP_SETUID": 7,
    "CAP_SYS_PTRACE": 19,
}
"""Numbers of the capabilities without which other users' ranks or libraries are not found."""
_HOST_PIDS = 0xEFFFFFFC
"""Inode of the first PID namespace, whose pids programs have (PID_NS_INIT_INO, linux/nsfs.h)."""
_BEGINNINGS = frozenset((*programs.INIT, *programs.SCALABLE))
_TRIED = "getppid"
"""A function of libc that does nothing else, to try breakpoints on in this process."""


class Breakpoints:
    """Sets and removes breakpoints at NCCL's functions, one process at a time."""

    def __init__(self, host: Host) -> None:
        """Try out what the kernel has. `Refused` if it has nothing that does."""
        if os.uname().machine != "x86_64":
            raise Refused(Obstacle.UNSUPPORTED, f"not written for {os.uname().machine}")
        if lacking := _lacking():
            raise Refused(Obstacle.DENIED, f"this process lacks {', '.join(lacking)}")
        if os.stat("/proc/self/ns/pid").st_ino != _HOST_PIDS:
            raise Refused(Obstacle.UNSUPPORTED, "not in the host's PID namespace")
        self._programs: dict[bytes, int] = {}
        self._links: dict[int, list[int]] = {}
        try:
            self.maps = programs.Maps()
        except OSError as error:
            raise refused_by_kernel(host, error, "maps") from error
        try:
            hit = self._is_hit()
        except OSError as error:
            self.close()
            raise refused_by_kernel(host, error, "uprobe_multi") from error
        if not hit:
            self.close()
            raise Refused(Obstacle.UNSUPPORTED, "uprobe_multi sees one thread of a process only")

    def _is_hit(self) -> bool:
        """Return whether a breakpoint in this process is hit in a second thread. OSError.

        Before Linux 6.10, uprobe_multi with a pid saw one thread, and NCCL is called from several.
        Older kernels have perf's uprobes, but want CAP_SYS_ADMIN for them.
        """
        library = ctypes.CDLL("libc.so.6")
        mapped = [
            line.split(None, 5)[-1]
            for line in lines_of(read("/proc/self/maps"))
            if "/libc.so.6" in line or "/libc-" in line
        ]
        descriptor = os.open(mapped[0], os.O_RDONLY | os.O_CLOEXEC)
        pid = os.getpid()
        try:
            offset = functions(descriptor, {_TRIED})[_TRIED].offset
            self.maps.admit(pid)
            self.attach(pid, descriptor, {programs.DESTROY[0]: offset})
            caller = threading.Thread(target=getattr(library, _TRIED))
            caller.start()
            caller.join()
            return self.maps.hits(pid).hits > 0
        finally:
            os.close(descriptor)
            self.detach(pid)
            self.maps.forget(pid)

    def attach(self, pid: int, library: int, offsets: Mapping[str, int]) -> None:
        """Set breakpoints at functions of a library, given as descriptor, in a process. OSError."""
        path, held = f"/proc/self/fd/{library}", self._links.setdefault(pid, [])
        places: defaultdict[int, list[int]] = defaultdict(list)
        # Last what begins a communicator: whatever is done with one that was seen is seen as well.
        for name, offset in sorted(offsets.items(), key=lambda entry: entry[0] in _BEGINNINGS):
            places[self._program(name)].append(offset)
        try:
            for program, where in places.items():
                held.append(bpf.attach(program, path, where, pid))
        except OSError:
            self.detach(pid)
            raise

    def detach(self, pid: int) -> None:
        """Remove the breakpoints at NCCL's functions from a process, if it has some."""
        for link in self._links.pop(pid, ()):
            os.close(link)

    def close(self) -> None:
        """Remove all breakpoints."""
        for pid in list(self._links):
            self.detach(pid)
        while self._programs:
            os.close(self._programs.popitem()[1])
        self.maps.close()

    def _program(self, function: str) -> int:
        """Return the program for a function, loaded on first use: most have it in common."""
        if function in _BEGINNINGS:
            text = programs.initialize(self.maps, scalable=function in programs.SCALABLE)
        elif function in programs.SPLIT:
            text = programs.split(self.maps)
        elif function in programs.DESTROY:
            text = programs.destroy(self.maps)
        else:
            ordered = function in programs.ORDERED
            argument = (programs.ORDERED if ordered else programs.UNORDERED)[function]
            text = programs.launch(self.maps, argument, ordered=ordered)
        if text not in self._programs:
            self._programs[text] = bpf.load_program(text)
        return self._programs[text]


def _lacking() -> list[str]:
    """Return the rights that this process lacks. CAP_BPF and CAP_PERFMON are tried instead."""
    status = read("/proc/self/status")
    held = int(status.partition("\nCapEff:")[2].split(None, 1)[0], 16)
    return [name for name, number in _RIGHTS.items() if not held >> number & 1]
