"""Functions in forked processes, each killed at its deadline, since what they touch may hang.

A driver, a file system or a name server that hangs costs a function's own process, never the one
that waits for it. A process in D state cannot be killed: it is left behind and reported.

A function returns a JSON value. It may emit the content of files before, which is kept even if it
hangs afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import selectors
import signal
import struct
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from dshealthd.core import documents
from dshealthd.core.child import KILL_DEADLINE, how_ended
from dshealthd.linux import privileges
from dshealthd.linux.process import parse_stat

Emit = Callable[[str, bytes], None]
"""Appends bytes to a file."""
Function = Callable[[Emit], Any]

MOST = 64
"""Maximum number of concurrent processes; each spends most of its time waiting."""
MAX_ANSWER = 4 << 20
TICK = 0.2
"""Seconds between two calls of `on_tick`."""
_CHUNK = 1 << 18
_HEAD = struct.Struct(">II")
"""Before each part of the output: the lengths of a file's name (0: the answer) and content."""


class Missing(Exception):
    """A function cannot collect its part; the message says why."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How one function ended."""

    name: str
    seconds: float
    value: Any = None
    """What it returned, as a JSON value."""
    problem: str = ""
    """Why there is no value; empty if there is one."""
    hung: bool = False
    """Whether it did not answer by its deadline."""
    left: int = 0
    """The group of its processes, if one of them cannot be killed."""


@dataclass(slots=True, eq=False)
class _Running:
    name: str
    pid: int
    descriptor: int
    """Its output; once it is killed, its pidfd."""
    started: float
    due: float
    """When its deadline passes; once it is killed, when it counts as unkillable."""
    left: int
    """Bytes that it may still emit."""
    max_answer: int
    keep: Emit
    buffer: bytearray = field(default_factory=bytearray)
    is_killed: bool = False
    answered: bool = False
    value: Any = None
    problem: str = ""
    hung: bool = False

    def receive(self) -> bool:
        """Read what the process emits; False once it has answered, ended or exceeded its limit."""
        data = os.read(self.descriptor, _CHUNK)
        self.buffer += data
        # The function may have parsed a user's data, so its output is bounded like a stranger's.
        while len(self.buffer) >= _HEAD.size:
            name_size, size = _HEAD.unpack_from(self.buffer)
            if name_size > self.max_answer or size > (self.left if name_size else self.max_answer):
                self.problem = "its output exceeds its limit"
                return False
            content = _HEAD.size + name_size
            if len(self.buffer) < content + size:
                break
            part = bytes(self.buffer[content : content + size])
            try:
                name = self.buffer[_HEAD.size : content].decode()
                if not name:
                    self.value, self.problem = json.loads(part)
                    self.answered = True
            except (ValueError, ArithmeticError, TypeError, RecursionError):
                self.problem = "its output is malformed"
                return False
            if name:
                self.left -= size
                self.keep(name, part)
            del self.buffer[: content + size]
        return bool(data) and not self.answered


