"""The agent's side of the NVRx health check: keeps the gRPC server running and answers it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dshealthd.core import wire
from dshealthd.core.child import (
    START_DEADLINE,
    StartError,
    channel,
    environment,
    python,
    spawn,
)
from dshealthd.core.collector import Sample, counter, gauge
from dshealthd.core.timing import Backoff, time_limit
from dshealthd.nvrx.frames import QUESTION, READY, answer
from dshealthd.nvrx.options import NvrxOptions

if TYPE_CHECKING:
    import socket

    from dshealthd.config.config import Config
    from dshealthd.nvrx.fitness import Fitness

log = logging.getLogger(__name__)

UP = gauge(
    "dshealthd_nvrx_up",
    "1 while the health check for NVRx's ft_launcher is served, else 0.",
)
VERDICTS = counter(
    "dshealthd_nvrx_verdicts_total",
    "Verdicts given to launchers: healthy, unhealthy, unknown (an error, which NVRx treats as "
    "no health check). Requests within one second share a verdict.",
    "verdict",
)

SERVER = python("dshealthd.nvrx.server")
_VERDICTS = {True: "healthy", False: "unhealthy", None: "unknown"}
_FOREIGN = ("GRPC_", "LD_PRELOAD", "LD_AUDIT", "PYTHONSTARTUP", "PYTHONINSPECT")
"""Prefixes of environment variables that change what the server loads or traces."""


class ServerError(Exception):
    """The server cannot run, or has ended."""


class HealthCheckService:
    """Serves the health check on the configured socket, if there is one."""

    name = "nvrx"

    def __init__(
        self, options: NvrxOptions, judge: Callable[[], Fitness], monotonic: Callable[[], float]
    ) -> None:
        """Prepare; `judge` returns the current fitness, `monotonic` is a clock in seconds."""
        self.options = options
        self._judge = judge
        self._monotonic = monotonic
        self._task: asyncio.Task[None] | None = None
        self._up = False
        self._verdicts: Counter[str] = Counter()
        self._last: Fitness | None = None
        self._problem = ""

    async def apply(self, config: Config) -> None:
        """Serve the configured socket; if it has not changed, the server keeps running."""
        if config.section(NvrxOptions) != self.options:
            await self.close()
            self.options, self._problem = config.section(NvrxOptions), ""
        self.start()

    def start(self) -> None:
        """Start the gRPC server, if a socket is configured."""
        if self._task is None and self.options.socket is not None:
            self._task = asyncio.create_task(self._run(), name="health check for NVRx")

    async def close(self) -> None:
        """Stop the gRPC server and remove its socket."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def samples(self) -> Iterator[Sample]:
        """Yield the health check's samples; none without a configured socket."""
        if self.options.socket is None:
            return
        yield UP(float(self._up))
        for verdict in _VERDICTS.values():
            yield VERDICTS(self._verdicts[verdict], verdict)

    def status(self) -> Mapping[str, Any]:
        """Return whether the health check is served, and why not."""
        if self.options.socket is None:
            return {"state": "off"}
        if self._up or not self._problem:
            return {"state": "ok"}
        return {"state": "failing", "detail": self._problem}

    async def _run(self) -> None:
        """Restart the gRPC server whenever it ends, with back-off while it fails at once."""
        backoff, failures = Backoff(), 0
        while True:
            started = self._monotonic()
            try:
                await self._serve()
            except ServerError as error:
                if str(error) != self._problem:
                    log.error("%s", error)
                self._problem = str(error)
            failures = 1 if self._monotonic() - started > backoff.limit else failures + 1
            await asyncio.sleep(backoff.after(failures))

    async def _serve(self) -> None:
        """Run one gRPC server until it ends, then raise ServerError."""
        if importlib.util.find_spec("grpc") is None:
            message = "nvrx.socket is set, but the agent's Python has no grpcio: see docs/nvrx.md"
            raise ServerError(message)
        try:
            with channel("nvrx: the server") as (ours, theirs):
                descriptor = theirs.fileno()
                server = spawn(
                    "nvrx: the server",
                    [*SERVER, str(self.options.socket), str(descriptor)],
                    descriptors=[descriptor],
                    env={
                        key: value
                        for key, value in environment().items()
                        if not key.startswith(_FOREIGN)
                    },
                )
        except StartError as error:
            raise ServerError(str(error)) from error
        with ours:
            try:
                await self._listen(ours)
                await self._answer(ours)
            except OSError as error:
                message = f"nvrx: lost the server on {self.options.socket}: {error}"
                raise ServerError(message) from error
            finally:
                if self._up:
                    self._up = False
                    with contextlib.suppress(OSError):  # already removed
                        os.unlink(str(self.options.socket))
                await server.killed()

    async def _listen(self, channel: socket.socket) -> None:
        try:
            async with time_limit(START_DEADLINE):
                said = await asyncio.get_running_loop().sock_recv(channel, 1)
        except TimeoutError as error:
            message = f"nvrx: nothing listens on {self.options.socket} after {START_DEADLINE:g} s"
            raise ServerError(message) from error
        if said != READY:
            message = f"nvrx: cannot serve on {self.options.socket}; its error is logged above"
            raise ServerError(message)
        self._up = True
        log.info("nvrx: health check at unix://%s", self.options.socket)

    async def _answer(self, channel: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while (question := await loop.sock_recv(channel, 1)) == QUESTION:
            await loop.sock_sendall(channel, wire.pack(answer(self._fitness())))
        raise ServerError(
            f"nvrx: the server on {self.options.socket} has "
            f"{'broken protocol' if question else 'ended'}"
        )

    def _fitness(self) -> Fitness:
        """Return the current verdict, counted; log failures that are new."""
        fitness = self._judge()
        before, self._last = self._last, fitness
        self._verdicts[_VERDICTS[fitness.fit]] += 1
        if fitness.failures and (before is None or before.failures != fitness.failures):
            log.warning(
                "nvrx: this node is reported as unhealthy: %s",
                "; ".join(map(str, fitness.failures)),
            )
        return fitness
