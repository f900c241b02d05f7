"""The service for the training jobs on this node: receives heartbeats and watches for hangs.

The collectors `training` and `job_hang` read from it and define its options.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, cast

from dshealthd.core import state_writer
from dshealthd.core.collector import NotAvailable, Reason, SourceError
from dshealthd.core.schema import SchemaError
from dshealthd.core.timing import Periodic
from dshealthd.jobs.hangs.detector import HangDetector, Suspicions
from dshealthd.jobs.hangs.pace import Pace
from dshealthd.jobs.hangs.states import NO_WORK
from dshealthd.jobs.heartbeats.reception import Reception

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from dshealthd.config.config import Config
    from dshealthd.core.collector import Sample
    from dshealthd.core.host import Host
    from dshealthd.jobs.hangs.judge import Standstill
    from dshealthd.jobs.hangs.states import Work
    from dshealthd.jobs.options import HangOptions, HeartbeatOptions

log = logging.getLogger(__name__)

RESTING = 5.0
"""Least seconds between two looks at ranks while there is none."""
ADOPTION = 15.0
"""Seconds between two looks for pages of processes that have not connected."""
SAVE_DEADLINE = 2.0
"""Deadline in seconds of the last write at shutdown, which takes some 20 ms."""


class Jobs:
    """The service: it owns the heartbeat reception and the hang detector."""

    name = "jobs"

    def __init__(
        self,
        monotonic: Callable[[], float],
        wall: Callable[[], float],
        on_look: Callable[[Iterable[Standstill]], object] = lambda _hangs: None,
        state: Path | None = None,
        on_suspicion: Callable[[str], object] = lambda _job: None,
        work: Callable[[str], Work] = lambda _job: NO_WORK,
        pages: Callable[[], Iterable[tuple[int, int, int]]] = lambda: (),
        on_check: Callable[..., object] = lambda *_: None,
    ) -> None:
        """Prepare; `apply` starts the service.

        `on_look` is called in the loop after each check, with all hangs confirmed by then and what
        is one unless a rank elsewhere is at work, and
        `on_suspicion` with a job that may hang (`dshealthd.jobs.hangs.detector`). Both must return
        at once. `state` is the directory for the ranks' baselines, from which a restarted agent
        continues; None to keep nothing. `work` returns what the GPUs and files of a job show,
        `pages` pid, start and user of the processes that have a page with heartbeats. `on_check` is
        called with what each check has shown, as `dshealthd.findings.attempts` takes it.
        """
        self._clocks: dict[str, Callable[[], float]] = {"monotonic": monotonic, "wall": wall}
        self._on_look = on_look
        self._on_suspicion = on_suspicion
        self._work = work
        self._pages = pages
        self._on_check = on_check
        self._adopting = 0.0
        self._suspicions = Suspicions()
        self._state = state
        self._pace: Pace | None = None
        self._heartbeat_options: HeartbeatOptions | None = None
        self._hang_options: HangOptions | None = None
        self._host: Host | None = None
        self._reception: Reception | None = None
        self._detector: HangDetector | None = None
        self._tending: Periodic | None = None
        self._looking: Periodic | None = None

    async def apply(self, config: Config) -> None:
        """Receive heartbeats and watch jobs as `training` and `job_hang` are configured.

        Parts whose options are unchanged continue, with their senders and baselines.
        """
        host = config.path.host
        heartbeats = cast("HeartbeatOptions", config.collectors["training"])
        hangs = cast("HangOptions", config.collectors["job_hang"])
        if (host, hangs) != (self._host, self._hang_options):
            self._stop_looking()
        if (host, heartbeats) != (self._host, self._heartbeat_options):
            self._stop_receiving()
        self._host, self._heartbeat_options, self._hang_options = host, heartbeats, hangs
        known: list[tuple[int, int, int]] = []
        if heartbeats.enabled and self._tending is None:
            self._reception = Reception(heartbeats.socket, host, **self._clocks)
            self._tending = Periodic(self._tend, heartbeats.interval)
        if hangs.enabled and self._looking is None:
            self._detector = HangDetector(hangs, host, **self._clocks, work=self._work)
            known = await self._resume(self._detector, host)
            self._looking = Periodic(self._look, hangs.interval)
        if not hangs.enabled:
            self._report()
        await asyncio.sleep(0)  # run the first turns, so that collectors find the socket open
        if self._reception is not None and self._receiving():
            for process in known:
                self._reception.receiver.adopt(*process)

    def heartbeats(self) -> Reception:
        """Return the reception of heartbeats; NotAvailable or SourceError if there is none."""
        if self._reception is None or self._tending is None:
            message = "heartbeats come in while an agent runs"
            raise NotAvailable(message)
        if self._tending.failed:
            raise SourceError(Reason.INTERNAL, "the last check of the heartbeat socket failed")
        if self._reception.problem is not None:
            raise self._reception.problem.with_traceback(None)  # without an earlier raise's frames
        return self._reception

    def hangs(self) -> HangDetector:
        """Return the hang detector; NotAvailable or SourceError if nothing can be known."""
        if self._detector is None or self._looking is None or not self._receiving():
            message = "no heartbeats come in"
            raise NotAvailable(message)
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

    def samples(self) -> Iterator[Sample]:
        """Yield nothing: collectors export the state of jobs."""
        yield from ()

    def status(self) -> Mapping[str, Any]:
        """Return whether heartbeats can be received, for the status document."""
        try:
            self.heartbeats()
        except NotAvailable as absence:
            return {"state": "off", "detail": str(absence)}
        except SourceError as error:
            return {"state": "failing", "detail": f"heartbeats: {error.detail}"}
        return {"state": "ok"}

    async def close(self) -> None:
        """Stop listening, release all jobs' processes, and save their baselines."""
        self._stop_looking()
        self._stop_receiving()
        if self._pace is not None:
            await state_writer.settled(SAVE_DEADLINE)

    async def _resume(self, detector: HangDetector, host: Host) -> list[tuple[int, int, int]]:
        """Load the baselines that an earlier agent of this boot saved.

        Return pid, start and user of its ranks: a hung rank sends nothing that would announce it.
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
        return [(rank.pid, rank.start, rank.user) for rank in saved]

    def _receiving(self) -> bool:
        return self._reception is not None and self._reception.receiver.is_open

    def _tend(self) -> None:
        """Tend the socket, and read what processes that cannot reach it have written: in a pod, no
        directory of the host need be mounted.
        """
        if self._reception is None:
            return
        self._reception.tend()
        now = self._clocks["monotonic"]()
        if self._receiving() and now >= self._adopting:
            self._adopting = now + ADOPTION
            for process in self._pages():
                self._reception.receiver.adopt(*process)

    def _look(self) -> None:
        if self._reception is None or self._detector is None or self._hang_options is None:
            return
        if self._looking is not None:
            ranks = self._reception.receiver.connections or self._detector.jobs
            interval = self._hang_options.interval
            self._looking.interval = interval if ranks else max(interval, RESTING)
        if not self._receiving():
            return
        senders = self._reception.ranks()
        self._detector.check(senders)
        now, wall = self._clocks["monotonic"](), self._clocks["wall"]()
        found = senders, self._detector.jobs, self._detector.standstills, now, wall
        # In its own callback, as in `_report`: a callee's defect must not fail the check.
        asyncio.get_running_loop().call_soon(self._on_check, *found)
        for job in self._suspicions.due(self._detector.jobs, self._clocks["monotonic"]()):
            asyncio.get_running_loop().call_soon(self._on_suspicion, job)
        if self._pace is not None:
            self._pace.keep(self._detector.watch.saved(), self._clocks["monotonic"]())
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

    def _stop_receiving(self) -> None:
        if self._tending is not None:
            self._tending.close()
        if self._reception is not None:
            self._reception.close()
        self._tending = self._reception = None
