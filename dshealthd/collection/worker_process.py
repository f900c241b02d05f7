"""The agent's end of a worker: its process, and the channel that sends frames and queues those
that arrive.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, cast

from dshealthd.collection.progress_page import ProgressPage
from dshealthd.core import child, documents, wire
from dshealthd.core.child import START_DEADLINE, StartError
from dshealthd.core.collector import Fault, Metric, News, Reason
from dshealthd.core.garbage import free_transport
from dshealthd.core.timing import MOMENT, time_limit

if TYPE_CHECKING:
    import socket

    from dshealthd.core.result import CollectionResult

_HELD = wire.LENGTH.size + wire.MAX_FRAME
"""Most bytes that wait to be taken before reading pauses: one frame, or many small ones."""
LOOK = 0.25
"""Seconds between two reads of a worker's progress page."""


class Channel(asyncio.Protocol):
    """Frames over a socket.

    It is a protocol, not a stream: most results have already arrived when they are needed, and a
    task per result would take more CPU than unpacking it.
    """

    _transport: asyncio.Transport

    def __init__(self) -> None:
        """Start empty; `opened` connects it."""
        self._received = bytearray()
        self._ended = False
        self._alarm: asyncio.Future[None] | None = None
        """The future that `changed` waits for; None if nothing waits."""

    @classmethod
    async def opened(cls, ours: socket.socket) -> Self:
        """Return a channel over our end of a socket pair, which the channel closes."""
        _, channel = await asyncio.get_running_loop().create_connection(cls, sock=ours)
        return channel

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a frame to the worker."""
        self._transport.write(wire.pack(message))

    def receive(self) -> dict[str, Any] | None:
        """Return the message in the next frame; None if it has not fully arrived.

        Raise EOFError if no more can arrive, ValueError with a description of an invalid frame.
        """
        if len(self._received) >= wire.LENGTH.size:
            (size,) = wire.LENGTH.unpack_from(self._received)
            if size > wire.MAX_FRAME:
                raise ValueError(f"a frame of {size} bytes")
            end = wire.LENGTH.size + size
            if len(self._received) >= end:
                body = self._received[wire.LENGTH.size : end]
                del self._received[:end]
                self._transport.resume_reading()
                return _message(body)
        if self._ended:
            raise EOFError
        return None

    async def changed(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - no exception
        """Wait until data arrives or the channel ends, for at most `timeout` seconds."""
        if self._ended:
            return
        loop = asyncio.get_running_loop()
        self._alarm = loop.create_future()
        timer = None if timeout is None else loop.call_later(timeout, self._ring)
        try:
            await self._alarm
        finally:
            self._alarm = None
            if timer is not None:
                timer.cancel()

    def close(self) -> None:
        """Close the channel, which tells the worker to stop."""
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport to the worker."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Buffer what the worker wrote until it is taken."""
        self._received += data
        if len(self._received) > _HELD:
            self._transport.pause_reading()
        self._ring()

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002 - the end is enough
        """Record that nothing more will arrive."""
        free_transport(self._transport)
        self._ended = True
        self._ring()

    def _ring(self) -> None:
        if self._alarm is not None and not self._alarm.done():
            self._alarm.set_result(None)


def _message(body: bytearray) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except (ValueError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"invalid JSON: {error}") from error
    if not isinstance(message, dict):
        what = "JSON that is not an object"
        raise ValueError(what)  # noqa: TRY004 - one error type for every invalid frame
    return message


@dataclass(eq=False)
class Broken(Exception):
    """A worker must be replaced. `collector` and `part` are where it was, if it named them."""

    reason: Reason
    detail: str
    process: WorkerProcess | None = None
    """The process to end; None if there is none."""
    collector: str = ""
    part: str = ""


@dataclass(eq=False)
class Silent(Broken):
    """A worker has been at one part for longer than the others wait."""

    left: float = 0.0
    """Seconds that it has until its deadline."""


