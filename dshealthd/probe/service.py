"""The probes of one agent: set up as the configuration says, set up anew where this node changes, and what they tell of themselves."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from typing import TYPE_CHECKING, Any

from dshealthd import __version__, state_file
from dshealthd.address import listen_address
from dshealthd.collector import counter, gauge
from dshealthd.probe import background
from dshealthd.probe.epochs import SAMPLE_PEERS, Epochs, Lasting
from dshealthd.probe.members.roll import Roll, hostname
from dshealthd.probe.members.schedule import epoch_at
from dshealthd.probe.node import PREPARATION
from dshealthd.probe.peers.credentials import CredentialError, Credentials
from dshealthd.probe.policy import Account, Gpus, Policy
from dshealthd.probe.tally import Tally
from dshealthd.probe.verdicts.baseline import BaselineError, Baselines
from dshealthd.probe.workers.interface import interface_of
from dshealthd.probe.workers.nursery import Nursery

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from dshealthd.collector import Sample
    from dshealthd.host import Host
    from dshealthd.probe.members.membership import Membership
    from dshealthd.probe.options import ProbeOptions
    from dshealthd.snapshot import Snapshot

log = logging.getLogger(__name__)

UP = gauge("dshealthd_probe_up", "1 while probes with other nodes run, 0 while they cannot: no usable members, key or address.")
GPU_SECONDS = counter(
    "dshealthd_probe_gpu_seconds_total", "Time for which collectives of probes kept each GPU occupied; by their own timing."
)
SCORE = gauge(
    "dshealthd_probe_score_ratio", "This node's own score: median ratio of its timings to what is usual, over its last peers; 1 is usual."
)
METRICS = (UP, GPU_SECONDS, SCORE)

RETRY = 5.0
"""Seconds until the start is tried again."""


class Setup(Exception):
    """The probes cannot run yet; the message says why."""


class Service:
    """Runs the probes of this node until it is closed."""

    def __init__(
        self,
        options: ProbeOptions,
        *,
        host: Host,
        state: Path | None,
        snapshot: Snapshot,
        monotonic: Callable[[], float],
        wall: Callable[[], float],
        hostname: Callable[[], str] = hostname,
    ) -> None:
        """Prepare; nothing is read or opened before `start`. `state` is the directory for what outlives the agent."""
        self.options = options
        self._host = host
        self._state = state
        self._monotonic, self._wall = monotonic, wall
        self._roll = Roll(options.members, host, options.group_size, hostname, monotonic)
        self._gpus = Gpus(snapshot, monotonic)
        self._account = Account(options.policy.duty_ratio, monotonic)
        self._policy = Policy(options.policy, self._gpus, self._account, wall)
        self._nursery: Nursery | None = None
        if options.python is not None:
            self._nursery = Nursery(str(options.python), options.worker.idle_timeout, monotonic, environment=options.worker.variables)
        self._tally = Tally()
        self._running: Epochs | None = None
        self._task: asyncio.Task[None] | None = None
        self._again = asyncio.Event()
        self._problem = ""

    @property
    def membership(self) -> Membership:
        """The members as this agent believes them to be; LookupError while it does not know."""
        return self._roll.membership

    def start(self) -> None:
        """Begin, if the configuration asks for it."""
        if self.options.wanted and self._task is None:
            self._task = asyncio.create_task(self._run(), name="probes")
            self._task.add_done_callback(self._fallen)

    def reload(self) -> None:
        """Read the members again."""
        self._again.set()

    async def close(self) -> None:
        """End all rounds and close what is open."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self._nursery is not None:
            await self._nursery.close()

    def samples(self) -> Iterator[Sample]:
        """Yield the metrics of the probes; none where they are not configured."""
        if not self.options.wanted:
            return
        yield UP(float(self._running is not None))
        yield from self._roll.samples()
        running = self._running
        yield from self._tally.samples(running.judge.suspects() if running is not None else ())
        yield GPU_SECONDS(self._account.used)
        if running is not None:
            score = running.judge.score()
            if score is not None:
                yield SCORE(score)
            yield from running.confirmations.samples()
            yield from running.server.samples()
            yield from running.client.samples()
            yield from running.credentials.samples()
        if self._nursery is not None:
            yield from self._nursery.samples()

    def status(self) -> dict[str, Any]:
        """Return what the status document says of the probes."""
        if not self.options.wanted:
            return {"state": "off"}
        running, known = self._running, self._roll.known
        document: dict[str, Any] = {
            "state": "failing" if running is None else "ok",
            "detail": self._problem or "\n".join(self._roll.errors),
            "period_seconds": self.options.period,
            "epoch": epoch_at(self._wall(), self.options.period),
            "rounds": list(self._tally.rounds),
            "suspects": [],
        }
        if known:
            membership = self._roll.membership
            document |= {
                "name": self._roll.me,
                "members": len(membership.members),
                "hash": membership.digest,
                "source": membership.source,
                "peers": [{"name": name, "leaf": membership.leaves.get(name, "")} for name in membership.names[:SAMPLE_PEERS]],
            }
        if running is not None:
            document["score"] = running.judge.score()
            document["suspects"] = [
                {"kind": suspect.part, "component": suspect.component, "reason": suspect.reason} for suspect in running.judge.suspects()
            ]
        return document

    def _fallen(self, task: asyncio.Task[None]) -> None:
        """Say that the probes have ended by a defect; the agent goes on without them."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._problem = f"ended by a defect: {error!r}"
            log.error("probe: %s", self._problem, exc_info=error)

    async def _run(self) -> None:
        """Set up, run, and where that is not possible try again."""
        while True:
            try:
                running = await self._set_up()
            except Setup as problem:
                if str(problem) != self._problem:
                    log.error("probe: %s", problem)
                self._problem = str(problem)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RETRY):
                        await self._again.wait()
                self._again.clear()
                continue
            self._problem = ""
            self._running = running
            try:
                await running.run()
            finally:
                self._running = None
                await running.close()

    async def _set_up(self) -> Epochs:
        """Read the members, the secrets and what is usual, and open the listener. Raises Setup."""
        await self._roll.look(again=True)
        if not self._roll.known:
            raise Setup("\n".join(self._roll.errors))
        options = self.options
        try:
            credentials = await background.call(lambda: Credentials(options.peer), PREPARATION, CredentialError, OSError)
            address = await background.call(self._address, PREPARATION, OSError)
        except (CredentialError, OSError) as error:  # TimeoutError is one
            raise Setup(str(error)) from error
        stamp = ""
        if self._nursery is not None and not await self._nursery.prepare(PREPARATION):
            about = self._nursery.about
            stamp = f"torch {about.get('torch', '')} cuda {about.get('cuda', '')}"
        baselines = Baselines(options.baseline, f"dshealthd {__version__} {stamp}".strip())
        await self._load(baselines)
        lasting = Lasting(
            options=options,
            roll=self._roll,
            gpus=self._gpus,
            account=self._account,
            policy=self._policy,
            nursery=self._nursery,
            tally=self._tally,
            again=self._again,
            save=self._save,
            monotonic=self._monotonic,
            wall=self._wall,
        )
        running = Epochs(lasting, credentials, baselines, address)
        try:
            await running.open()
        except (OSError, ValueError) as error:
            await running.close()
            message = f"cannot listen on {options.peer.listen_address}: {error}"
            raise Setup(message) from error
        return running

    def _address(self) -> tuple[str, str]:
        """Return this node's address in numbers and its interface; in a thread."""
        host, _ = listen_address(self.options.peer.listen_address)
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
        address = str(ipaddress.ip_address(found))
        return address, self.options.worker.interface or interface_of(address, self._host)

    @property
    def _file(self) -> Path | None:
        return None if self._state is None else self._state / "probe-baselines.json"

    async def _load(self, baselines: Baselines) -> None:
        file = self._file
        if file is None:
            return
        try:
            await background.call(lambda: baselines.load(file), PREPARATION, BaselineError, OSError)
        except (BaselineError, OSError) as error:
            log.warning("probe: what is usual is learnt anew: %s", error)

    async def _save(self, baselines: Baselines) -> None:
        """Keep what is usual, if it has changed."""
        file = self._file
        if file is None or not baselines.changed:
            return
        document = baselines.document()
        try:
            await background.call(lambda: state_file.replace(file, document, durable=True), PREPARATION, OSError)
        except OSError as error:
            baselines.changed = True
            log.warning("probe: what is usual could not be kept: %s", error)
