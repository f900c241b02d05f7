"""What answers in NCCL's place in the tests: replays answers by the protocol of RAS, or misbehaves.

`python -m tests.jobs.ras.server ADDRESS PORT BEHAVIOR [FILE …]` listens as NCCL does
(SO_REUSEPORT), prints its port, and serves until it is killed. Each query is answered with the next
file, the last one over and over. Real NCCL needs a GPU; the texts follow its source.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.jobs.elf import library as write_library

BEHAVIORS = (
    "json",  # NCCL 2.28.7 and later
    "text",  # before: knows no SET FORMAT
    "mute",  # accepts and says nothing, as a stopped process does
    "stall",  # speaks the protocol, and never answers the question
    "garbage",  # what speaks another protocol
    "flood",  # 100 MB of answer
    "trickle",  # a byte of answer each 10 ms
    "cut",  # closes in the middle of the answer
)
COUNTS = {"Broadcast": 3, "Reduce": 0, "AllGather": 40, "ReduceScatter": 40, "AllReduce": 1000}


mapped: list[mmap.mmap] = []
"""What stands for NCCL's library, for as long as the process lives."""


def library(place: Path, version: str = "2.29.7") -> Path:
    """Write what stands for `libnccl.so.2` of a release, and return its place."""
    path = place / f"nccl-{version}" / "libnccl.so.2"
    write_library(path, f"NCCL version {version}+cuda12.9".encode() if version else b"nothing")
    return path


@dataclass
class Rank:
    """A rank as NCCL's JSON shows it."""

    number: int
    pid: int = 4000
    host: str = "192.0.2.1"
    gpu: int = 0
    init_state: int = 0
    async_error: int = 0
    flags: Sequence[str] = ()
    counts: Mapping[str, int] = field(default_factory=dict)

    def present(self) -> dict[str, object]:
        """Return a rank that answered."""
        flags = {
            name: name in self.flags for name in ("finalize_called", "destroy_flag", "abort_flag")
        }
        status = {"init_state": self.init_state, "async_error": self.async_error, **flags}
        return {**self._place(), "status": status, "collective_counts": {**COUNTS, **self.counts}}

    def missing(self) -> dict[str, object]:
        """Return a rank that did not answer."""
        return {
            **self._place(),
            "status": {name: name in self.flags for name in ("unresponsive", "considered_dead")},
        }

    def _place(self) -> dict[str, object]:
        return {
            "rank": self.number,
            "host": self.host,
            "pid": self.pid,
            "cuda_dev": self.gpu,
            "nvml_dev": self.gpu,
        }


@dataclass
class Communicator:
    """A communicator as NCCL's JSON shows it."""

    ranks: Sequence[Rank]
    missing: Sequence[Rank] = ()
    name: str = "1f00ba4"

    def table(self) -> dict[str, object]:
        """Return it with its ranks."""
        return {
            "hash": f"0x{self.name}",
            "secondary_hash": "0x1:0x2",
            "size": len(self.ranks) + len(self.missing),
            "ranks_count": len(self.ranks),
            "missing_ranks_count": len(self.missing),
            "ranks": [rank.present() for rank in self.ranks],
            "missing_ranks": [rank.missing() for rank in self.missing],
        }


def document(*communicators: Communicator, version: str = "2.29.7", timeouts: int = 0) -> bytes:
    """Return an answer in JSON, laid out as NCCL does, with the flaw that 2.28.7 and 2.28.9 have.

    A comma that is not there.
    """
    answer = {
        "nccl_version": version,
        "cuda_runtime_version": 12090,
        "cuda_driver_version": 13000,
        "timestamp": "2026-11-21 09:00:00",
        "communicators_count": len(communicators),
        "communicators": [communicator.table() for communicator in communicators],
        "ras": {"collection_time_sec": 0.012, "timeouts_count": timeouts},
    }
    text = json.dumps(answer, indent=2) + "\n"
    if version.startswith(("2.28.7", "2.28.9")):
        text = re.sub(r'("nvml_dev": -?\d+),(\s+"status": \{\s+"unresponsive")', r"\1\2", text)
    return text.encode()