class Pool:
    """Runs functions in forked processes, up to a number at a time.

    The process that owns it must have a single thread: a function starts with all that it has
    loaded, without exec.
    """

    def __init__(self, most: int = MOST, max_answer: int = MAX_ANSWER) -> None:
        self._most = most
        self._max_answer = max_answer
        self._waiting: deque[Callable[[], _Running]] = deque()
        self._running: list[_Running] = []
        self._selector = selectors.DefaultSelector()

    def start(
        self,
        name: str,
        function: Function,
        deadline: float,
        max_bytes: int = 0,
        keep: Emit = lambda _name, _data: None,
    ) -> None:
        """Queue a function to run in a forked process, from whose start its deadline in seconds
        counts.

        `keep` is called in this process with everything that it emits, up to `max_bytes`. OSError
        if no process can be started and none runs.
        """
        self._waiting.append(
            functools.partial(self._begin, name, function, deadline, max_bytes, keep)
        )
        self._fill()

    @property
    def names(self) -> list[str]:
        """The names of the functions that run now, the oldest first."""
        return [one.name for one in self._running]

    @property
    def pids(self) -> list[int]:
        """The processes of the functions that run now, the oldest first."""
        return [one.pid for one in self._running]

    def ended(self, on_tick: Callable[[], object] = lambda: None) -> Iterator[Ended]:
        """Yield each function as it ends, until none is left; more may be started meanwhile."""
        while self._running or self._waiting:
            self._fill()
            wait = min(TICK, *(one.due - time.monotonic() for one in self._running))
            for key, _ in self._selector.select(max(0.0, wait)):
                one: _Running = key.data
                if one.is_killed:
                    yield self._finish(one)
                elif not one.receive():
                    self._kill(one)
            now = time.monotonic()
            for one in [one for one in self._running if now >= one.due]:
                if one.is_killed:
                    yield self._finish(one)
                else:
                    one.hung = True
                    one.problem = f"no answer within {one.due - one.started:g} s" + _waits(one.pid)
                    self._kill(one)
            on_tick()

    def close(self) -> None:
        """Kill the forked processes that still run."""
        self._waiting.clear()
        for one in self._running:
            if not one.is_killed:
                self._kill(one)
        for _ in self.ended():
            pass
        self._selector.close()

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._most:
            begin = self._waiting.popleft()
            try:
                one = begin()
            except OSError:  # out of processes: again once one has ended
                if not self._running:
                    raise
                self._waiting.appendleft(begin)
                return
            self._running.append(one)
            self._selector.register(one.descriptor, selectors.EVENT_READ, one)

    def _begin(
        self, name: str, function: Function, deadline: float, max_bytes: int, keep: Emit
    ) -> _Running:
        read_end, write_end = os.pipe()
        try:
            pid = os.fork()
            if pid == 0:
                _child(function, write_end)
        except OSError:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        now = time.monotonic()
        due = now + deadline
        return _Running(name, pid, read_end, now, due, max_bytes, self._max_answer, keep)

    def _kill(self, one: _Running) -> None:
        self._selector.unregister(one.descriptor)
        os.close(one.descriptor)
        one.descriptor = os.pidfd_open(one.pid)  # it is not reaped yet, so the pid is its own
        self._selector.register(one.descriptor, selectors.EVENT_READ, one)
        one.is_killed, one.due = True, time.monotonic() + KILL_DEADLINE
        for kill in (os.killpg, os.kill):  # before setsid(2) it has no group of its own
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(one.pid, signal.SIGKILL)

    def _finish(self, one: _Running) -> Ended:
        self._selector.unregister(one.descriptor)
        os.close(one.descriptor)
        self._running.remove(one)
        pid, status = os.waitpid(one.pid, os.WNOHANG)
        if not pid and not one.answered:
            one.problem += "; its process is in uninterruptible sleep and cannot be killed"
        elif not one.answered and not one.problem:
            ended = how_ended(os.waitstatus_to_exitcode(status))
            one.problem = f"its process {ended} without an answer"
        seconds = time.monotonic() - one.started
        left = one.pid if one.hung and remains(one.pid) else 0
        return Ended(one.name, seconds, one.value, one.problem, one.hung, left)


def run(
    name: str,
    function: Function,
    deadline: float,
    max_bytes: int = 0,
    keep: Emit = lambda _name, _data: None,
) -> Ended:
    """Run one function to its end or its deadline. OSError if no process can be started."""
    pool = Pool()
    try:
        pool.start(name, function, deadline, max_bytes, keep)
        return next(pool.ended())
    finally:
        pool.close()


def remains(group: int) -> bool:
    """Return whether a process of a group is left."""
    try:
        os.killpg(group, 0)
    except OSError as error:  # another user's may not be signalled, and is there
        return not isinstance(error, ProcessLookupError)
    return True


def computes(pid: int) -> bool:
    """Return whether a process computes, or waits for a CPU to do so."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return parse_stat(file.read()).state == "R"
    except (OSError, ValueError, ArithmeticError):
        return False


def _waits(pid: int) -> str:
    """Return where in the kernel a process waits, if that may be read."""
    try:
        with open(f"/proc/{pid}/wchan", encoding="ascii", errors="replace") as file:
            name = file.read(64)
    except OSError:
        return ""
    return f", waits in {name}" if name not in ("", "0") else ""


def _child(function: Function, descriptor: int) -> NoReturn:
    """Run a function in its process, write its answer, and end without returning."""
    status = 1
    try:
        os.setsid()  # so that what it starts is killed with it
        privileges.end_with_parent()
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):  # libraries print what they like
            os.dup2(null, standard)
        os.closerange(3, descriptor)
        os.closerange(descriptor + 1, 1 << 30)

        def emit(name: str, data: bytes) -> None:
            _write(descriptor, name.encode(), data)

        try:
            answer = documents.dumps([function(emit), ""])
        except (Missing, OSError, ValueError, ArithmeticError) as error:
            answer = documents.dumps([None, str(error) or type(error).__name__])
        except MemoryError:
            answer = documents.dumps([None, "it needs more memory than its limit"])
        # any other failure becomes its reason, and shows its place
        except Exception as error:  # noqa: BLE001
            place = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {error}"[:1000]
            answer = documents.dumps(
                [None, f"{what} ({os.path.basename(place.filename)}:{place.lineno})"]
            )
        _write(descriptor, b"", answer.encode())
        status = 0
    finally:
        os._exit(status)  # nothing may return into the parent's code


def _write(descriptor: int, name: bytes, data: bytes) -> None:
    view = memoryview(_HEAD.pack(len(name), len(data)) + name + data)
    while view:
        view = view[os.write(descriptor, view) :]
