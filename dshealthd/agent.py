"""The agent: one event loop that owns the sockets, the scheduler and the signals."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import time
from typing import TYPE_CHECKING, Any

from dshealthd import config as configuration
from dshealthd.config import ConfigError
from dshealthd.exposition import Format
from dshealthd.scheduler import Scheduler
from dshealthd.snapshot import Snapshot
from dshealthd.telemetry import Telemetry
from dshealthd.web.server import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from dshealthd.collector import Sample
    from dshealthd.config import Config
    from dshealthd.evidence.service import Evidence
    from dshealthd.fitness import Fitness
    from dshealthd.jobs.hangs.hang import Hang
    from dshealthd.nvrx.service import Service as HealthCheck
    from dshealthd.probe.service import Service

log = logging.getLogger(__name__)


class Agent:
    """One node's agent; `run` serves until SIGTERM or SIGINT, and reloads at SIGHUP."""

    def __init__(self, config: Config, file: Path | None, flags: Mapping[str, Mapping[str, Any]]) -> None:
        """Prepare to run on `config`, which came from `file` and `flags`."""
        self._config = config
        self._file = file
        self._flags = flags
        self._snapshot = Snapshot(time.monotonic, time.time)
        self._scheduler = Scheduler(self._snapshot, time.monotonic, time.time, config.path.state)
        self._telemetry = Telemetry(time.time())
        self._probes: Service | None = None
        self._evidence: Evidence | None = None
        self._health_check: HealthCheck | None = None
        self._server = Server(config.web, self._snapshot, self._own_samples, self._telemetry, self._sections, self._targets)

    async def run(self, announce: Callable[[str], None]) -> None:
        """Serve until told to stop; OSError when the socket cannot be opened.

        `announce` is given the page's address once it is open.
        """
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        reload = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        loop.add_signal_handler(signal.SIGHUP, reload.set)
        await self._server.start()
        self._make_state_directory()
        announce(self._server.url(socket.gethostname()))
        tasks = [
            asyncio.create_task(self._keep_collecting(), name="collecting"),
            asyncio.create_task(self._keep_reloading(reload), name="reloading"),
            asyncio.create_task(stop.wait(), name="waiting for a signal"),
        ]
        gc.freeze()  # what start-up made stays; later collections look only at what is new
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await self._server.close()
            await asyncio.gather(self._scheduler.close(), self._stop_probes(), self._stop_evidence(), self._stop_health_check())
        log.info("stopped")

    def _make_state_directory(self) -> None:
        """Make the directory for what outlives a restart; without it the agent runs, and the collectors that miss it say so."""
        try:
            self._config.path.state.mkdir(mode=0o750, parents=True, exist_ok=True)
        except OSError as error:
            log.warning("path.state: nothing will be kept over a restart: %s", error)

    async def _keep_collecting(self) -> None:
        await self._scheduler.apply(self._config)
        await self._apply_probes()
        await self._apply_health_check()
        self._apply_evidence()
        await self._scheduler.watch()

    async def _keep_reloading(self, reload: asyncio.Event) -> None:
        while True:
            await reload.wait()
            reload.clear()
            await self._reload()

    async def _reload(self) -> None:
        """Load the configuration again; a bad one changes nothing but the metric that says so."""
        try:
            config = configuration.load(self._file, self._flags)
        except ConfigError as error:
            self._telemetry.reload(time.time(), ok=False)
            log.error("configuration not reloaded, the one before stays in force:\n%s", error)
            return
        for key in configuration.restart_needed(self._config, config):
            log.warning("%s has changed and takes effect after a restart", key)
        self._config = config
        await self._scheduler.apply(config)
        await self._apply_probes()
        await self._apply_health_check()
        self._apply_evidence()
        self._telemetry.reload(time.time(), ok=True)
        log.info("configuration reloaded")

    async def _apply_probes(self) -> None:
        """Run the probes that the configuration asks for; where it has not changed, their members are read again."""
        options = self._config.probe
        if self._probes is not None and self._probes.options == options:
            self._probes.reload()
            return
        await self._stop_probes()
        if options.wanted:
            from dshealthd.probe.service import Service  # an agent without probes does without what they need

            paths = self._config.path
            self._probes = Service(
                options, host=paths.host, state=paths.state, snapshot=self._snapshot, monotonic=time.monotonic, wall=time.time
            )
            self._probes.start()

    async def _stop_probes(self) -> None:
        probes, self._probes = self._probes, None
        if probes is not None:
            await probes.close()

    async def _apply_health_check(self) -> None:
        """Answer the health check of NVRx if the configuration asks for it."""
        options = self._config.nvrx
        if self._health_check is not None and self._health_check.options == options:
            return
        await self._stop_health_check()
        if options.socket is not None:
            from dshealthd.nvrx.service import Service as HealthCheck  # an agent without it does without what it needs

            self._health_check = HealthCheck(options, self._judge, time.monotonic)
            self._health_check.start()

    async def _stop_health_check(self) -> None:
        health_check, self._health_check = self._health_check, None
        if health_check is not None:
            await health_check.close()

    def _judge(self) -> Fitness:
        """Return what is known now of this node's fitness to train."""
        from dshealthd.fitness import Accusation, fitness

        probes = {} if self._probes is None else self._probes.status()
        accusations = [Accusation(suspect["kind"], suspect["component"], suspect["reason"]) for suspect in probes.get("suspects", ())]
        return fitness(self._snapshot, accusations, probes.get("name", ""), now=time.monotonic(), wall=time.time())

    def _apply_evidence(self) -> None:
        """Have evidence of hangs taken as the configuration asks for."""
        if self._evidence is None:
            from dshealthd.evidence.service import Evidence
            from dshealthd.jobs.hangs.hang import Hangs

            def hangs() -> Iterable[Hang]:
                known = self._scheduler.shared(Hangs)
                return () if known is None else known.current.values()

            def metrics() -> str:
                return self._snapshot.body(Format.PROMETHEUS, self._own_samples).decode()

            def probes() -> Mapping[str, Any]:
                probe: Mapping[str, Any] = self._sections()["probe"]
                return probe

            paths = self._config.path
            self._evidence = Evidence(
                self._config.evidence, paths.state, paths.host, metrics=metrics, probes=probes, monotonic=time.monotonic, wall=time.time
            )
            self._evidence.start(hangs)
        self._evidence.options = self._config.evidence

    async def _stop_evidence(self) -> None:
        evidence, self._evidence = self._evidence, None
        if evidence is not None:
            await evidence.close()

    def _own_samples(self) -> Iterator[Sample]:
        yield from self._telemetry.samples()
        yield from self._scheduler.samples()
        yield from self._server.samples()
        if self._probes is not None:
            yield from self._probes.samples()
        if self._health_check is not None:
            yield from self._health_check.samples()
        if self._evidence is not None:
            yield from self._evidence.samples()

    def _targets(self, port: int) -> bytes:
        """Return what Prometheus is to scrape; LookupError where it is not known who takes part in probes."""
        if self._probes is None:
            message = "no probes are configured"
            raise LookupError(message)
        from dshealthd.targets import document  # with what probes need

        return document(self._probes.membership, port)

    def _sections(self) -> Mapping[str, Any]:
        """Return the parts of the status document that are not collectors'."""
        return {
            "probe": {"state": "off"} if self._probes is None else self._probes.status(),
            "evidence": {"state": "off"} if self._evidence is None else self._evidence.status(),
        }
