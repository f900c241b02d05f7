"""A step of a collection, in a forked process of its own, since whatever it touches may hang.

Its output until its deadline is kept.

A step is a function that takes an `Emit` and returns a JSON document. It emits the content of files
as it reads them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import selectors
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from dshealthd.linux import privileges

if TYPE_CHECKING:
    from collections.abc import Iterable

Emit = Callable[[str, bytes], None]
"""Appends bytes to a file of the bundle."""
Function = Callable[[Emit], Any]

_HEAD = struct.Struct(">II")
_CHUNK = 1 << 18
MAX_NAME = 100
_STANDARD_ERROR = 2
MAX_ANSWER = 4 << 20
KILL_DEADLINE = 2.0
"""Seconds after SIGKILL until a process counts as unkillable. On a node whose CPUs are all busy, one
was still on its way out after 0.5 s.
"""


class Missing(Exception):
    """A step cannot collect its part; the message says why."""


class RunningStep:
    """A running step. `answer` is its result, `problem` says why there is none."""

    def __init__(
        self,
        name: str,
        function: Function,
        seconds: float,
        max_bytes: int = 0,
        keep: Emit = lambda _name, _data: None,
    ) -> None:
        """Start it with a deadline in seconds and a limit on the bytes that it emits.

        `keep` is called in this process with everything that the step emits.
        """
        self.name = name
        self.answer: Any = None
        self.problem = ""
        self.hung = False
        """Whether it did not answer by its deadline."""
        self._keep = keep
        self._left = max_bytes
        self._buffer = bytearray()
        self._answered = False
        self.deadline = time.monotonic() + seconds
        self._seconds = seconds
        read_end, write_end = os.pipe()
        sys.stdout.flush()
        # Without exec: the collecting process has one thread, and all that a step needs is loaded.
        self._pid = os.fork()
        if self._pid == 0:
            os.close(read_end)
            _run(function, write_end)
        os.close(write_end)
        os.set_blocking(read_end, False)
        self.descriptor = read_end

    def receive(self) -> bool:
        """Read from the step's process; False at its end."""
        try:
            data = os.read(self.descriptor, _CHUNK)
        except BlockingIOError:
            return True
        self._buffer += data
        # The step may have parsed a user's data, so its frames are bounded like a stranger's.
        while len(self._buffer) >= _HEAD.size:
            name_size, size = _HEAD.unpack_from(self._buffer)
            if name_size > MAX_NAME or (size > MAX_ANSWER if not name_size else size > self._left):
                self.problem = "its output exceeds its limit"
                return False
            end = _HEAD.size + name_size + size
            if len(self._buffer) < end:
                break
            name = bytes(self._buffer[_HEAD.size : _HEAD.size + name_size]).decode()
            self._take(name, bytes(self._buffer[_HEAD.size + name_size : end]))
            del self._buffer[:end]
        return bool(data)

    def end(self) -> None:
        """Kill the step's process if it has not ended; one that cannot be killed is left behind."""
        os.close(self.descriptor)
        if not self._answered and not self.problem and time.monotonic() >= self.deadline:
            self.hung = True
            self.problem = f"not finished within {self._seconds:g} s"
        status = self._reaped() if self._answered else None  # it exits by itself
        if status is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)
            status = self._reaped()
        if status is None:
            self.problem = (
                f"{self.problem or 'it did not exit'}; process {self._pid} cannot be killed"
            )
        elif not self._answered and not self.problem:
            code = os.waitstatus_to_exitcode(status)
            self.problem = (
                f"ended by {signal.Signals(-code).name}"
                if code < 0
                else f"ended with status {code}"
            )

    def _reaped(self) -> int | None:
        """Return the step's wait status; None if it has not ended within `KILL_DEADLINE`."""
        end = time.monotonic() + KILL_DEADLINE
        while True:
            late = time.monotonic() >= end  # before waitpid: this process may be paused in between
            ended, status = os.waitpid(self._pid, os.WNOHANG)
            if ended or late:
                return status if ended else None
            time.sleep(0.005)

    def _take(self, name: str, data: bytes) -> None:
        if name:
            self._left -= len(data)
            self._keep(name, data)
            return
        answer = json.loads(data)
        self._answered = True
        self.answer, self.problem = answer["answer"], answer["problem"]


def run_one(
    name: str,
    function: Function,
    seconds: float,
    max_bytes: int = 0,
    keep: Emit = lambda _name, _data: None,
) -> RunningStep:
    """Run one step to its end or its deadline."""
    begin = functools.partial(RunningStep, name, function, seconds, max_bytes, keep)
    return run([begin], 1)[0]


def run(steps: Iterable[Callable[[], RunningStep]], at_once: int) -> list[RunningStep]:
    """Run steps in parallel, `at_once` at a time, each to its end or its deadline.

    Return them in the order in which they were started.
    """
    waiting, started, running = list(steps), list[RunningStep](), dict[int, RunningStep]()
    with selectors.DefaultSelector() as selector:
        while waiting or running:
            while waiting and len(running) < at_once:
                step = waiting.pop(0)()
                started.append(step)
                running[step.descriptor] = step
                selector.register(step.descriptor, selectors.EVENT_READ)
            now = time.monotonic()
            ready = {
                key.fd
                for key, _ in selector.select(
                    max(0.0, min(step.deadline for step in running.values()) - now)
                )
            }
            for descriptor, step in list(running.items()):
                over = time.monotonic() >= step.deadline
                if (descriptor in ready and not step.receive()) or over:
                    selector.unregister(descriptor)
                    del running[descriptor]
                    step.end()
    return started


def _run(function: Function, descriptor: int) -> NoReturn:
    status = 1
    try:
        # So that programs that it starts, such as py-spy, are killed with it.
        os.setpgid(0, 0)
        privileges.end_with_parent()
        privileges.seclude(descriptor)

        def emit(name: str, data: bytes) -> None:
            _write(descriptor, name.encode(), data)

        try:
            answer, problem = function(emit), ""
        except (Missing, OSError, ValueError) as error:
            answer, problem = None, str(error)
        except MemoryError:
            answer, problem = None, "it needs more memory than its limit"
        _write(descriptor, b"", json.dumps({"answer": answer, "problem": problem}).encode())
        status = 0
    except BaseException:  # noqa: BLE001 - nothing may return into the parent's code; standard error is the log
        os.write(_STANDARD_ERROR, traceback.format_exc().encode())
    finally:
        os._exit(status)


def _write(descriptor: int, name: bytes, data: bytes) -> None:
    view = memoryview(_HEAD.pack(len(name), len(data)) + name + data)
    while view:
        view = view[os.write(descriptor, view) :]
