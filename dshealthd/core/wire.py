"""The wire: frames between the agent and its workers, and a worker's progress page.

A frame is a big-endian length of four bytes and that many bytes of JSON.

JSON, not pickle: a worker whose library has corrupted its memory may send garbage, but never code
that runs in the agent.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from typing import TYPE_CHECKING, Any, Self

from dshealthd.core.collector import Fault, Reason, sample_of, series_of, value_of
from dshealthd.core.result import CollectionOutcome, Result

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Mapping

    from dshealthd.core.collector import Metric

LENGTH = struct.Struct(">I")
MAX_FRAME = 16 << 20
type_error = (TypeError, ValueError, KeyError, IndexError, AttributeError)
"""Exceptions raised while a frame of the wrong shape is parsed."""


def pack(message: Mapping[str, Any]) -> bytes:
    """Return a message as one frame."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return LENGTH.pack(len(body)) + body


def frames(channel: socket.socket) -> Iterator[dict[str, Any]]:
    """Yield the messages that arrive on a blocking socket, until the other end closes it."""
    stream = channel.makefile("rb")
    while head := stream.read(LENGTH.size):
        yield json.loads(stream.read(LENGTH.unpack(head)[0]))


class Encoder:
    """Packs results in a worker.

    The series of a result are named only if they differ from those of the collector's last result.
    """

    def __init__(self) -> None:
        """Start without a last result."""
        self._last: dict[str, list[tuple[Metric, tuple[str, ...]]]] = {}

    def pack(self, name: str, result: Result) -> bytes:
        """Return the frame with one collector's result."""
        series = [*map(series_of, result.samples)]
        named = None
        if series != self._last.get(name):
            self._last[name] = series
            named = [(metric.name, labels) for metric, labels in series]
        return pack(
            {
                "result": name,
                "outcome": result.outcome,
                "series": named,
                "values": [*map(value_of, result.samples)],
                "faults": result.faults,
                "reason": result.reason,
                "detail": result.detail,
                "duration": result.duration,
                "replace_worker": result.replace_worker,
            }
        )


class Decoder:
    """Unpacks the results of one worker process."""

    def __init__(self, metrics: Mapping[str, Mapping[str, Metric]]) -> None:
        """`metrics` are the declared metrics, by collector and metric name."""
        self._metrics = metrics
        self._last: dict[str, list[tuple[Metric, tuple[str, ...]]]] = {}

    def unpack(self, message: Mapping[str, Any]) -> Result:
        """Return the result in a frame.

        Raise one of `type_error` if the frame does not hold a result.
        """
        name = message["result"]
        metrics = self._metrics[name]
        if (named := message["series"]) is not None:
            self._last[name] = [(metrics[one], tuple(map(str, labels))) for one, labels in named]
        return Result(
            outcome=CollectionOutcome(message["outcome"]),
            samples=tuple(
                sample_of((metric, labels, float(value)))
                for (metric, labels), value in zip(self._last[name], message["values"], strict=True)
            ),
            faults=tuple(
                Fault(str(part), Reason(reason), str(detail))
                for part, reason, detail in message["faults"]
            ),
            reason=None if message["reason"] is None else Reason(message["reason"]),
            detail=str(message["detail"]),
            duration=float(message["duration"]),
            replace_worker=bool(message["replace_worker"]),
        )


class ProgressPage:
    """A page shared by a worker and the agent: the part the worker is at, and since when.

    The worker writes it before each part it touches; the agent reads it only when an answer is
    overdue. Neither needs a system call for that.
    """

    _HEAD = struct.Struct("=QdI")
    _SIZE = 4096
    _STOP = _SIZE - 1
    """The last byte of the page: set by the agent to stop the worker before its next part."""

    def __init__(self, descriptor: int) -> None:
        """Map the page of a descriptor from `create`."""
        self._page = mmap.mmap(descriptor, self._SIZE)
        self._count = 0

    @classmethod
    def create(cls) -> tuple[Self, int]:
        """Return a new mapped page, and its descriptor for the worker, or raise OSError."""
        descriptor = os.memfd_create("progress")
        try:
            os.truncate(descriptor, cls._SIZE)
            return cls(descriptor), descriptor  # mapping it takes another descriptor
        except OSError:
            os.close(descriptor)
            raise

    def write(self, now: float, collector: str, part: str) -> None:
        """Record on the page that a collector is about to touch a part (none, if empty).

        `now` is monotonic time in seconds.
        """
        text = f"{collector}\n{part}".encode()[: self._STOP - self._HEAD.size]
        self._count += 2
        self._HEAD.pack_into(self._page, 0, self._count - 1, now, len(text))  # odd: being written
        self._page[self._HEAD.size : self._HEAD.size + len(text)] = text
        self._HEAD.pack_into(self._page, 0, self._count, now, len(text))

    def read(self) -> tuple[float, str, str]:
        """Return since when (monotonic seconds) the worker is at which collector and part.

        Both are empty while the page is being written.
        """
        count, since, length = self._HEAD.unpack_from(self._page)
        text = self._page[self._HEAD.size : self._HEAD.size + min(length, self._STOP)]
        # A sequence lock whose reader does not retry: the worker may have died in the middle of a
        # write. The page is read again soon anyway.
        if count % 2 or self._HEAD.unpack_from(self._page)[0] != count:
            return since, "", ""
        collector, _, part = text.decode(errors="replace").partition("\n")
        return since, collector, part

    def stop(self) -> None:
        """Request on the page that the worker end before it touches another part."""
        self._page[self._STOP] = 1

    @property
    def stopped(self) -> bool:
        """Whether the agent has requested the worker's end."""
        return bool(self._page[self._STOP])

    def close(self) -> None:
        """Unmap the page."""
        self._page.close()
