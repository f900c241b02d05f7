"""The wire: frames between the agent and its workers.

A frame is a big-endian length of four bytes and that many bytes of JSON.

JSON, not pickle: a worker whose library has corrupted its memory may send garbage, but never code
that runs in the agent.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dshealthd.core import documents
from dshealthd.core.collector import Fault, Metric, Reason, sample_of, series_of, value_of
from dshealthd.core.result import CollectionOutcome, CollectionResult

if TYPE_CHECKING:
    import socket

LENGTH = struct.Struct(">I")
MAX_FRAME = 16 << 20


def _values(values: list[float]) -> list[float | str]:
    """Return samples' values for JSON, which has no NaN nor infinity; `float` reads both forms."""
    return (
        [*values]
        if all(map(math.isfinite, values))
        else [value if math.isfinite(value) else str(value) for value in values]
    )


def pack(message: Mapping[str, Any]) -> bytes:
    """Return a message between agent and worker as one frame."""
    body = documents.dumps(message, separators=(",", ":")).encode()
    return LENGTH.pack(len(body)) + body


def frames(channel: socket.socket) -> Iterator[dict[str, Any]]:
    """Yield the messages in frames from a blocking socket, until the other end closes it."""
    stream = channel.makefile("rb")
    while head := stream.read(LENGTH.size):
        yield json.loads(stream.read(LENGTH.unpack(head)[0]))


class Encoder:
    """Packs results in a worker.

    The series of a result are named only if they differ from those of the collector's last result.
    """

    def __init__(self) -> None:
        self._last: dict[str, list[tuple[Metric, tuple[str, ...]]]] = {}

    def pack(self, name: str, result: CollectionResult) -> bytes:
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
                "values": _values([*map(value_of, result.samples)]),
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

    def unpack(self, message: Mapping[str, Any]) -> CollectionResult:
        """Return the collection result in a worker's frame.

        Raise one of `documents.MISSHAPEN` if the frame does not hold a result.
        """
        name = message["result"]
        metrics = self._metrics[name]
        if (named := message["series"]) is not None:
            self._last[name] = [(metrics[one], tuple(map(str, labels))) for one, labels in named]
        return CollectionResult(
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