class Process:
    """A process of a job, or of somebody else, that serves at an address."""

    def __init__(
        self,
        behavior: str,
        *answers: Path,
        address: str = "127.0.0.1",
        port: int = 0,
        environment: Mapping[str, str] | None = None,
        library: Path | None = None,
        record: Path | None = None,
    ) -> None:
        """Start it.

        It maps `library` as it would NCCL's, and writes each byte that it receives to `record`.
        """
        command = [sys.executable, "-m", "tests.jobs.ras.server", address, str(port), behavior]
        command += map(str, answers)
        own = {"PATH": os.environ["PATH"], "TEST_RECORD": str(record or os.devnull)}
        if library is not None:
            own["TEST_LIBRARY"] = str(library)
        self.popen = subprocess.Popen(
            command, stdout=subprocess.PIPE, env={**own, **(environment or {})}
        )
        assert self.popen.stdout is not None
        self.port = int(self.popen.stdout.readline())

    def close(self) -> None:
        """End it."""
        assert self.popen.stdout is not None
        self.popen.kill()
        self.popen.wait()
        self.popen.stdout.close()


class _Client:
    """One connection of the server."""

    def __init__(self, connection: socket.socket, behavior: str) -> None:
        self.connection = connection
        self.behavior = behavior
        self.received = b""

    def serve(self, answer: bytes) -> bool:
        """Read commands and reply; True once the connection is over."""
        data = self.connection.recv(4096)
        with open(os.environ["TEST_RECORD"], "ab") as record:
            record.write(data)
        self.received += data
        if self.behavior == "garbage":
            self.connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n" * 100)
            return True
        while self.behavior != "mute" and b"\n" in self.received:
            command, _, self.received = self.received.partition(b"\n")
            if command.lower() == b"verbose status":
                return self._answer(answer)
            if command.lower() == b"set format json" and self.behavior == "text":
                self.connection.sendall(b"ERROR: Unknown command SET FORMAT json\n")
                continue
            self.connection.sendall(self._reply(command.lower()))
        return not data

    def _reply(self, command: bytes) -> bytes:
        if command.startswith(b"client protocol "):
            return b"SERVER PROTOCOL 2\n"
        assert command == b"set format json" or command.removeprefix(b"timeout ").isdigit(), command
        return b"OK\n"

    def _answer(self, answer: bytes) -> bool:
        """Answer the question; False if the connection stays open."""
        if self.behavior == "stall":
            return False
        self.connection.setblocking(True)  # noqa: FBT003 - positional only
        try:
            if self.behavior == "flood":
                for _ in range(100):
                    self.connection.sendall(b"x" * 1_000_000)
            elif self.behavior == "trickle":
                while True:
                    self.connection.sendall(b"x")
                    time.sleep(0.01)
            self.connection.sendall(
                answer[: len(answer) // 2] if self.behavior == "cut" else answer
            )
        except OSError:  # the client has had enough
            pass
        return True


def main(address: str, port: int, behavior: str, answers: Sequence[str]) -> None:
    """Serve until killed."""
    assert behavior in BEHAVIORS, behavior
    if library := os.environ.get("TEST_LIBRARY"):
        with open(library, "rb") as file:
            mapped.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    contents = []
    for place in answers or [os.devnull]:
        with open(place, "rb") as file:
            contents.append(file.read())
    with (
        socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listener,
        selectors.DefaultSelector() as selector,
    ):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((address, port))
        listener.listen(64)
        print(listener.getsockname()[1], flush=True)
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is None:
                    connection, _ = listener.accept()
                    selector.register(
                        connection, selectors.EVENT_READ, _Client(connection, behavior)
                    )
                elif _served(key.data, contents):
                    selector.unregister(key.data.connection)
                    key.data.connection.close()


def _served(client: _Client, contents: list[bytes]) -> bool:
    try:
        over = client.serve(contents[0])
    except ConnectionError:
        return True
    if over and client.behavior in {"json", "text"} and len(contents) > 1:
        del contents[0]
    return over


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:])
