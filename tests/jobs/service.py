"""The service of jobs as an agent runs it, for tests of what reads it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

from dshealthd.config.config import Config, Paths
from dshealthd.core.collector import Context
from dshealthd.core.host import Host
from dshealthd.jobs.hangs.judge import Standstill
from dshealthd.jobs.options import HangOptions, HeartbeatOptions
from dshealthd.jobs.service import Jobs

OFF = HangOptions(enabled=False)


def configured(
    heartbeats: HeartbeatOptions, hangs: HangOptions = OFF, host: Host | None = None
) -> Config:
    """Return a configuration with these options alone."""
    host = host or Host()
    path = Paths(procfs=host.procfs, sysfs=host.sysfs, dev=host.dev, rootfs=host.rootfs)
    return Config(path=path, collectors={"training": heartbeats, "job_hang": hangs})


@contextlib.asynccontextmanager
async def jobs(
    config: Config,
    on_look: Callable[[Iterable[Standstill]], object] = lambda _: None,
    state: Path | None = None,
) -> AsyncIterator[tuple[Jobs, Context]]:
    """Run the service; yield it, and what collectors of the same agent are given."""
    service = Jobs(time.monotonic, time.time, on_look, state)
    await service.apply(config)
    try:
        yield (
            service,
            Context(
                host=config.path.host, monotonic=time.monotonic, wall=time.time, services=(service,)
            ),
        )
    finally:
        await service.close()
