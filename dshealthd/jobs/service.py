"""The service for the training jobs on this node: reads heartbeats and watches for hangs.

The collectors `training` and `job_hang` read from it and define its options.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from dshealthd.core import state_writer
from dshealthd.core.collector import CollectorOptions, NotAvailable, Reason, Sample, SourceError
from dshealthd.core.schema import SchemaError
from dshealthd.core.timing import Periodic
from dshealthd.jobs.hangs.detector import HangDetector, Suspicions
from dshealthd.jobs.hangs.pace import Pace
from dshealthd.jobs.hangs.states import NO_WORK, Work
from dshealthd.jobs.heartbeats.page import PageHolder
from dshealthd.jobs.heartbeats.reader import HeartbeatReader

if TYPE_CHECKING:
    from pathlib import Path

    from dshealthd.config.config import Config
    from dshealthd.core.host import Host
    from dshealthd.jobs.hangs.judge import Standstill
    from dshealthd.jobs.options import HangOptions

log = logging.getLogger(__name__)


class Jobs:
    """The service: it owns the reader of heartbeats and the hang detector."""

    name = "jobs"

    def __init__(
        self,
        monotonic: Callable[[], float],
        wall: Callable[[], float],
        on_look: Callable[[Iterable[Standstill]], object] = lambda _hangs: None,
        state: Path | None = None,
        on_suspicion: Callable[[str], object] = lambda _job: None,
        work: Callable[[str], Work] = lambda _job: NO_WORK,
        pages: Callable[[], Sequence[PageHolder]] = lambda: (),
        on_check: Callable[..., object] = lambda *_: None,
    ) -> None:
        """Prepare; `apply` starts the service.

        `on_look` is called in the loop after each check, with all hangs confirmed by then and what
        is one unless a rank elsewhere is at work, and
        `on_suspicion` with a job that may hang (`dshealthd.jobs.hangs.detector`). Both must return
        at once. `state` is the directory for the ranks' baselines, from which a restarted agent
        continues; None to keep nothing. `work` returns what the GPUs and files of a job show,
        `pages` the processes that have a page with heartbeats. `on_check` is
        called with what each check has shown, as `dshealthd.findings.attempts` takes it.
        """
        self._clocks: dict[str, Callable[[], float]] = {"monotonic": monotonic, "wall": wall}
        self._on_look = on_look
        self._on_suspicion = on_suspicion
        self._work = work
        self._pages = pages
        self._on_check = on_check
        self._suspicions = Suspicions()
        self._state = state
        self._pace: Pace | None = None
        self._heartbeat_options: tuple[CollectorOptions, ...] = ()
        self._hang_options: HangOptions | None = None
        self._host: Host | None = None
        self._reader: HeartbeatReader | None = None
        self._problem: SourceError | None = None
        """Why the reader is not open."""
        self._detector: HangDetector | None = None
        self._tending: Periodic | None = None
        self._looking: Periodic | None = None

    async def apply(self, config: Config) -> None:
        """Read heartbeats and watch jobs as `training` and `job_hang` are configured.

        Parts whose options are unchanged continue, with their senders and baselines.
        """
        host = config.path.host
        # One finds the pages, and the other shows what they hold.
        heartbeats = tuple(config.collectors[name] for name in ("heartbeat_pages", "training"))
        hangs = cast("HangOptions", config.collectors["job_hang"])
        if (host, hangs) != (self._host, self._hang_options):
            self._stop_looking()
        if (host, heartbeats) != (self._host, self._heartbeat_options):
            self._stop_reading()
        self._host, self._heartbeat_options, self._hang_options = host, heartbeats, hangs
        known: list[PageHolder] = []
        if all(options.enabled for options in heartbeats) and self._tending is None:
            self._reader = HeartbeatReader(host, **self._clocks)
            self._tending = Periodic(partial(self._tend, self._reader), heartbeats[1].interval)
        if hangs.enabled and self._looking is None:
            self._detector = HangDetector(hangs, host, **self._clocks, work=self._work)
            known = await self._resume(self._detector, host)
            self._looking = Periodic(partial(self._check, self._detector), hangs.interval)
        if not hangs.enabled:
            self._report()
        await asyncio.sleep(0)  # run the first turns, so that collectors find the reader open
        if self._reader is not None and self._reading():
            self._reader.follow(known)

    def heartbeats(self) -> HeartbeatReader:
        """Return the reader of heartbeats; NotAvailable or SourceError if there is none."""
        if self._reader is None or self._tending is None:
            raise NotAvailable("heartbeats are read while an agent runs")
        if self._tending.failed:
            raise SourceError(Reason.INTERNAL, "the last check of the heartbeats' senders failed")
        if self._problem is not None:
            raise self._problem.with_traceback(None)  # without an earlier raise's frames
        return self._reader

    def hangs(self) -> HangDetector:
        """Return the hang detector; NotAvailable or SourceError if nothing can be known."""
        if self._detector is None or self._looking is None or not self._reading():
            raise NotAvailable("no heartbeats are read")
        if self._looking.failed:
            raise SourceError(Reason.INTERNAL, "the last check of the ranks failed")
        return self._detector

    @property
    def standstills(self) -> Mapping[str, Standstill]:
        """The jobs that stand still here, as of the last check; none while nothing is known."""
        try:
            return self.hangs().standstills
        except (NotAvailable, SourceError):
            return {}

    def follow(self) -> None:
        """Read the pages that there are by now; called when they have been searched for."""
        if self._reader is not None and self._reader.is_open:
            self._reader.follow(self._pages())

    def samples(self) -> Iterator[Sample]:
        """Yield nothing: collectors export the state of jobs."""
        yield from ()

    def status(self) -> Mapping[str, Any]:
        """Return whether heartbeats can be read, for the status document."""
        try:
            self.heartbeats()
        except NotAvailable as absence:
            return {"state": "off", "detail": str(absence)}
        except SourceError as error:
            return {"state": "failing", "detail": f"heartbeats: {error.detail}"}
        return {"state": "ok"}

    async def close(self) -> None:
        """Release all jobs' processes, and save their baselines."""
        self._stop_looking()
        self._stop_reading()
        if self._pace is not None:
            await state_writer.wait_until_written(state_writer.DEADLINE)

    async def _resume(self, detector: HangDetector, host: Host) -> list[PageHolder]:
        """Load the baselines that an earlier agent of this boot saved.

        Return its ranks: the page of one that hangs in the kernel is not searched for.
        """
        if self._state is None:
            return []
        try:
            self._pace = self._pace or Pace(self._state, host)
            saved = await self._pace.load()
        except (OSError, SchemaError) as error:
            log.warning("cannot load the ranks' baselines, they are learnt again: %s", error)
            return []
        detector.watch.restore(saved)
        return [PageHolder(rank.pid, rank.start, rank.user) for rank in saved]

    def _reading(self) -> bool:
        return self._reader is not None and self._reader.is_open

    def _tend(self, reader: HeartbeatReader) -> None:
        """Open the reader, let it drop senders that have ended, and show it the pages there are."""
        if not reader.is_open:
            self._problem = None
            try:
                reader.start(asyncio.get_running_loop())
            except SourceError as error:
                self._problem = error
                return
        reader.refresh()
        self.follow()

    def _check(self, detector: HangDetector) -> None:
        """Check the ranks for hangs, if their heartbeats are read, and report what is found."""
        if self._reader is None or not self._reader.is_open:
            return
        senders = self._reader.ranks()
        detector.check(senders)
        if self._looking and self._hang_options and self._tending:
            # While there is no rank, no more often than new ones are taken.
            most = 0.0 if detector.jobs or len(self._reader) else self._tending.interval
            self._looking.interval = max(self._hang_options.interval, most)
        now, wall = self._clocks["monotonic"](), self._clocks["wall"]()
        found = senders, detector.jobs, detector.standstills, now, wall
        # In its own callback, as in `_report`: a callee's defect must not fail the check.
        asyncio.get_running_loop().call_soon(self._on_check, *found)
        for job in self._suspicions.due(detector.jobs, now):
            asyncio.get_running_loop().call_soon(self._on_suspicion, job)
        if self._pace is not None:
            self._pace.keep(detector.watch.saved(), now)
        self._report()

    def _report(self) -> None:
        hangs = () if self._detector is None else tuple(self._detector.reported)
        # In its own callback: a callee's defect must not fail the check.
        asyncio.get_running_loop().call_soon(self._on_look, hangs)

    def _stop_looking(self) -> None:
        if self._looking is not None:
            self._looking.close()
        if self._detector is not None:
            if self._pace is not None:
                now = self._clocks["monotonic"]()
                self._pace.keep(self._detector.watch.saved(), now, at_once=True)
            self._detector.close()
        self._looking = self._detector = None

    def _stop_reading(self) -> None:
        if self._tending is not None:
            self._tending.close()
        if self._reader is not None:
            self._reader.close()
        self._tending = self._reader = self._problem = None
