"""The node of a soak: an agent, simulated GPUs and a kernel log, and what can be done to them."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dshealthd.training.message import Message
from tests.agents import RunningAgent, running
from tests.jobs.heartbeats.senders import sending
from tests.jobs.machines import TORCH
from tests.kernel_log import KernelLog
from tests.nvml.simulator import Simulator

GPUS = 8


class Node:
    """What faults are done to."""

    def __init__(self, agent: RunningAgent, gpus: Simulator, log: KernelLog) -> None:
        self.agent = agent
        self.gpus = gpus
        self.log = log
        self.job_number = 0

    @contextlib.contextmanager
    def fault(self, entry: dict[str, Any], dice: random.Random) -> Iterator[set[int]]:
        """Have a fault for as long as the context lasts; gives the GPUs that it takes down."""
        with getattr(self, f"_{entry['action']}")(entry, dice) as down:
            yield down

    @contextlib.contextmanager
    def _nvml(self, entry: dict[str, Any], dice: random.Random) -> Iterator[set[int]]:
        count = dice.randint(*entry["gpus"])
        those = set(dice.sample(range(GPUS), count))
        targets: list[int | None] = [*sorted(those)]
        for gpu in targets or [None]:
            self.gpus.fault(entry["kind"], entry.get("value", 1), gpu=gpu)
        try:
            yield those if entry["down"] else set()
        finally:
            self.gpus.clear_faults()

    @contextlib.contextmanager
    def _driver(self, _entry: dict[str, Any], _dice: random.Random) -> Iterator[set[int]]:
        self.gpus.set(None, "no_driver", 1)
        try:
            yield set()
        finally:
            self.gpus.set(None, "no_driver", 0)

    @contextlib.contextmanager
    def _xids(self, entry: dict[str, Any], dice: random.Random) -> Iterator[set[int]]:
        for _ in range(entry["lines"]):
            code = dice.choice((13, 31, 43, 45, 63, 94))
            bus = self.gpus.value(0, "pci")[4:-2].lower()
            with contextlib.suppress(BlockingIOError):  # the FIFO is full: a kernel overwrites
                self.log.say(f"NVRM: Xid (PCI:{bus}): {code}, pid=1, name=x, a soak")
        yield set()

    @contextlib.contextmanager
    def _kill(self, _entry: dict[str, Any], _dice: random.Random) -> Iterator[set[int]]:
        for worker in self.agent.workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
        yield set()

    @contextlib.contextmanager
    def _stop(self, entry: dict[str, Any], dice: random.Random) -> Iterator[set[int]]:
        os.kill(self.agent.pid, signal.SIGSTOP)
        try:
            time.sleep(dice.uniform(*entry["seconds"]))
        finally:
            os.kill(self.agent.pid, signal.SIGCONT)
        yield set()

    @contextlib.contextmanager
    def _idle(self, entry: dict[str, Any], _dice: random.Random) -> Iterator[set[int]]:
        with contextlib.ExitStack() as stack:
            for number in range(entry["connections"]):
                stack.enter_context(
                    socket.create_connection(
                        (self.agent.address, self.agent.port),
                        10.0,
                        source_address=(f"127.0.1.{number % 100 + 1}", 0),
                    )
                )
            yield set()

    @contextlib.contextmanager
    def _garbage(self, entry: dict[str, Any], dice: random.Random) -> Iterator[set[int]]:
        for _ in range(entry["requests"]):
            with (
                contextlib.suppress(ConnectionError, TimeoutError),
                socket.create_connection((self.agent.address, self.agent.port), 5.0) as connection,
            ):
                connection.sendall(dice.randbytes(dice.randint(1, 20_000)))
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(5.0)
                connection.recv(1000)
        yield set()

    @contextlib.contextmanager
    def _job(self, entry: dict[str, Any], _dice: random.Random) -> Iterator[set[int]]:
        self.job_number += 1
        run = {**TORCH, "TORCHELASTIC_RUN_ID": f"soak-{self.job_number}"}
        with contextlib.ExitStack() as stack:
            for rank in range(entry["ranks"]):
                sender = stack.enter_context(sending({**run, "RANK": str(rank)}))
                sender.tell(Message(step=1, sent=time.monotonic()))
            yield set()


@contextlib.contextmanager
def node(directory: Path) -> Iterator[Node]:
    """Run an agent with the shipped intervals on a node of eight GPUs."""
    gpus = Simulator(directory / "gpus")
    gpus.pci_sysfs(directory / "sys")
    log = KernelLog(directory / "dev" / "kmsg")
    flags = ("--path.sysfs", str(directory / "sys"), "--path.dev", str(directory / "dev"))
    # Ctrl-C ends the soak, not the agent: the terminal sends it to a whole process group.
    popen = functools.partial(subprocess.Popen, process_group=0)
    with running(directory, "", environment=gpus.environment(), flags=flags, popen=popen) as agent:
        yield Node(agent, gpus, log)
    log.close()
