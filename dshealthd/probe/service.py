"""The probe service: set up from the configuration, and again when this node's name changes."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from dshealthd.core import background
from dshealthd.core.collector import Sample, counter, gauge
from dshealthd.core.sockets import listen_address
from dshealthd.core.state_writer import StateFile
from dshealthd.core.timing import happens
from dshealthd.linux import starvation
from dshealthd.linux.local_network import interface_of
from dshealthd.probe.hung_jobs import HungJobs
from dshealthd.probe.members.absences import Absences
from dshealthd.probe.members.hostlist import numeric
from dshealthd.probe.members.local_membership import LocalMembership, hostname
from dshealthd.probe.members.schedule import epoch_at
from dshealthd.probe.metrics import RoundMetrics
from dshealthd.probe.node import PREPARATION, ProbeState
from dshealthd.probe.peers.credentials import CredentialError, Credentials
from dshealthd.probe.policy import GpuOccupancy, Policy
from dshealthd.probe.slots import SlotRunner
from dshealthd.probe.verdicts.baseline import Baselines
from dshealthd.probe.workers.worker_pool import WorkerPool

if TYPE_CHECKING:
    from pathlib import Path

    from dshealthd.core.host import Host
    from dshealthd.core.snapshot import Snapshot
    from dshealthd.jobs.hangs.judge import Standstill
    from dshealthd.probe.members.membership import Membership
    from dshealthd.probe.options import ProbeOptions

log = logging.getLogger(__name__)

T = TypeVar("T")

UP = gauge(
    "dshealthd_probe_up",
    "1 while probes with other nodes run; 0 while the members, key or address are unusable.",
)
GPU_SECONDS = counter(
    "dshealthd_probe_gpu_seconds_total", "Time for which probe collectives occupied each GPU."
)
SCORE = gauge(
    "dshealthd_probe_score_ratio",
    "Median ratio of this node's recent probe timings to their baselines; 1 is normal.",
)

PARENT_IDLE = 120.0
"""Seconds after which the idle fork server ends: it has imported torch, some 200 MiB."""
MAX_LISTED = 64
"""Most members listed in the status."""
RETRY = 5.0
"""Seconds between attempts to start."""
MAX_FILE = 1 << 24
"""Bytes of a state file: three times what `MAX_CLASSES` baselines of `KEPT` values take."""
READ_DEADLINE = 10.0
"""Timeout in seconds for reading the key; the reason is known then."""


class Setup(Exception):
    """The probes cannot run yet; the message says why."""


class ProbeService:
    """The probes of this node, run until `close`."""

    def __init__(
        self,
        options: ProbeOptions,
        *,
        host: Host,
        state: Path | None,
        snapshot: Snapshot,
        monotonic: Callable[[], float],
        wall: Callable[[], float],
        summary: Callable[[], dict[str, Any]],
        collect: Callable[[Iterable[str]], None] | None = None,
        hostname: Callable[[], str] = hostname,
        waited: Callable[[], float | None] = starvation.starved_seconds,
    ) -> None:
        """Prepare; `start` is the first to read or open anything.

        `state` is the directory for files that outlive the agent. `summary` returns what this node
        reports about itself to other members, `waited` the seconds that the agent has waited for a
        CPU. `collect` has collectors look at once, by name.
        """
        self.options = options
        self._host = host
        gpus = GpuOccupancy(snapshot, monotonic, collect)
        self._state = ProbeState(
            options=options,
            local_membership=LocalMembership(options.members, hostname, monotonic),
            gpus=gpus,
            policy=Policy(options.policy, gpus, monotonic),
            absences=Absences(
                snapshot, wall, StateFile(state, "probe-absences", MAX_FILE, durable=True)
            ),
            hung_jobs=HungJobs(summary, monotonic),
            worker_pool=WorkerPool(
                str(options.python), PARENT_IDLE, monotonic, environment=options.worker.variables
            )
            if options.python is not None
            else None,
            metrics=RoundMetrics(),
            again=asyncio.Event(),
            file=StateFile(state, "probe-baselines", MAX_FILE, durable=True),
            summary=summary,
            monotonic=monotonic,
            wall=wall,
            waited=waited,
        )
        self._running: SlotRunner | None = None
        self._task: asyncio.Task[None] | None = None
        self._problem = ""

    @property
    def membership(self) -> Membership:
        """The members as this agent knows them; LookupError while it does not."""
        return self._state.local_membership.membership

    @property
    def me(self) -> str:
        """This node's name among the members; LookupError while it is not known."""
        return self._state.local_membership.me

    def start(self) -> None:
        """Start the probes."""
        self._task = asyncio.create_task(self._run(), name="probes")
        self._task.add_done_callback(self._report_defect)

    def reload(self) -> None:
        """Reread the list of members."""
        self._state.again.set()

    async def close(self) -> None:
        """End all rounds and close everything that is open."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self._state.worker_pool is not None:
            await self._state.worker_pool.close()

    def samples(self) -> Iterator[Sample]:
        """Yield the metrics of the probes."""
        yield UP(float(self._running is not None))
        yield from self._state.local_membership.samples()
        running = self._running
        yield from self._state.metrics.samples(
            running.detector.suspects() if running is not None else (),
            self.me if running is not None else "",
        )
        yield from self._state.hung_jobs.samples()
        yield GPU_SECONDS(self._state.policy.used)
        if running is not None:
            score = running.detector.score()
            if score is not None:
                yield SCORE(score)
            yield from running.confirmations.samples()
            yield from running.server.samples()
            yield from running.client.samples()
            yield from running.credentials.samples()
        if self._state.worker_pool is not None:
            yield from self._state.worker_pool.samples()

    def status(self) -> dict[str, Any]:
        """Return the probes' section of the status document."""
        running, known = self._running, self._state.local_membership.known
        document: dict[str, Any] = {
            "state": "failing" if running is None else "ok",
            "detail": self._problem
            or "\n".join(self._state.local_membership.errors)
            or self._workers_problem(),
            "period_seconds": self.options.period,
            "epoch": epoch_at(self._state.wall(), self.options.period),
            "rounds": list(self._state.metrics.rounds),
            "suspects": [],
        }
        if known:
            membership = self._state.local_membership.membership
            document |= {
                "name": self._state.local_membership.me,
                "members": len(membership.members),
                "hash": membership.digest,
                "source": membership.source,
                "peers": [
                    {"name": name, "leaf": membership.leaves.get(name, "")}
                    for name in membership.names[:MAX_LISTED]
                ],
            }
        if running is not None:
            document["score"] = running.detector.score()
            document["suspects"] = self.suspects()
        return document

    def _workers_problem(self) -> str:
        """Return why rounds here are only echoes between agents, as a text; empty if they are
        not.
        """
        pool = self._state.worker_pool
        problem = "" if pool is None else pool.problem(self._state.gpus.count())
        return f"Workers cannot run on this node: {problem}" if problem else ""

    def suspects(self) -> list[dict[str, str]]:
        """Return the current suspects."""
        return [
            {"kind": suspect.part, "component": suspect.component, "reason": suspect.reason}
            for suspect in (() if self._running is None else self._running.detector.suspects())
        ]

    def update_hangs(self, hangs: Iterable[Standstill]) -> None:
        """Report the jobs that are hung on this node now to the probes; see `hung_jobs`."""
        self._state.hung_jobs.update_hangs(hangs)

    async def query_summary(self, peer: str, deadline: float) -> dict[str, Any]:
        """Return a member's summary. Raises PeerError; LookupError while probes are not running."""
        if self._running is None:
            raise LookupError(self._problem or "probes are starting")
        return await self._running.client.call(peer, "summary", {}, deadline)

    def _report_defect(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._problem = f"ended by a defect: {error!r}"
            log.error("probe: %s", self._problem, exc_info=error)

    async def _run(self) -> None:
        await self._state.absences.restore()
        while True:
            try:
                running = await self._set_up()
            except Setup as problem:
                if str(problem) != self._problem:
                    log.error("probe: %s", problem)
                self._problem = str(problem)
                await happens(self._state.again, RETRY)
                self._state.again.clear()
                continue
            self._problem = ""
            self._running = running
            try:
                await running.run()
            finally:
                self._running = None
                await running.close()

    async def _set_up(self) -> SlotRunner:
        """Read the probes' members and secrets; open the listener. Raises Setup."""
        await self._state.local_membership.refresh(again=True)
        if not self._state.local_membership.known:
            raise Setup("\n".join(self._state.local_membership.errors))
        options = self.options
        credentials = await _prepared(
            lambda: Credentials(options.peer), "peer credentials", READ_DEADLINE
        )
        address = await _prepared(self._address, "this node's address", PREPARATION)
        running = SlotRunner(self._state, credentials, Baselines(options.baseline), address)
        try:
            await running.open()
        except (OSError, ValueError, ArithmeticError) as error:
            await running.close()
            raise Setup(f"cannot listen on {options.peer.listen_address}: {error}") from error
        return running

    def _address(self) -> tuple[str, str]:
        """Return this node's numeric address and its interface for probes; call it in a thread.
        Raises OSError.
        """
        host, _ = listen_address(self.options.peer.listen_address)
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
        address, member = ipaddress.ip_address(found), numeric(self.me)
        if address.is_loopback and (member is None or not member.is_loopback):
            raise OSError(f"{host} is {address} on this node, where no other node reaches it")
        interface = self.options.worker.interface or interface_of(str(address), self._host)
        return str(address), interface


async def _prepared(make: Callable[[], T], what: str, deadline: float) -> T:
    """Return the result of `make`, which runs in a thread. Raises Setup if it fails or hangs."""
    try:
        return await background.call(make, what, deadline, CredentialError, OSError)
    except (CredentialError, OSError) as error:  # TimeoutError is one, without a text
        raise Setup(str(error) or f"{what}: no answer within {deadline:g} s") from error
