"""The status of this node: from its agent, or collected once by the doctor if none runs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import time
from typing import TYPE_CHECKING, Any

from dshealthd.collection.scheduler import Scheduler
from dshealthd.collection.supervisor import PATIENCE
from dshealthd.core.options import Duration
from dshealthd.core.snapshot import Snapshot
from dshealthd.core.timing import time_limit
from dshealthd.findings.judgement import judge, series_of, unready
from dshealthd.findings.options import FindingsOptions
from dshealthd.http.client import Access, local
from dshealthd.http.exchange import Unreachable
from dshealthd.web.status import document as render

if TYPE_CHECKING:
    from dshealthd.config.config import Config

ASK_DEADLINE = 1.5
"""Seconds for the agent, which answers from memory; a stopped or hung one is not waited for."""
COLLECT_DEADLINE = 7.0
"""Seconds to collect all sources; those that have not answered by then are unknown."""
SOURCE_DEADLINE = PATIENCE
"""Seconds for one source or device, after which it counts as hung.

The agent's 10 s for GPUs is too long for an interactive command. It must not exceed the time after
which a worker itself goes on without an answer, which would give no result here. Devices that hang
together are found in twice that time.
"""
CLOSE_DEADLINE = 1.2
"""Seconds to end the workers."""
DEADLINE = ASK_DEADLINE + COLLECT_DEADLINE + CLOSE_DEADLINE + 0.3


def status_document(config: Config, access: Access) -> dict[str, Any]:
    """Return the status document of this node for the doctor.

    `source` is `agent`, or why it was collected here; then `unheard` is why an agent that may be
    there was not heard, empty if none listens. Run it in a process that can be killed.
    """
    try:
        found = local(config, access, ASK_DEADLINE).status()
    except Unreachable as error:
        absent = isinstance(error.__cause__, ConnectionRefusedError)
        source = {"source": f"collected without an agent: {error}"}
        return collect(config) | source | {"unheard": "" if absent else str(error)}
    return {**found, "source": "agent"}


def collect(config: Config) -> dict[str, Any]:
    """Read all sources once, judge them, and return the status document."""
    return asyncio.run(_collect(config))


async def _collect(config: Config) -> dict[str, Any]:
    snapshot = Snapshot(time.monotonic, time.time)
    scheduler = Scheduler(snapshot, time.monotonic, time.time)
    started, begun = time.time(), time.monotonic()
    with contextlib.suppress(TimeoutError):  # unanswered sources have no result, see findings
        async with time_limit(COLLECT_DEADLINE):
            await scheduler.once(_hurried(config))
    own = list(scheduler.samples())
    wall, monotonic = time.time(), time.monotonic()
    node = os.uname().nodename
    series = series_of(snapshot, own, config.section(FindingsOptions).limits)
    verdict = judge(snapshot, series, node=node, name="", monotonic=monotonic, wall=wall)
    body = render(
        snapshot,
        own,
        node=node,
        started=started,
        begun=begun,
        monotonic=monotonic,
        wall=wall,
        ready=not unready(snapshot),
        sections=verdict.document(),
    )
    with contextlib.suppress(TimeoutError):  # a worker in D state is left behind
        async with time_limit(CLOSE_DEADLINE):
            await scheduler.close()
    found: dict[str, Any] = json.loads(body)
    return found


def _hurried(config: Config) -> Config:
    """Return the configuration with deadlines short enough for an interactive command."""
    collectors = {
        name: dataclasses.replace(
            options, deadline=Duration(min(options.deadline, SOURCE_DEADLINE))
        )
        for name, options in config.collectors.items()
    }
    return dataclasses.replace(config, collectors=collectors)