class WorkerProcess:
    """One running worker, its channel and its progress page."""

    def __init__(
        self,
        name: str,
        started: tuple[child.Child, Channel, ProgressPage],
        deadlines: Mapping[str, float],
        metrics: Mapping[str, Mapping[str, Metric]],
        monotonic: Callable[[], float],
    ) -> None:
        """Take the result of `start`; `deadlines` and `metrics` are by collector."""
        self.name = name
        self.child, self._channel, self.progress = started
        self.decoder = wire.Decoder(metrics)
        self._deadlines = deadlines
        self._monotonic = monotonic

    async def greet(self, hello: Mapping[str, Any]) -> None:
        """Send the first frame and wait until the worker is ready, or raise `Broken`."""
        self._channel.send(hello)
        try:
            async with time_limit(START_DEADLINE):
                while await self._frame() is None:
                    await self._channel.changed()
        except TimeoutError as error:
            raise self._broken(
                Reason.TIMEOUT, f"worker {self.name} was not ready within {START_DEADLINE:g} s"
            ) from error

    async def collect(
        self,
        names: Sequence[str],
        blocked: Mapping[str, Fault],
        patience: Callable[[str, str], float],
        publish: Callable[[str, CollectionResult], None],
        retried: str = "",
        last: str = "",
        heard: Collection[tuple[News, str]] = (),
    ) -> dict[str, Any]:
        """Send one request, pass results to `publish`, and return the closing frame; `Broken`.

        The part `retried` is touched whatever parts are `blocked`, unless it is one of them. After
        the part `last`, if any, no other part is touched. `heard` as in `Context.heard`.
        """
        self._channel.send(
            {
                "collect": names,
                "blocked": list(blocked.values()),
                "retried": retried,
                "last": last,
                "heard": list(heard),
            }
        )
        asked = self._monotonic()
        while True:
            message = await self.answer(asked, patience)
            try:
                if "touched" in message:
                    done: dict[str, Any] = {
                        "touched": [str(part) for part in message["touched"]],
                        "untried": [str(part) for part in message["untried"]],
                        "news": [News(news) for news in message.get("news", ())],
                    }
                    if "memory" in message:
                        done["memory"] = dict(message["memory"])
                    return done
                result = self.decoder.unpack(message)
                if result.reason is Reason.OUT_OF_MEMORY:
                    _, collector, part = self.progress.read()
                    if part:  # the others are read without it
                        raise self._broken(result.reason, result.detail, collector, part)
                publish(message["result"], result)
            except documents.MISSHAPEN as error:
                raise self._broken(
                    Reason.MALFORMED, f"worker {self.name} sent an invalid message: {error!r}"
                ) from error

    async def answer(self, asked: float, patience: Callable[[str, str], float]) -> dict[str, Any]:
        """Return the worker's next frame in an exchange that began at `asked`.

        Raise `Broken` if the worker stays at one part beyond its collector's deadline, and
        `Silent` if it stays there for longer than `patience` of collector and part, in seconds.
        """
        while True:
            if (frame := await self._frame()) is not None:
                return frame
            since, collector, part = self.progress.read()
            deadline = self._deadlines.get(collector) or max(self._deadlines.values())
            limit = min(patience(collector, part), deadline) if part else deadline
            # Until the worker reads the request, the page still shows where the last one ended.
            left = max(since, asked) + limit - self._monotonic()
            # An answer that has arrived counts even after the deadline: it may be the agent that
            # was stopped.
            # Wait in short steps: the page is shared memory, and nothing wakes the loop when the
            # worker moves on to the next part, whose own deadline then begins.
            await self._channel.changed(min(max(left, MOMENT), LOOK))
            if left > 0:
                continue
            if (frame := await self._frame()) is not None:
                return frame
            # Read again, as the worker may have moved on during the last wait.
            if self.progress.read() == (since, collector, part):
                where = f" at {part}" if part else ""
                detail = f"no answer within {deadline:g} s{where}"
                if limit == deadline:
                    raise self._broken(Reason.TIMEOUT, detail, collector, part)
                left += deadline - limit
                raise Silent(Reason.TIMEOUT, detail, self, collector, part, left)

    def let_go(self) -> None:
        """Close the channel, which tells the worker to stop."""
        self._channel.close()

    async def retired(self) -> None:
        """End the worker by closing its channel, and after a second by SIGKILL.

        A process that cannot be killed is left behind.
        """
        self.let_go()
        if not await self.child.ends(1.0):
            await self.child.killed()

    async def _frame(self) -> dict[str, Any] | None:
        """Return the worker's next frame; None if it has not arrived.

        Raise `Broken` if the worker has ended, or sent an invalid frame.
        """
        try:
            return self._channel.receive()
        except EOFError as error:
            _, collector, part = self.progress.read()
            where = f" at {part}" if part else ""
            raise self._broken(
                Reason.CRASHED,
                f"worker {self.name} {await self._epitaph()}{where}",
                collector,
                part,
            ) from error
        except (ValueError, ArithmeticError) as error:
            raise self._broken(Reason.MALFORMED, f"worker {self.name} sent {error}") from error

    def _broken(self, reason: Reason, detail: str, collector: str = "", part: str = "") -> Broken:
        return Broken(reason, detail, self, collector, part)

    async def _epitaph(self) -> str:
        await self.child.killed()
        code = self.child.code
        return "closed its channel" if code is None else child.how_ended(code)


async def start(name: str, command: Sequence[str]) -> tuple[child.Child, Channel, ProgressPage]:
    """Start a worker; return its process, channel and progress page, or raise StartError."""
    what = f"worker {name}"
    with child.channel(what) as (ours, theirs):
        try:
            progress, page = ProgressPage.create()
        except OSError as error:
            raise StartError(what, error) from error
        try:
            started = child.spawn(
                what,
                [*command, str(page), str(theirs.fileno())],
                descriptors=[page, theirs.fileno()],
            )
        finally:
            # The worker has inherited its own descriptor; `progress` has already mapped the memory.
            os.close(page)
        try:
            channel = await Channel.opened(ours)
        except asyncio.CancelledError:
            await started.killed()
            raise
    return started, channel, progress
