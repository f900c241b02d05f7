"""A collector for tests: does to each part what a file says, one `PART ACTION [ARGUMENT]` a line.

A `~` in the name of a part stands for a space.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from dshealthd.core import garbage
from dshealthd.core.collector import (
    Collector,
    CollectorOptions,
    Fault,
    News,
    NotAvailable,
    Reason,
    Sample,
    SourceError,
    Worker,
    gauge,
)
from dshealthd.core.options import option

VALUE = gauge("dshealthd_test_value", "What the file says.", "part")


@dataclass(frozen=True, kw_only=True)
class Options(CollectorOptions):
    """Where the file is."""

    script: str = option("", "The file with the actions.")


class Cycle:
    """An object that only itself refers to."""

    existing: ClassVar[weakref.WeakSet[Cycle]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.itself = self
        self.existing.add(self)


class Obstinate(Collector):
    """Obeys its script, whatever that asks."""

    worker = Worker.STORAGE
    Options = Options

    def collect(self) -> Iterator[Sample | Fault]:
        """Approach each part and do what is asked."""
        with open(self.options.script, encoding="utf-8") as script:
            lines = script.read().splitlines()
        for line in lines:
            part, action, *arguments = line.split()
            part = part.replace("~", " ")
            if part != "-" and (fault := self.context.entering(part)):
                yield fault
                continue
            if action == "tell":
                self.context.tell(News(arguments[0]))
                continue
            if action == "heard":
                for news, about in sorted(self.context.heard):
                    yield VALUE(1.0, f"{news} of {about or 'the node'}")
                continue
            if action == "cycle":
                garbage.EVERY = 0.0
                Cycle()
                yield VALUE(float(len(Cycle.existing)), part)
                continue
            act(action, *arguments)
            if action == "pid":
                yield VALUE(float(os.getpid()), part)
            else:
                yield VALUE(
                    float(arguments[0] if arguments and action not in {"wait", "ended"} else 1.0),
                    part,
                )


def act(action: str, argument: str = "", number: str = "9", seconds: str = "0") -> None:
    """Do one thing."""
    match action:
        case "hang":
            signal.pause()
        case "sleep":
            time.sleep(float(argument))
        case "wait":
            while not os.path.exists(argument):
                time.sleep(0.02)
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "hog":
            bytearray(int(argument))
        case "ended" if not os.path.exists(argument):  # by somebody else, once
            os.close(os.open(argument, os.O_CREAT))
            time.sleep(float(seconds))
            os.kill(os.getpid(), int(number))
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            sys.stdout.flush()
            os._exit(3)
        case "dstate":
            descriptor = os.open(argument, os.O_WRONLY | os.O_CREAT)
            os.write(descriptor, b"x")
            os.fsync(descriptor)
            os.close(descriptor)
        case "raise":
            message = "a defect"
            raise RuntimeError(message)
        case "absent":
            raise NotAvailable(argument)
        case "replace":
            raise SourceError(Reason.VERSION_MISMATCH, "load me afresh", replace_worker=True)
        case "denied":
            raise PermissionError(1, "denied", argument)
