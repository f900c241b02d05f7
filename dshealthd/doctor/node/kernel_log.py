"""The last hour of the kernel log, judged by the rules of the agent where none is running."""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dshealthd.collectors.kernel_log import EVENTS
from dshealthd.collectors.memory import OOM_KILLS
from dshealthd.doctor.check import Result, unknown
from dshealthd.doctor.snapshot_check import result_of
from dshealthd.findings import catalogue, fabric, host, storage
from dshealthd.findings.options import FindingsOptions
from dshealthd.findings.past import Past
from dshealthd.findings.series import Series
from dshealthd.linux import kernel_lines
from dshealthd.linux.kmsg import KERNEL, KernelLogReader, kernel_clock

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext

    Event = tuple[float, kernel_lines.KernelEvent]

RULES = (host.errors, host.memory, storage.disks, fabric.adapters)
HOUR = 3600.0
"""Seconds: an older problem has been handled, or shows elsewhere."""
STEP = 60.0
"""Seconds from one judgment to the next: a minute's lines count together in every rule."""
SECONDS = 3.0
"""To read it in: the check has five (`Check.deadline`), and says so if that was not enough."""
MOST = 200_000
"""Records in the largest usual log (`log_buf_len=16M`)."""


def last_hour(context: NodeContext) -> Iterator[Result]:
    """Yield what an agent would have found in the last hour; nothing where one is running, or where
    the collector of the log says why it cannot be read.
    """
    device = context.host.device("kmsg")
    if context.document.get("source") == "agent" or not os.path.exists(device):
        return
    reader, parser = KernelLogReader(device, time.monotonic), kernel_lines.EventParser()
    now = kernel_clock()
    events: deque[Event] = deque()
    try:
        for record in reader.read(MOST, SECONDS):
            if record.facility == KERNEL and record.timestamp >= now - HOUR:
                event = parser.event(record.message)
                if event is not None:
                    events.append((record.timestamp, event))
    except PermissionError:
        return
    finally:
        reader.close()
    yield from _judged(events, now, context)
    if not reader.drained:
        yield unknown(f"the log was not read to its end within {SECONDS:g} s")


def _judged(events: deque[Event], now: float, context: NodeContext) -> Iterator[Result]:
    """Yield what rules find at any minute of the hour that ends `now`, as they find it last."""
    limits, node = context.config.section(FindingsOptions).limits, os.uname().nodename
    past, counts, killed = Past(), Counter({(name, ""): 0 for name in kernel_lines.EVENTS}), 0
    found = {}
    at = now - HOUR - STEP
    while at < now:
        at += STEP
        while events and events[0][0] <= at:
            _, event = events.popleft()
            counts[event.name, event.device] += event.errors
            killed += event.name == "oom_kill"
        samples = [EVENTS(count, *labels) for labels, count in counts.items()]
        series = Series([*samples, OOM_KILLS(killed)], limits, past, at)
        for rule in RULES:
            for sign in rule(series, 0.0):
                finding = catalogue.finding_of(sign, node, limits)
                found[finding.key] = finding
    yield from map(result_of, found.values())
