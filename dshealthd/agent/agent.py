"""The agent: one event loop that owns the sockets, the scheduler and the signals."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from dshealthd.agent import logs, node_figures
from dshealthd.agent.probes import Probes
from dshealthd.agent.systemd import ServiceManager, status_line
from dshealthd.collection.scheduler import Scheduler
from dshealthd.config import config as configuration
from dshealthd.core import background, garbage, state_file, state_writer, timing
from dshealthd.core.child import ErrorPipe, cause
from dshealthd.core.collector import News, Sample
from dshealthd.core.documents import LeftOut
from dshealthd.core.options import ConfigError
from dshealthd.core.self_metrics import SelfMetrics
from dshealthd.core.snapshot import Snapshot
from dshealthd.core.state_writer import DEADLINE
from dshealthd.core.text import first_of
from dshealthd.evidence.options import EvidenceOptions
from dshealthd.evidence.service import Evidence
from dshealthd.findings.judge import Judge
from dshealthd.findings.judgement import series_of
from dshealthd.findings.options import FindingsOptions
from dshealthd.findings.overview import overview
from dshealthd.findings.work import work
from dshealthd.jobs.heartbeats.page import PageHolder, page_holder
from dshealthd.jobs.service import Jobs
from dshealthd.nvrx.fitness import Fitness, fitness
from dshealthd.nvrx.options import NvrxOptions
from dshealthd.nvrx.service import HealthCheckService as HealthCheck
from dshealthd.web.server import Server

if TYPE_CHECKING:
    from pathlib import Path

    from dshealthd.config.config import Config
    from dshealthd.findings.series import Series
    from dshealthd.jobs.hangs.judge import Standstill

log = logging.getLogger(__name__)

RELOAD_DEADLINE = 10.0
"""Seconds to reload the configuration; a cold disk under load is slow."""


class Agent:
    """One node's agent; `run` serves until SIGTERM or SIGINT, and reloads at SIGHUP."""

    def __init__(
        self, config: Config, file: Path | None, flags: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Prepare to run on `config`, which came from `file` and `flags`."""
        self._config = config
        self._started_with = config
        self._file = file
        self._flags = flags
        self._snapshot = Snapshot(time.monotonic, time.time)
        self._telemetry = SelfMetrics(time.time())
        self._judge = Judge(
            self._snapshot,
            self._samples_to_judge,
            self._names,
            config.path.state,
            time.monotonic,
            time.time,
            lambda: self._jobs.standstills,
        )
        self._problems: dict[str, str] = {}
        """Problems of the agent itself, one line each, by their subject."""
        self._probes = Probes(
            self._snapshot,
            lambda: self._judge.verdict,
            lambda: overview(self._series(), "", wall=time.time()),
            self._judge.hours,
            self._collect,
            time.monotonic,
            time.time,
        )
        self._evidence = Evidence(
            config.section(EvidenceOptions),
            config.path.state,
            config.path.host,
            metrics=lambda: self._snapshot.body(self._own_samples).decode(),
            document=lambda: self._sections(LeftOut()),
            monotonic=time.monotonic,
            wall=time.time,
        )
        self._jobs = jobs = Jobs(
            time.monotonic,
            time.time,
            self._update_hangs,
            config.path.state,
            lambda job: self._scheduler.tell(News.HANG_SUSPECTED, job),
            lambda job: work(self._series(), job),
            self._pages,
            self._judge.attempts.settle,
        )
        self._snapshot.on_result["heartbeat_pages"] = jobs.follow
        self._scheduler = Scheduler(
            self._snapshot, time.monotonic, time.time, config.path.state, services=(jobs,)
        )
        self._services: tuple[Service, ...] = (
            jobs,
            self._scheduler,
            self._probes,
            HealthCheck(config.section(NvrxOptions), self._fitness, time.monotonic),
            self._evidence,
            self._judge,
        )
        """In start order: services that collectors read come before the scheduler, and the judge
        comes last, as it judges all of them.
        """
        self._server = Server(
            config.web,
            self._snapshot,
            self._own_samples,
            self._names,
            self._telemetry,
            lambda: self._judge.unready,
            self._sections,
            {
                "/api/v1/history": self._judge.history,
                "/api/v1/trends": self._judge.trends,
                "/api/v1/targets": self._targets,
                "/api/v1/fleet": self._probes.fleet_document,
            },
            self._fitness,
        )

    async def run(
        self, announce: Callable[[str], None], manager: ServiceManager | None = None
    ) -> None:
        """Serve until signalled to stop. Raise ListenError if the socket cannot be opened.

        `announce` receives the page's address once it is open; `manager` is notified of start,
        reload, end and state, and that the event loop is alive.
        """
        manager = manager or ServiceManager()
        cycles = garbage.Cycles(time.monotonic)  # takes some 30 ms; nobody waits yet
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        reload = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        loop.add_signal_handler(signal.SIGHUP, reload.set)
        await self._judge.load()  # the first answer has the findings of an earlier agent
        await self._server.start()
        errors = self._children_errors()
        await self._make_state_directory()
        announce(self._server.url(socket.gethostname()))
        manager.ready(self._status_line())
        tasks = [
            asyncio.create_task(self._scheduler.watch(), name="collecting"),
            asyncio.create_task(self._keep_configured(reload, manager), name="configuring"),
            asyncio.create_task(manager.feed_watchdog(), name="feeding the watchdog"),
            asyncio.create_task(stop.wait(), name="waiting for a signal"),
        ]
        beside = [
            asyncio.create_task(_keep_freeing(cycles), name="freeing cycles"),
            asyncio.create_task(manager.keep_status(self._status_line), name="status line"),
        ]
        for each in beside:
            each.add_done_callback(_beside_ended)
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            self._judge.record_stop()
        finally:
            manager.stopping()
            for task in (*tasks, *beside):
                task.cancel()
            await self._server.close()
            await asyncio.gather(*(service.close() for service in self._services))
            if errors is not None:
                errors.close()
        log.info("stopped")

    def _collect(self, names: Iterable[str]) -> None:
        """Have collectors look at once."""
        self._scheduler.collect(names)

    def _children_errors(self) -> ErrorPipe | None:
        """Route the standard error of the agent's children into the log's queue."""
        try:
            return ErrorPipe(logs.writer.put)
        except OSError as error:
            log.warning("children inherit standard error: %s", cause(error))
            return None

    async def _make_state_directory(self) -> None:
        """Create the agent's directory for state that survives a restart.

        The agent runs without it; collectors that need it report that.
        """
        make = functools.partial(state_file.make_directory_in_child, str(self._config.path.state))
        try:
            await background.call(make, "path.state", DEADLINE, OSError)
        except OSError as error:
            why = str(error) or f"the disk does not answer within {DEADLINE:g} s"
            self._problems["path.state"] = f"path.state: no state will survive a restart: {why}"
            log.warning("%s", self._problems["path.state"])

    def _status_line(self) -> str:
        problems = list(self._problems.values())
        for service in self._services:
            status = service.status()
            if status["state"] == "failing" and status["detail"]:
                problems.append(f"{service.name}: {first_of(status['detail'])}")
        return status_line(
            self._snapshot, problems, self._server.url(socket.gethostname()), time.monotonic()
        )

    async def _apply(self) -> None:
        for service in self._services:
            await service.apply(self._config)

    async def _keep_configured(self, reload: asyncio.Event, manager: ServiceManager) -> None:
        """Apply the configuration, and again at each reload: nothing else may, as a service that is
        applied twice at a time would start everything twice.
        """
        await self._apply()
        while True:
            await reload.wait()
            reload.clear()
            manager.reloading()
            await self._reload()
            manager.ready(self._status_line())

    async def _reload(self) -> None:
        """Reload the configuration for all services; an invalid one only changes a metric."""
        try:
            config = await background.call(
                lambda: configuration.load(self._file, self._flags),
                "configuration",
                RELOAD_DEADLINE,
                ConfigError,
            )
        except (ConfigError, OSError) as error:  # TimeoutError is one
            self._telemetry.reload_ok = False
            why = str(error) or f"the disk does not answer within {RELOAD_DEADLINE:g} s"
            self._problems["config"] = f"configuration not reloaded: {first_of(why)}"
            log.error("configuration not reloaded, keeping the previous one:\n%s", why)
            return
        self._problems.pop("config", None)
        for key in configuration.restart_needed(self._started_with, config):
            log.warning("%s has changed and takes effect after a restart", key)
        self._config = config
        await self._apply()
        self._telemetry.reload_ok = True
        log.info("configuration reloaded")

    def _update_hangs(self, hangs: Iterable[Standstill]) -> None:
        found = tuple(hangs)
        self._evidence.update_hangs(hang for hang in found if not hang.is_pause)
        self._probes.update_hangs(found)

    def _names(self) -> tuple[str, str]:
        """Return the host's name, and that of this node among the members of the probes."""
        return socket.gethostname(), self._probes.me

    def _fitness(self) -> Fitness:
        return fitness(self._judge.verdict)

    def _own_samples(self) -> Iterator[Sample]:
        yield from self._samples_to_judge()
        yield from self._judge.samples()
        # Here, not among what is judged: no rule reads them, and a judgment is made every second.
        yield from node_figures.samples(
            self._snapshot, self._config.section(FindingsOptions).limits.gpu_busy_ratio
        )

    def _samples_to_judge(self) -> Iterator[Sample]:
        """Yield the agent's own samples, without the findings that are judged from them."""
        yield from self._telemetry.samples()
        yield from logs.samples()
        yield from state_writer.samples()
        yield from self._server.samples()
        for service in self._services:
            if service is not self._judge:
                yield from service.samples()

    def _pages(self) -> list[PageHolder]:
        """Return the processes that have a page with heartbeats, as a collector has found them."""
        latest = self._snapshot.get("heartbeat_pages")
        return [
            page_holder(dict(zip(sample.metric.dimensions, sample.labels, strict=True)))
            for sample in (() if latest is None else self._snapshot.samples(latest))
            if sample.metric.name == "dshealthd_job_heartbeat_page_info"
        ]

    def _series(self) -> Series:
        """Return what the overview of jobs reads, with the limits by which findings are judged."""
        own = itertools.chain(self._samples_to_judge(), self._judge.derived)
        limits = self._config.section(FindingsOptions).limits
        return series_of(self._snapshot, own, limits, standstills=self._jobs.standstills)

    def _targets(self) -> bytes:
        """Return the targets that Prometheus should scrape.

        Raise LookupError while the members are unknown.
        """
        from dshealthd.probe.members.targets import document  # only probes need its modules

        return document(self._probes.membership, self._server.port)

    def _sections(self, left_out: LeftOut) -> Mapping[str, Any]:
        """Return the parts of the status document that do not come from collectors."""
        place = str(self._evidence.directory)
        return {
            **self._judge.verdict.document(),
            "jobs": left_out.section(
                "jobs", lambda: overview(self._series(), place, left_out, time.time()), otherwise=[]
            ),
            "probe": left_out.section("probe", self._probes.status),
            "evidence": left_out.section("evidence", self._evidence.status),
        }


async def _keep_freeing(cycles: garbage.Cycles) -> None:
    while True:
        await timing.sleep_until_due(garbage.EVERY)
        cycles.free()


def _beside_ended(task: asyncio.Task[None]) -> None:
    """Log a defect in a task that the agent can continue without."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s: ended by a defect: %r", task.get_name(), error, exc_info=error)


class Service(Protocol):
    """One part of the agent, in its event loop; the agent holds a list of them."""

    @property
    def name(self) -> str:
        """The service's name in the log and the status line."""
        ...

    async def apply(self, config: Config) -> None:
        """Run the service as configured, from the first call on; unchanged parts keep running. One
        call at a time.

        A failure to start is a state and never an exception: the agent continues without it.
        """
        ...

    def samples(self) -> Iterator[Sample]:
        """Yield the service's own metrics; none while it is off."""
        ...

    def status(self) -> Mapping[str, Any]:
        """Return the service's state for users: `state` is `off`, `ok`, `running` or `failing`.

        If it is failing, `detail` is the reason.
        """
        ...

    async def close(self) -> None:
        """Stop everything the service started. `apply` may never have been called."""
        ...
