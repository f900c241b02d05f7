"""Several agents' probes in one event loop, each on an address of its own.

The addresses are 127.0.0.N, all on the same port.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from bench.processes import free_port
from dshealthd.collectors import gpu_bus, gpu_processes, maintenance
from dshealthd.core.collector import Sample
from dshealthd.core.host import Host
from dshealthd.core.options import Duration
from dshealthd.core.result import CollectionOutcome, CollectionResult, not_available
from dshealthd.core.snapshot import Snapshot
from dshealthd.probe.options import MembershipOptions, PeerOptions, PolicyOptions, ProbeOptions
from dshealthd.probe.service import ProbeService
from tests.probe.company import give_time
from tests.probe.peering import KEY, secret

PERIOD = 1.0
BEGIN = 1_800_000_000.2
"""When a scene begins: shortly after an epoch has begun, and always in the same one. Who leads whom
in an epoch is drawn from its number.
"""
TICK = 0.02
"""Seconds after which the time of the nodes goes on."""
NAMES = tuple(f"127.0.0.{number}" for number in range(21, 29))


def snapshot(gpus: Mapping[str, float] | None = None) -> Snapshot:
    """Return what the collectors saw: the number of compute processes by GPU. Without `gpus` it is
    a machine without GPUs.
    """
    shot = Snapshot(time.monotonic, time.time)
    for name in ("gpu_processes", "gpu_bus"):
        shot.expect(name, 1000.0)
    if gpus is None:
        shot.put("gpu_processes", not_available("no NVIDIA GPU"))
        shot.put("gpu_bus", not_available("no NVIDIA GPU"))
    else:
        found = tuple(
            gpu_processes.PROCESSES(count, gpu, f"GPU-{gpu}") for gpu, count in gpus.items()
        )
        shot.put("gpu_processes", CollectionResult(CollectionOutcome.OK, found))
        shot.put(
            "gpu_bus", CollectionResult(CollectionOutcome.OK, (gpu_bus.EXPECTED(float(len(gpus))),))
        )
    return shot


class Clock:
    """The time of all nodes, which stands still while this process gets no CPU. So an epoch is as
    long for them on a busy machine as on an idle one.
    """

    def __init__(self, begin: float) -> None:
        self.now = begin

    async def run(self) -> None:
        """Let it pass."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(TICK)
            self.now += min(time.monotonic() - before, 2 * TICK)


class Agent:
    """The probes of one node."""

    def __init__(self, options: ProbeOptions, state: Path, shot: Snapshot, clock: Clock) -> None:
        self.name = options.members.name
        self.clock = clock
        self.summary: dict[str, Any] = {
            "version": "0",
            "verdict": "ok",
            "problems": 0,
            "unreadable": 0,
            "findings": [],
            "jobs": [],
        }
        self.service = ProbeService(
            options,
            host=Host(),
            state=state,
            snapshot=shot,
            monotonic=time.monotonic,
            wall=lambda: clock.now,
            summary=lambda: dict(self.summary),
            waited=lambda: 0.0,  # so that every echo is timed, however busy the machine
        )

    def wall(self) -> float:
        """Return the time."""
        return self.clock.now

    def value(self, name: str, *labels: str) -> float:
        """Return the sum of a metric's series that begin with these labels, 0 if there are none."""
        return sum(
            sample.value for sample in self.all(name) if sample.labels[: len(labels)] == labels
        )

    def all(self, name: str) -> list[Sample]:
        """Return the series of a metric."""
        return [
            sample for sample in self.service.samples() if sample.metric.name == f"dshealthd_{name}"
        ]

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """The last rounds, in status-document form."""
        return list(self.service.status()["rounds"])

    @property
    def suspects(self) -> list[dict[str, str]]:
        """The current suspects."""
        return list(self.service.status()["suspects"])


@contextlib.asynccontextmanager
async def agents(
    directory: Path,
    count: int,
    *,
    change: Callable[[ProbeOptions], ProbeOptions] = lambda options: options,
    shots: Mapping[str, Snapshot] | None = None,
) -> AsyncIterator[list[Agent]]:
    """Run the given number of agents. They start shortly after an epoch has begun, so that all
    take part in the next one.
    """
    names, port, clock = NAMES[:count], free_port(), Clock(BEGIN)
    started: list[Agent] = []
    async with contextlib.AsyncExitStack() as stack:
        give_time(stack.enter_context(pytest.MonkeyPatch.context()))
        ticking = asyncio.create_task(clock.run())
        stack.callback(ticking.cancel)
        await asyncio.sleep((0.2 - clock.now) % PERIOD)
        for name in names:
            state = directory / name
            state.mkdir()
            options = ProbeOptions(
                period=Duration(PERIOD),
                members=MembershipOptions(nodes=names, name=name),
                peer=PeerOptions(
                    listen_address=f"{name}:{port}", key_file=secret(state, "key", KEY)
                ),
                policy=PolicyOptions(),
            )
            agent = Agent(change(options), state, (shots or {}).get(name) or snapshot(), clock)
            agent.service.start()
            started.append(agent)
        try:
            yield started
        finally:
            await asyncio.gather(*(agent.service.close() for agent in started))


def set_maintenance(shot: Snapshot, end: float) -> None:
    """Have a node's collector report maintenance until a time; 0 ends it."""
    shot.expect("maintenance", 1000.0)
    active = maintenance.ACTIVE(float(bool(end)))
    shot.put(
        "maintenance",
        CollectionResult(
            CollectionOutcome.OK, (active, maintenance.END(end)) if end else (active,)
        ),
    )
