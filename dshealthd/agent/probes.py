"""The probes as a service of the agent, off unless configured.

An agent without probes imports none of their modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dshealthd.probe.options import ProbeOptions

if TYPE_CHECKING:
    from dshealthd.config.config import Config
    from dshealthd.core.collector import Sample
    from dshealthd.core.snapshot import Snapshot
    from dshealthd.findings.finding import Verdict
    from dshealthd.fleet.view import Fleet
    from dshealthd.jobs.hangs.judge import Standstill
    from dshealthd.probe.members.membership import Membership
    from dshealthd.probe.service import ProbeService


class Probes:
    """The probes of this node, or none."""

    name = "probe"

    def __init__(
        self,
        snapshot: Snapshot,
        verdict: Callable[[], Verdict],
        jobs: Callable[[], Iterable[Mapping[str, Any]]],
        hours: Callable[[], str],
        collect: Callable[[Iterable[str]], None],
        monotonic: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        """Prepare; `apply` starts.

        `verdict`, `jobs` and `hours` return this node's state and that of its last 24 hours for
        requests of other members. `collect` has collectors look at once, by name.
        """
        self._snapshot = snapshot
        self._verdict, self._jobs, self._hours = verdict, jobs, hours
        self._collect = collect
        self._monotonic = monotonic
        self._wall = wall
        self._running: ProbeService | None = None
        self._fleet: Fleet | None = None

    @property
    def membership(self) -> Membership:
        """The members as this agent knows them; LookupError while they are unknown."""
        if self._running is None:
            raise LookupError("no probes are configured")
        return self._running.membership

    @property
    def me(self) -> str:
        """This node's name among the members; empty without probes, or while it is not known."""
        return "" if self._running is None else self._running.me

    async def apply(self, config: Config) -> None:
        """Run the configured probes.

        If their options have not changed, only reread the members.
        """
        if self._running is not None and self._running.options == config.section(ProbeOptions):
            self._running.reload()
            return
        await self.close()
        if config.section(ProbeOptions).wanted:
            from dshealthd.fleet.summary import SummaryCache
            from dshealthd.fleet.view import fleet_of
            from dshealthd.probe.service import ProbeService

            summary = SummaryCache(self._verdict, self._jobs, self._hours, self._monotonic)
            self._running = ProbeService(
                config.section(ProbeOptions),
                host=config.path.host,
                state=config.path.state,
                snapshot=self._snapshot,
                monotonic=self._monotonic,
                wall=self._wall,
                summary=summary,
                collect=self._collect,
            )
            self._fleet = fleet_of(self._running, summary)
            self._running.start()

    def samples(self) -> Iterator[Sample]:
        """Yield the metrics of the probes, if they run."""
        if self._running is not None:
            yield from self._running.samples()

    def status(self) -> Mapping[str, Any]:
        """Return the state of the probes for the status document."""
        return {"state": "off"} if self._running is None else self._running.status()

    def update_hangs(self, hangs: Iterable[Standstill]) -> None:
        """Have the probes, if they run, meet the other nodes of jobs that are hung here."""
        if self._running is not None:
            self._running.update_hangs(hangs)

    async def fleet_document(self) -> bytes:
        """Return the fleet document with all members' states; LookupError if none are known."""
        if self._fleet is None:
            raise LookupError("no probes are configured")
        return await self._fleet.picture()

    async def close(self) -> None:
        """Stop the probes and the fleet view."""
        fleet, self._fleet = self._fleet, None
        if fleet is not None:
            await fleet.close()
        running, self._running = self._running, None
        if running is not None:
            await running.close()
