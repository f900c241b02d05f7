"""One look at other hosts over SSH: can they be reached, and which GPUs and sockets do they have?

The remote command is fixed and reads only kernel files. ssh never prompts for a password or a host
key (BatchMode), and nothing is forwarded.
"""

from __future__ import annotations

import functools
import os
import selectors
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dshealthd.doctor.hosts import command, last_line

if TYPE_CHECKING:
    from collections.abc import Sequence

CONNECT = 5
"""Seconds for a connection."""
DEADLINE = 15.0
"""Seconds for all hosts together."""
MAX_OUTPUT = 4 << 20
"""Maximum bytes from one host: 20,000 sockets."""
_AT_ONCE = 64
_CHUNK = 1 << 16
_MARK = "--sockets--"
_LOOK = f"ls /proc/driver/nvidia/gpus 2>/dev/null; echo {_MARK}; cat /proc/net/tcp /proc/net/tcp6"
_OPTIONS = ("-n", "-x", "-a", "-o", "ConnectionAttempts=1", "-o", "ControlMaster=no")
"""In addition to those of every call: nothing is read, forwarded, or left behind for others."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of one host."""

    problem: str = ""
    """Why it could not be reached."""
    gpus: int | None = None
    """GPUs known to its driver; None if no NVIDIA driver is loaded."""
    sockets: str = ""
    """Its `/proc/net/tcp` and `tcp6`."""


def look(hosts: Sequence[str], ssh: str, options: Sequence[str] = ()) -> dict[str, Answer]:
    """Query hosts in parallel over SSH, and return their answers by name.

    `ssh` is the program and `options` are its options. A name is never taken for an option. A call
    that has not answered by the deadline is killed.
    """
    end = time.monotonic() + DEADLINE
    waiting = list(dict.fromkeys(hosts))
    found: dict[str, Answer] = {}
    running: dict[str, _Call] = {}
    with selectors.DefaultSelector() as selector:
        while waiting or running:
            while waiting and len(running) < _AT_ONCE:
                name = waiting.pop(0)
                program = [ssh, *_OPTIONS, *options]
                arguments = command(program, name, ("sh", "-c", _LOOK), CONNECT)
                running[name] = _Call(arguments, selector)
            over = time.monotonic() >= end
            for key, _ in selector.select(0 if over else min(0.2, end - time.monotonic())):
                key.data()
            for name, call in list(running.items()):
                if over or call.has_ended:
                    found[name] = call.answer(over=over)
                    del running[name]
            if over:
                found |= {name: Answer(f"not queried within {DEADLINE:g} s") for name in waiting}
                waiting = []
    return found


class _Call:
    """A running ssh and its output so far."""

    def __init__(self, arguments: Sequence[str], selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._process = subprocess.Popen(  # noqa: S603 - no shell, and the name after `--`
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._said: list[bytearray] = []
        self._open: set[int] = set()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None  # noqa: S101 - both are pipes
            os.set_blocking(stream.fileno(), False)
            self._said.append(bytearray())
            self._open.add(stream.fileno())
            take = functools.partial(self._take, stream.fileno(), self._said[-1])
            selector.register(stream, selectors.EVENT_READ, take)

    @property
    def has_ended(self) -> bool:
        """Whether the remote command has ended, or its output exceeds the limit."""
        too_much = any(len(said) > MAX_OUTPUT for said in self._said)
        return too_much or (self._process.poll() is not None and not self._open)

    def answer(self, *, over: bool) -> Answer:
        """End the SSH call if it still runs, and return the host's answer."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                if stream.fileno() in self._open:
                    self._selector.unregister(stream)
                stream.close()
        return _answer(self._process.returncode, *map(bytes, self._said), over=over)

    def _take(self, descriptor: int, said: bytearray) -> None:
        chunk = os.read(descriptor, _CHUNK)
        said += chunk
        if not chunk:
            self._selector.unregister(descriptor)
            self._open.discard(descriptor)


def remedy(name: str, problem: str) -> str:
    """Return the command that fixes or investigates why a host cannot be reached over SSH."""
    if "Host key verification" in problem or "host key" in problem.lower():
        return f"ssh-keyscan -H {name} >> ~/.ssh/known_hosts"
    if "Permission denied" in problem:
        return f"ssh-copy-id {name}"
    if "resolve" in problem:
        return f"getent hosts {name}"
    return f"ssh -v -o BatchMode=yes -o ConnectTimeout={CONNECT} {name} true"


def _answer(code: int, output: bytes, errors: bytes, *, over: bool) -> Answer:
    text = output.decode(errors="replace")
    gpus, mark, sockets = text.partition(f"{_MARK}\n")
    if mark:
        names = gpus.split()
        return Answer("", len(names) or None, sockets)
    if over:
        return Answer(f"no answer within {DEADLINE:g} s")
    said = last_line(errors.decode(errors="replace"))
    return Answer(said if errors.strip() else f"ssh ended with status {code}")
