"""A job of genuine NCCL on this machine, and the books of what its ranks were made to do.

The books are the truth that answers of RAS are held against; they are kept from the commands alone,
and know nothing of what NCCL says.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import mmap
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

SCRIPT = Path(__file__).with_name("rank.py")
_numbers = itertools.count(1)
RAS_PORT = 28028
GPUS = 8
NO_COLOR = -1

LOOPBACK = {
    "NCCL_SOCKET_IFNAME": "=lo",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_CUMEM_HOST_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MIN_NCHANNELS": "1",
    "NCCL_MAX_NCHANNELS": "1",
    "NCCL_BUFFSIZE": "65536",
    "NCCL_WORK_FIFO_BYTES": "65536",
}
"""What NCCL needs to take loopback and shared memory, with small buffers as no data moves."""


class Place(Protocol):
    """Where a rank runs."""

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process there."""


class Fate(enum.Enum):
    """What was done to a process."""

    RUNS = "runs"
    STOPPED = "stopped"
    KILLED = "killed"
    EXITED = "exited"


@dataclass
class Book:
    """What is true of one communicator."""

    members: list[int]
    """Ranks of the job, in the order of their numbers in the communicator."""
    launched: dict[int, Counter[str]] = field(default_factory=dict)
    """By rank of the job, how many collectives of each kind it launched."""
    left: set[int] = field(default_factory=set)
    """Ranks of the job that have destroyed it."""


