"""A process of its own that holds the genuine pynvml on a simulated NVML, and answers expressions."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from tests.nvml.simulator import Simulator

# Answers one JSON line for each expression that it reads. `n` is pynvml, `h(i)` the handle of index
# i.
CLIENT = """
import ctypes, json, resource, sys
import pynvml as n
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
h = n.nvmlDeviceGetHandleByIndex
def fields(gpu, ids):
    return [(f.nvmlReturn, f.valueType, f.value.dVal if f.valueType == 0 else f.value.siVal if f.valueType == 5 else
             f.value.uiVal if f.valueType == 1 else f.value.ullVal) for f in n.nvmlDeviceGetFieldValues(h(gpu), ids)]
def struct(make, call, gpu):
    s = make(); call(h(gpu), ctypes.byref(s))
    return {name: getattr(s, name) for name, *_ in s._fields_ if isinstance(getattr(s, name), int)}
def sweep(gpu):
    seen = {}
    for name in dir(n):
        if name.startswith("nvmlDeviceGet") and not name.startswith("nvmlDeviceGetHandle"):
            for more in ((), (0,), (0, 0), (0, 0, 2)):
                try:
                    getattr(n, name)(h(gpu), *more)
                    seen[name] = 0
                except n.NVMLError as error:
                    seen[name] = error.value
                except (TypeError, ctypes.ArgumentError, AttributeError):
                    pass
    return seen
for line in sys.stdin:
    try:
        answer = eval(line)
    except n.NVMLError as error:
        answer = f"{type(error).__name__} {error.value}"
    print(json.dumps(answer), flush=True)
"""


class Client:
    """A process that holds pynvml. Always killed at the end."""

    def __init__(self, simulator: Simulator, *, init: bool = True) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLIENT],
            env=os.environ | simulator.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        if init:
            assert self.ask("n.nvmlInit()") is None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)

    def tell(self, expression: str) -> None:
        """Send an expression and wait for nothing."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{expression}\n")

    def answered(self, seconds: float) -> bool:
        """Whether an answer came within so many seconds."""
        assert self.process.stdout is not None
        return bool(select.select([self.process.stdout], [], [], seconds)[0])

    def answer(self) -> Any:
        """The next answer: a JSON value, or "ExceptionClass code"."""
        assert self.process.stdout is not None
        assert self.answered(60), "no answer"
        return json.loads(self.process.stdout.readline())

    def ask(self, expression: str) -> Any:
        """Send an expression and wait for its answer."""
        self.tell(expression)
        return self.answer()

    def state(self) -> str:
        """The process' state as the kernel has it: R, S, D, Z."""
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def until_state(self, state: str) -> None:
        """Wait until the kernel has the process in this state."""
        end = time.monotonic() + 60
        while self.state() != state:
            assert time.monotonic() < end, self.state()
            time.sleep(0.02)
