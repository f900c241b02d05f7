"""Functions run in separate processes, each killed at its deadline.

A check may hang in a driver, a file system or a name server. That costs its own process, never the
command. A process in D state cannot be killed: it is left behind and reported.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import selectors
import signal
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dshealthd.http.document import MAX_DOCUMENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MOST = 64
"""Maximum number of concurrent processes; each spends most of its time waiting."""
MAX_ANSWER = 2 * MAX_DOCUMENT
"""Maximum bytes of one answer: the largest is a status document, written anew with spaces."""
KILL_DEADLINE = 0.5
"""Seconds after SIGKILL before a process counts as unkillable."""
_CHUNK = 1 << 18
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl  # looked up once, not in each process


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


@dataclass(slots=True)
class _Running:
    name: str
    pid: int
    pipe: int
    started: float
    deadline: float
    answer: bytearray
    killed: bool = False


class Pool:
    """Pool that runs functions in forked processes, up to a number at a time.

    The process that owns it must have a single thread.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._waiting: deque[tuple[str, Callable[[], object], float]] = deque()
        self._running: dict[int, _Running] = {}
        self._selector = selectors.DefaultSelector()

    def start(self, name: str, function: Callable[[], object], deadline: float) -> None:
        """Queue a function that returns JSON. Its deadline counts from the start of its process."""
        self._waiting.append((name, function, deadline))
        self._fill()

    @property
    def names(self) -> list[str]:
        """The names of the functions that run now, the oldest first."""
        return [one.name for one in self._running.values()]

    def ended(
        self, tick: float = 0.2, on_tick: Callable[[], object] = lambda: None
    ) -> Iterator[Ended]:
        """Yield each function as it ends, until none is left; more may be started meanwhile."""
        while self._running or self._waiting:
            self._fill()
            next_deadline = min(one.started + one.deadline for one in self._running.values())
            wait = max(0.0, min(tick, next_deadline - time.monotonic()))
            for key, _ in self._selector.select(wait):
                if (one := self._running.get(key.fd)) is not None and self._read(one):
                    yield self._finish(one)
            now = time.monotonic()
            for one in [one for one in self._running.values() if now > one.started + one.deadline]:
                yield self._give_up(one)
            on_tick()

    def close(self) -> None:
        """Kill the processes that still run."""
        self._waiting.clear()
        for one in list(self._running.values()):
            self._give_up(one)
        self._selector.close()

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._most:
            name, function, deadline = self._waiting.popleft()
            read_end, write_end = os.pipe2(os.O_CLOEXEC)
            try:
                pid = os.fork()
            except OSError:
                os.close(read_end)
                os.close(write_end)
                raise
            if pid == 0:
                _child(function, write_end)
            os.close(write_end)
            one = _Running(name, pid, read_end, time.monotonic(), deadline, bytearray())
            self._running[read_end] = one
            self._selector.register(read_end, selectors.EVENT_READ)

    def _read(self, one: _Running) -> bool:
        """Read what has arrived from a process; return True at the end of its answer."""
        chunk = os.read(one.pipe, _CHUNK)
        one.answer += chunk
        return not chunk or len(one.answer) > MAX_ANSWER

    def _finish(self, one: _Running) -> Ended:
        seconds = time.monotonic() - one.started
        code = self._reap(one, kill=len(one.answer) > MAX_ANSWER)
        if len(one.answer) > MAX_ANSWER:
            return Ended(one.name, seconds, problem=f"answered with more than {MAX_ANSWER} bytes")
        try:
            value, problem = json.loads(one.answer)
        except ValueError:
            ended = "cannot be killed" if code is None else f"wait status {code}"
            return Ended(
                one.name, seconds, problem=f"its process ended without an answer ({ended})"
            )
        return Ended(one.name, seconds, value, problem)

    def _give_up(self, one: _Running) -> Ended:
        seconds = time.monotonic() - one.started
        state = _sleeping_in(one.pid)
        text = f"hung: no answer within {one.deadline:g} s{state}"
        if self._reap(one, kill=True) is None:
            text += "; its process is in uninterruptible sleep and cannot be killed"
        return Ended(one.name, seconds, problem=text, hung=True)

    def _reap(self, one: _Running, *, kill: bool) -> int | None:
        """Remove a process from the pool; return its wait status, None if it cannot be killed."""
        self._selector.unregister(one.pipe)
        os.close(one.pipe)
        del self._running[one.pipe]
        end = time.monotonic() + KILL_DEADLINE
        while True:
            # also kills the processes that it has started, which are in its session
            if kill:
                _kill_group(one.pid)
            late = time.monotonic() > end  # before waitpid: this process may be stopped in between
            pid, status = os.waitpid(one.pid, os.WNOHANG)
            if pid:
                return status
            if late:
                if kill:
                    return None
                kill, end = True, time.monotonic() + KILL_DEADLINE
            time.sleep(0.005)


def _kill_group(pid: int) -> None:
    """Kill a process and its group; before its setsid(2), the process alone."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)  # not reaped yet, so the pid is still its own


def _sleeping_in(pid: int) -> str:
    """Return where in the kernel a process waits, if that may be read."""
    try:
        with open(f"/proc/{pid}/wchan", encoding="ascii", errors="replace") as file:
            name = file.read(64)
    except OSError:
        return ""
    return f", waits in {name}" if name not in ("", "0") else ""


def _child(function: Callable[[], object], pipe: int) -> None:
    """Run a function in its process, write its answer, and end without returning."""
    status = 1
    try:
        # Its own session, so that what it starts is killed with it.
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        # Libraries print what they like; the command's output is for results.
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        answer = json.dumps(_answer(function)).encode(errors="replace")
        view = memoryview(answer)
        while view:
            view = view[os.write(pipe, view) :]
        status = 0
    except OSError as error:
        status = min(error.errno or errno.EIO, 125)
    finally:
        os._exit(status)


def _answer(function: Callable[[], object]) -> tuple[object, str]:
    """Return the function's value and no problem, or None and why it failed."""
    try:
        return function(), ""
    except Exception as error:  # noqa: BLE001 - any failure of a check becomes its reason
        return None, f"{type(error).__name__}: {error}"[:1000]