class Rank:
    """One process."""

    def __init__(
        self,
        number: int,
        folder: Path,
        environment: Mapping[str, str],
        popen: Callable[..., Any],
        script: Path,
    ) -> None:
        self.number = number
        self.fate = Fate.RUNS
        self.since = time.monotonic()
        """When its fate was done to it."""
        with (folder / f"rank-{number}.log").open("wb") as log:
            self.process: subprocess.Popen[str] = popen(
                [sys.executable, str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
                bufsize=1,
            )

    @property
    def pid(self) -> int:
        """Return its pid."""
        return self.process.pid

    def say(self, line: str) -> None:
        """Have it make a call, and do not wait for it."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        """Return what a call returned."""
        assert self.process.stdout is not None
        answer = self.process.stdout.readline().rstrip("\n")
        assert answer.startswith("ok"), f"rank {self.number}: {answer!r}"
        return answer[3:]

    def ask(self, line: str) -> str:
        """Have it make a call."""
        self.say(line)
        return self.hear()

    def end(self) -> None:
        """Kill it, if it runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                assert stream is not None
                stream.close()


class Job:
    """Ranks with one simulated GPU each, joined in the communicator `world`."""

    def __init__(
        self,
        lib: Path,
        size: int,
        folder: Path,
        environment: Mapping[str, str] | None = None,
        wrap: Iterable[Mapping[str, str]] = (),
        stations: Sequence[Place] = (),
        script: Path = SCRIPT,
    ) -> None:
        """Start the processes; `wrap` has what single ranks have in their environment. With
        `stations` rank number i runs on the i-th of them, otherwise all run here.
        """
        self.size, self.folder = size, folder
        self.books: dict[str, Book] = {}
        # An address of its own, so that nothing else on the machine shares the port.
        self.address = f"127.{os.getpid() >> 8 & 255}.{os.getpid() & 255}.{next(_numbers)}"
        control = folder / f"control-{self.address}"
        control.write_bytes(bytes(mmap.PAGESIZE))
        with control.open("r+b") as file:
            self._control = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        shared = {
            "PATH": os.environ["PATH"],
            "LD_LIBRARY_PATH": str(lib),
            "NCCLSIM_LIB": str(lib),
            "NCCLSIM_CONTROL": str(control),
            "NCCLSIM_GPUS": str(GPUS),
            **LOOPBACK,
            "NCCL_RAS_ADDR": f"{self.address}:{RAS_PORT}",
            # Standard output is the rank's own.
            "NCCL_DEBUG": "WARN",
            "NCCL_DEBUG_FILE": str(folder / "nccl-%p.log"),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "SLURM_JOB_ID": str(next(_numbers)),
            **(environment or {}),
        }
        self.name = f"slurm-{shared['SLURM_JOB_ID']}"
        own = [*wrap, *([{}] * size)]
        self.ranks = [
            Rank(
                number,
                folder,
                {**shared, "RANK": str(number), "LOCAL_RANK": str(number % GPUS), **own[number]},
                stations[number].popen if stations else subprocess.Popen,
                script,
            )
            for number in range(size)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def join(
        self, name: str = "world", members: Iterable[int] | None = None, how: str = "init"
    ) -> None:
        """Make a communicator of ranks of the job, all by default."""
        chosen = list(range(self.size) if members is None else members)
        unique = self.ranks[chosen[0]].ask("id")
        self._together(
            {
                rank: f"{how} {name} {len(chosen)} {number} {unique}"
                for number, rank in enumerate(chosen)
            }
        )
        self._open(name, chosen)

    def split(self, name: str, colors: Iterable[int], parent: str = "world") -> None:
        """Split a communicator: `colors` are those of its members; the parts are `name/COLOR`."""
        members = self.books[parent].members
        chosen = dict(zip(members, colors, strict=True))
        self._together(
            {rank: f"split {parent} {name}/{color} {color} 0" for rank, color in chosen.items()}
        )
        for color in sorted(set(chosen.values()) - {NO_COLOR}):
            self._open(f"{name}/{color}", [rank for rank in members if chosen[rank] == color])

    def launch(self, name: str, operation: str, times: int, ranks: Iterable[int] = ()) -> None:
        """Have ranks of the job, all members by default, launch a collective."""
        book = self.books[name]
        chosen = list(ranks) or book.members
        self._together(dict.fromkeys(chosen, f"do {name} {operation} {times}"))
        for rank in chosen:
            # RAS counts neither send and receive nor what a communicator of one rank does.
            if not operation.startswith(("Send", "Recv")) and len(book.members) > 1:
                book.launched[rank][operation] += times

    def send(self, name: str, sender: int, receiver: int, times: int) -> None:
        """Have a rank send to another one, which receives; NCCL connects them at the first."""
        numbers = [self.books[name].members.index(rank) for rank in (sender, receiver)]
        self._together(
            {
                sender: f"do {name} Send{numbers[1]} {times}",
                receiver: f"do {name} Recv{numbers[0]} {times}",
            }
        )

    def hold(self) -> None:
        """Have kernels that are launched not end."""
        self._control[0] = 1

    def destroy(self, name: str, rank: int) -> None:
        """Have one rank destroy a communicator."""
        self.ranks[rank].ask(f"destroy {name}")
        self.books[name].left.add(rank)

    def destroy_all(self) -> None:
        """Have all ranks destroy all communicators."""
        for name, book in self.books.items():
            self._together(dict.fromkeys(book.members, f"destroy {name}"))

    def stop(self, rank: int) -> None:
        """Stop a rank by a signal."""
        self.ranks[rank].process.send_signal(signal.SIGSTOP)
        self._fate(rank, Fate.STOPPED)

    def resume(self, rank: int) -> None:
        """Let a stopped rank go on."""
        self.ranks[rank].process.send_signal(signal.SIGCONT)
        self._fate(rank, Fate.RUNS)

    def kill(self, rank: int) -> None:
        """Kill a rank."""
        self.ranks[rank].process.kill()
        self.ranks[rank].process.wait(60)
        self._fate(rank, Fate.KILLED)

    def leave(self, rank: int) -> None:
        """Have a rank end by itself, without having destroyed anything."""
        self.ranks[rank].say("exit")
        assert self.ranks[rank].process.wait(60) == 0
        self._fate(rank, Fate.EXITED)

    def ended(self) -> dict[int, int]:
        """Return the exit status of ranks that ended though nobody made them."""
        return {
            rank.number: status
            for rank in self.ranks
            if rank.fate in {Fate.RUNS, Fate.STOPPED}
            and (status := rank.process.poll()) is not None
        }

    def close(self) -> None:
        """End all."""
        for rank in self.ranks:
            rank.end()
        self._control.close()

    def _open(self, name: str, members: list[int]) -> None:
        self.books[name] = Book(members, {rank: Counter() for rank in members})

    def _fate(self, rank: int, fate: Fate) -> None:
        self.ranks[rank].fate, self.ranks[rank].since = fate, time.monotonic()

    def _together(self, lines: Mapping[int, str]) -> None:
        for rank, line in lines.items():
            self.ranks[rank].say(line)
        for rank in lines:
            self.ranks[rank].hear()
