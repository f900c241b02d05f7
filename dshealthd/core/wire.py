"""The wire: frames between the agent and its workers, and the page of a worker's progress.

A length of four bytes, big-endian, and that many bytes of JSON.

JSON and not pickle: a worker whose library corrupted its memory can send nonsense, but nothing that
runs in the agent.
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
MAX_SERIES = 1 << 16
"""Series that a worker has named: what an agent can have to remember of one that goes mad."""
_SPARE = 256
"""Series beyond twice those that there are now, after which all are named anew.

So that those of jobs that have ended are forgotten: a worker and the agent would have to remember
them both. To name a thousand takes some 100 KiB, once after as many new ones.
"""

type_error = (TypeError, ValueError, KeyError, IndexError, AttributeError)
"""What a frame of the wrong shape raises while it is taken apart."""


def pack(message: Mapping[str, Any]) -> bytes:
    """Return a message as one frame of the wire."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return LENGTH.pack(len(body)) + body


def frames(channel: socket.socket) -> Iterator[dict[str, Any]]:
    """Yield the wire's messages that arrive on a blocking socket, until the other end closes it."""
    stream = channel.makefile("rb")
    while head := stream.read(LENGTH.size):
        yield json.loads(stream.read(LENGTH.unpack(head)[0]))


class Encoder:
    """Packs results in a worker.

    A series is named once; from then on its number stands for it, until all are forgotten. A result
    with the series of the last one, in their order, is sent without numbers.
    """

    def __init__(self) -> None:
        """Know no series yet."""
        self._numbers: dict[tuple[Metric, tuple[str, ...]], int] = {}
        self._now: dict[str, int] = {}
        """How many series each collector had in its last result that did not fail."""
        self._sent: dict[str, list[tuple[Metric, tuple[str, ...]]]] = {}
        """The series of each collector's last result, in their order."""

    def pack(self, name: str, result: Result) -> bytes:
        """Return the frame of the wire that carries one collector's result."""
        numbers = self._numbers
        if result.outcome is CollectionOutcome.OK:  # what fails for once comes back with the same
            self._now[name] = len(result.samples)
        forget = len(numbers) > 2 * sum(self._now.values()) + _SPARE
        if forget:
            numbers.clear()
            self._sent.clear()
        new: list[tuple[str, tuple[str, ...]]] = []
        sent: list[int] | None = None
        series = [*map(series_of, result.samples)]
        if series != self._sent.get(name):
            self._sent[name] = series
            sent = []
            for one in series:
                number = numbers.get(one)
                if number is None:
                    number = numbers[one] = len(numbers)
                    new.append((one[0].name, one[1]))
                sent.append(number)
        return pack(
            {
                "result": name,
                "outcome": result.outcome,
                "forget": forget,
                "series": new,
                "numbers": sent,
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
        """`metrics` is what each collector declares, by its name and the metric's."""
        self._metrics = metrics
        self._series: list[tuple[Metric, tuple[str, ...]]] = []
        self._last: dict[str, tuple[tuple[Metric, ...], tuple[tuple[str, ...], ...]]] = {}
        """Metrics and labels of each collector's last result, in the order of its samples."""

    def unpack(self, message: Mapping[str, Any]) -> Result:
        """Return the collector's result that a frame of the wire carries.

        Raises one of `type_error` when the frame does not hold one.
        """
        metrics, series = self._metrics[message["result"]], self._series
        if message["forget"]:
            series.clear()
            self._last.clear()
        series += [(metrics[name], tuple(map(str, labels))) for name, labels in message["series"]]
        if len(series) > MAX_SERIES:
            excess = f"more than {MAX_SERIES} series"
            raise ValueError(excess)
        if (numbers := message["numbers"]) is not None:
            named = [series[number] for number in numbers]
            self._last[message["result"]] = (
                tuple(metric for metric, _ in named),
                tuple(labels for _, labels in named),
            )
        last = self._last[message["result"]]
        return Result(
            outcome=CollectionOutcome(message["outcome"]),
            samples=tuple(map(sample_of, zip(*last, map(float, message["values"]), strict=True))),
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
    """A page that a worker and the agent share: which part the worker has come to, and when.

    A worker writes it before each part it touches, the agent looks only when an answer is overdue;
    so saying where one is costs neither a system call.
    """

    _HEAD = struct.Struct("=QdI")
    _SIZE = 4096
    _STOP = _SIZE - 1
    """Where the agent says that no further part is to be touched: the last byte of the page."""

    def __init__(self, descriptor: int) -> None:
        """Map the page that a descriptor of `create` stands for."""
        self._page = mmap.mmap(descriptor, self._SIZE)
        self._count = 0

    @classmethod
    def create(cls) -> tuple[Self, int]:
        """Return a new page of progress, mapped, and a descriptor of it for the worker. OSError."""
        descriptor = os.memfd_create("progress")
        try:
            os.truncate(descriptor, cls._SIZE)
            return cls(descriptor), descriptor  # to map it takes a descriptor more
        except OSError:
            os.close(descriptor)
            raise

    def write(self, now: float, collector: str, part: str) -> None:
        """Say on the page that what follows touches a part (or none, if empty) for a collector.

        `now` is monotonic time in seconds.
        """
        text = f"{collector}\n{part}".encode()[: self._STOP - self._HEAD.size]
        self._count += 2
        self._HEAD.pack_into(self._page, 0, self._count - 1, now, len(text))  # odd: being written
        self._page[self._HEAD.size : self._HEAD.size + len(text)] = text
        self._HEAD.pack_into(self._page, 0, self._count, now, len(text))

    def read(self) -> tuple[float, str, str]:
        """Return since when, in monotonic seconds, the worker is at which collector and part.

        Both empty while that is being written.
        """
        count, since, length = self._HEAD.unpack_from(self._page)
        text = self._page[self._HEAD.size : self._HEAD.size + min(length, self._STOP)]
        # A sequence lock whose reader does not try again: the worker may have died in the middle of
        # a write. It is looked at again soon anyway.
        if count % 2 or self._HEAD.unpack_from(self._page)[0] != count:
            return since, "", ""
        collector, _, part = text.decode(errors="replace").partition("\n")
        return since, collector, part

    def stop(self) -> None:
        """Ask the worker, on its page, to end before it touches another part."""
        self._page[self._STOP] = 1

    @property
    def stopped(self) -> bool:
        """Whether the agent has asked the worker on its page to end."""
        return bool(self._page[self._STOP])

    def close(self) -> None:
        """Unmap the worker's page of progress."""
        self._page.close()
