"""`dshealthd launches`: counts until it is ended, and writes each second what it has counted."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from dshealthd.core import documents, state_file
from dshealthd.core.collector import Context
from dshealthd.jobs.launches import SCHEMA
from dshealthd.jobs.launches.breakpoints import Breakpoints
from dshealthd.jobs.launches.obstacle import Refused
from dshealthd.jobs.launches.watch import Launches, compare

if TYPE_CHECKING:
    from pathlib import Path

    from dshealthd.core.host import Host

log = logging.getLogger(__name__)

PERIOD = 1.0
"""Seconds from one turn to the next.

A rank's communicators have names, and it can be named, if a turn comes between its import of torch
and its first collective.
"""


def launches(host: Host, output: Path) -> int:
    """Count until SIGTERM or SIGINT. OSError if `/proc` cannot be read, or `output` written."""
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    os.umask(0o022)  # the agent may be another user, and nothing in it is a secret
    watch: Launches | None = None
    refused: dict[str, Any] = {"refused": None, "detail": ""}
    try:
        watch = Launches(Context(host=host), Breakpoints(host))
    except Refused as refusal:
        refused = {"refused": refusal.reason, "detail": refusal.detail}
        log.error("launches are not counted: %s (%s)", refusal.reason, refusal.detail)
    try:
        while not ended.is_set():
            ranks = watch.turn() if watch is not None else []
            compare(ranks)
            document = {"schema": SCHEMA, "at": time.monotonic(), **refused, "ranks": ranks}
            text = documents.dumps(document, separators=documents.COMPACT)
            state_file.replace(output, text.encode(), durable=False)
            ended.wait(PERIOD)
    finally:
        if watch is not None:
            watch.close()
        output.unlink(missing_ok=True)  # what is not counted any more is unknown
    return 0
