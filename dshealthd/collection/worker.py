"""A worker process: runs collectors whose sources can hang, and reports which part it touches.

Started as `python -m dshealthd.collection.worker PROGRESS CHANNEL`, two descriptors: the progress
page, and one end of a socket pair. The first frame says what to run; then each request is answered
by one frame per collector and a closing one with the parts that were touched:

    → {"worker": NAME, "host": {…}, "collectors": {NAME: {…options}}, "log_level": N}
    ← {"ready": PID}
    → {"collect": [NAME, …], "blocked": [FAULT, …], "retried": PART, "last": PART,
       "heard": [[NEWS, JOB], …]}
    ← {"result": NAME, …} …,
      {"touched": [PART, …], "untried": [PART, …], "memory": {…}, "news": […]}

The `retried` part is left out by its own fault alone. If a `last` part is named, no part after it
is touched; the skipped ones are `untried`. `memory` is data for the worker's successor, which gets
it in its first frame. `news` goes from its collectors to others, `heard` from others to them.

The end of the socket is the request to stop: the worker releases what it holds and exits.

Every worker pays for its imports, so it imports neither asyncio nor ssl, which would double the
cost.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dshealthd.collection.progress_page import ProgressPage
from dshealthd.config import registry
from dshealthd.core import garbage, wire
from dshealthd.core.collector import (
    Context,
    Fault,
    News,
    Reason,
    read_by,
    shared_part,
    user_part,
)
from dshealthd.core.host import Host
from dshealthd.core.options import decoded
from dshealthd.core.result import attempt
from dshealthd.core.text import printable

MOST_OF_USER = 8
"""Processes of one user that may be left out before all are: a rank on each GPU of a node, which
hang together. Each more would cost all others a deadline.
"""


def main(page: int, descriptor: int) -> None:
    """Serve the agent's requests on the inherited socket `descriptor` until the other end closes.

    Progress is written to the page of the descriptor `page`.
    """
    # Ctrl-C reaches the whole terminal group; the agent decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Its end is the request to stop: a program started by a collector must not keep it open.
    os.set_inheritable(descriptor, False)  # noqa: FBT003 - positional only
    progress = ProgressPage(page)
    os.close(page)
    encoder = wire.Encoder()
    channel = socket.socket(fileno=descriptor)
    messages = wire.frames(channel)
    hello = next(messages)
    _log(hello["worker"], hello["log_level"])
    blocked: dict[str, Fault] = {}
    touched: set[str] = set()
    untried: dict[str, None] = {}
    news: set[News] = set()
    current, retried, last, passed = "", "", "", False

    def entering(part: str) -> Fault | None:
        nonlocal passed
        if progress.stopped:
            sys.exit()
        if passed and part != last and part not in touched:
            untried[part] = None
            return blocked.get(part) or Fault(part, Reason.WAITING, "not tried yet")
        passed |= part == last
        if (fault := _left_out(blocked, part, retried)) is not None:
            return fault
        progress.write(time.monotonic(), current, part)
        touched.add(part)
        return None

    context = Context(
        host=decoded(Host, hello["host"]),
        entering=entering,
        state=Path(hello["state"]) if hello.get("state") else None,
        memory=dict(hello.get("memory") or {}),
        tell=news.add,
    )
    handed_on: dict[str, Any] = {}
    collectors = {
        name: kind(decoded(kind.Options, options), context)
        for name, options in hello["collectors"].items()
        for kind in (registry.load(name),)
    }
    cycles = garbage.Cycles(time.monotonic)
    channel.sendall(wire.pack({"ready": os.getpid()}))
    for request in messages:
        context.sweep += 1
        blocked = _blocked(request["blocked"])
        context.heard = frozenset((News(news), about) for news, about in request["heard"])
        retried, last, passed = request["retried"], request["last"], False
        for current in request["collect"]:
            progress.write(time.monotonic(), current, "")
            result = attempt(collectors[current])
            if progress.stopped:
                sys.exit()  # the agent has stopped listening
            if result.reason is not Reason.OUT_OF_MEMORY:  # else the page keeps the part
                progress.write(time.monotonic(), current, "")
            channel.sendall(encoder.pack(current, result))
        done: dict[str, Any] = {
            "touched": list(touched),
            "untried": list(untried),
            "news": list(news),
        }
        if context.memory != handed_on:
            # A copy, as collectors keep changing the original.
            done["memory"] = handed_on = copy.deepcopy(context.memory)
        channel.sendall(wire.pack(done))
        for told in (touched, untried, news):
            told.clear()
        cycles.free()  # nobody waits for this worker now
    for collector in collectors.values():
        collector.close()
    context.close()


def _left_out(blocked: Mapping[str, Fault], part: str, retried: str) -> Fault | None:
    """Return why a part is not entered, given what `_blocked` returns; None if it may be."""
    fault = blocked.get(part) or blocked.get(read_by(shared_part(part), ""))
    if fault or part == retried or (of_user := blocked.get(user_part(part))) is None:
        return fault
    detail = f"left out, as {MOST_OF_USER} other processes of its user hang or crash a worker"
    return Fault(part, of_user.reason, detail)


def _blocked(faults: Iterable[tuple[str, str, str]]) -> dict[str, Fault]:
    """Return the faults of the parts to skip, by part.

    Where a collector's worker is stuck at its reading of a part, those of all such collectors are
    skipped, under the name of no collector: a second one would get stuck there as well. Where
    MOST_OF_USER processes of one user are left out, so are the user's others.
    """
    blocked = {part: Fault(part, Reason(reason), detail) for part, reason, detail in faults}
    stuck = {
        read_by(shared, ""): fault
        for part, fault in blocked.items()
        if fault.reason is Reason.STUCK and (shared := shared_part(part))
    }
    of_user = Counter(map(user_part, blocked))
    users = {
        user: fault
        for part, fault in blocked.items()
        if (user := user_part(part)) and of_user[user] >= MOST_OF_USER
    }
    return blocked | stuck | users


class WorkerFormatter(logging.Formatter):
    """Formats a worker's log records, one line each except for a traceback."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        """Return the record's line, made printable, as it may quote untrusted text."""
        return printable(super().formatMessage(record))


def _log(worker: str, level: int) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(WorkerFormatter(f"worker {worker}: %(levelname)s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


if __name__ == "__main__":
    # An agent that ends while a worker starts or answers is also a request to stop.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        main(int(sys.argv[1]), int(sys.argv[2]))
