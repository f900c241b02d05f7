"""The service of jobs as an agent runs it, for tests of what reads it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

from dshealthd.config.config import Config, Paths
from dshealthd.core.collector import CollectorOptions, Context
from dshealthd.core.host import Host
from dshealthd.core.options import Duration
from dshealthd.jobs.hangs.judge import Standstill
from dshealthd.jobs.options import HangOptions
from dshealthd.jobs.service import Jobs
from tests.jobs.heartbeats.senders import own_pages

OFF = HangOptions(enabled=False)
ON = CollectorOptions()
OFTEN = CollectorOptions(interval=Duration(0.1))


def configured(
    heartbeats: CollectorOptions = ON, hangs: HangOptions = OFF, host: Host | None = None
) -> Config:
    """Return a configuration with these options alone."""
    host = host or Host()
    path = Paths(procfs=host.procfs, sysfs=host.sysfs, dev=host.dev, rootfs=host.rootfs)
    collectors = {"heartbeat_pages": heartbeats, "training": heartbeats, "job_hang": hangs}
    return Config(path=path, collectors=collectors)


@contextlib.asynccontextmanager
async def jobs(
    config: Config,
    on_look: Callable[[Iterable[Standstill]], object] = lambda _: None,
    state: Path | None = None,
) -> AsyncIterator[tuple[Jobs, Context]]:
    """Run the service, which reads the pages of this test's processes; yield it, and what
    collectors of the same agent are given.
    """
    service = Jobs(time.monotonic, time.time, on_look, state, pages=own_pages)
    await service.apply(config)
    context = Context(host=config.path.host, services=(service,))
    try:
        yield service, context
    finally:
        await service.close()
