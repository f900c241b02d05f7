"""The lab's machines: namespaces of their own, entered by a thread.

Or, where those are not permitted, just an address.

A thread, not a process, enters a machine: what it starts is a child of the lab like any other, and
a socket that it makes belongs to the machine's network for good and can then be used from every
thread.
"""

from __future__ import annotations

import abc
import ctypes
import json
import os
import select
import socket
import subprocess
import sys
import time
import unittest
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_CLONE_FS, _CLONE_NEWPID = 0x00000200, 0x20000000
_ENTERED = ("net", "uts", "ipc", "mnt")
_READY_SECONDS = 60.0
_END_SECONDS = 60.0
_HOLDER = Path(__file__).with_name("holder.py")

_libc = ctypes.CDLL(None, use_errno=True)


class NotPermitted(unittest.SkipTest):
    """This machine, or the user, does not allow what was asked for; the text says what and why.

    A test that meets it is skipped.
    """


class Station(abc.ABC):
    """One machine of the lab."""

    def __init__(self, name: str, address: str, directory: Path) -> None:
        """Prepare."""
        self.name, self.address, self.directory = name, address, directory
        self._children: list[subprocess.Popen[Any]] = []

    @property
    def pid(self) -> int | None:
        """Return the pid of the process that holds the namespaces; None without namespaces."""
        return None

    @abc.abstractmethod
    def inside(self, function: Callable[[], T]) -> T:
        """Call a function on the machine: what it opens and starts belongs to the machine.

        It must be quick and start no thread.
        """

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process on the machine, as a child of the lab and a session of its own.

        Options are those of `subprocess.Popen`.
        """
        process = self.inside(lambda: subprocess.Popen(command, start_new_session=True, **options))
        self._children = [*(child for child in self._children if child.poll() is None), process]
        return process

    @abc.abstractmethod
    def tool(self, *command: str, text: str = "", descriptors: Sequence[int] = ()) -> str:
        """Run a tool, which inherits the descriptors, on the machine and return what it prints.

        RuntimeError has what it complains about; NotPermitted where it is not installed, or the
        machine not the lab's to change.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """End whatever runs on the machine, and the machine."""


class Namespaces(Station):
    """A station with its own network, processes, mounts, host name and IPC."""

    def __init__(self, name: str, address: str, directory: Path, files: Mapping[str, Path]) -> None:
        """Prepare; `files` are to be seen in the place of others, by absolute path."""
        super().__init__(name, address, directory)
        self._files = files
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"lab {name}")
        self._holder: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Return the pid of the holder, which is process 1 inside."""
        return self._holder.pid if self._holder is not None else None

    def open(self) -> None:
        """Make the machine and have the thread enter it.

        NotPermitted says what the kernel refuses.
        """
        self._thread.submit(self._open).result()

    def _open(self) -> None:
        if _libc.unshare(_CLONE_FS | _CLONE_NEWPID) != 0:
            message = f"a pid namespace: {os.strerror(ctypes.get_errno())}"
            raise NotPermitted(message)
        files = {target: str(source) for target, source in self._files.items()}
        plan = json.dumps({"hostname": self.name, "files": files})
        holder = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_HOLDER), plan],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._holder = holder
        assert holder.stdout is not None
        ready, _, _ = select.select([holder.stdout], [], [], _READY_SECONDS)
        said = holder.stdout.readline().decode().strip() if ready else "no answer"
        if said != "ready":
            raise NotPermitted(said)
        namespaces = [os.open(f"/proc/{holder.pid}/ns/{kind}", os.O_RDONLY) for kind in _ENTERED]
        for namespace in namespaces:
            if _libc.setns(namespace, 0) != 0:
                raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")
            os.close(namespace)

    def inside(self, function: Callable[[], T]) -> T:
        """Call a function in the machine's thread."""
        return self._thread.submit(function).result()

    def tool(self, *command: str, text: str = "", descriptors: Sequence[int] = ()) -> str:
        """Run a tool on the machine; it inherits the descriptors."""

        def run() -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                command,
                input=text,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
                pass_fds=descriptors,
            )

        try:
            done = self.inside(run)
        except FileNotFoundError as error:
            message = f"{command[0]} is not installed"
            raise NotPermitted(message) from error
        if done.returncode != 0:
            message = f"{self.name}: {' '.join(command)}: {done.stderr.strip()}\n{text}"
            raise RuntimeError(message)
        return done.stdout

    def close(self) -> None:
        """Kill process 1, with which the kernel kills every other, and reap them.

        A process that does not end is an error.
        """
        self._thread.shutdown()  # lets the machine come about first, if it is being made
        if self._holder is not None:
            self._holder.kill()
            end = time.monotonic() + _END_SECONDS
            try:
                # The first process ends when all others have been reaped.
                for process in (*self._children, self._holder):
                    process.wait(max(0.1, end - time.monotonic()))
            finally:
                for pipe in (self._holder.stdin, self._holder.stdout):
                    assert pipe is not None
                    pipe.close()


class Loopback(Station):
    """A station that is no more than an address of 127.0.0.0/8."""

    def inside(self, function: Callable[[], T]) -> T:
        """Call a function."""
        return function()

    def tool(self, *command: str, **_given: Any) -> str:
        """Refuse: the tools change a network, and this one is not the lab's."""
        message = f"{command[0]} on {self.name}: without network namespaces, it is not the lab's"
        raise NotPermitted(message)

    def close(self) -> None:
        """Kill what was started here."""
        for process in self._children:
            process.kill()
            process.wait(_END_SECONDS)


def connect(station: Station, address: tuple[str, int], timeout: float = 60.0) -> socket.socket:
    """Return a TCP connection that starts on a machine; OSError as `connect(2)` has it."""
    made = station.inside(lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    try:
        made.settimeout(timeout)
        made.connect(address)
    except BaseException:
        made.close()
        raise
    return made


def listen(station: Station) -> socket.socket:
    """Return a TCP socket that listens on a machine's address."""
    return station.inside(lambda: socket.create_server((station.address, 0)))
