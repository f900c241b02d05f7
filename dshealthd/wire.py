"""Frames between the agent and its workers: a length of four bytes, big-endian, and that many bytes of JSON.

JSON and not pickle: a worker whose library corrupted its memory can send nonsense, but nothing that runs in the agent.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

from dshealthd.collector import Fault, Reason, Sample
from dshealthd.result import Outcome, Result

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Mapping

    from dshealthd.collector import Metric

LENGTH = struct.Struct(">I")
MAX_FRAME = 16 << 20

type_error = (TypeError, ValueError, KeyError, IndexError, AttributeError)
"""What a frame of the wrong shape raises while it is taken apart."""


def pack(message: Mapping[str, Any]) -> bytes:
    """Return a message as one frame."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return LENGTH.pack(len(body)) + body


def frames(channel: socket.socket) -> Iterator[dict[str, Any]]:
    """Yield the messages that arrive on a blocking socket, until the other end closes it."""
    stream = channel.makefile("rb")
    while head := stream.read(LENGTH.size):
        yield json.loads(stream.read(LENGTH.unpack(head)[0]))


def pack_result(name: str, result: Result) -> bytes:
    """Return the frame that carries one collector's result."""
    return pack(
        {
            "result": name,
            "outcome": result.outcome,
            "samples": [(metric.name, labels, value) for metric, labels, value in result.samples],
            "faults": result.faults,
            "reason": result.reason,
            "detail": result.detail,
            "duration": result.duration,
            "replace_worker": result.replace_worker,
        }
    )


def unpack_result(message: Mapping[str, Any], metrics: Mapping[str, Metric]) -> Result:
    """Return the result that a frame carries; raises one of `type_error` when the frame does not hold one."""
    return Result(
        outcome=Outcome(message["outcome"]),
        samples=tuple(Sample(metrics[name], tuple(map(str, labels)), float(value)) for name, labels, value in message["samples"]),
        faults=tuple(Fault(str(part), Reason(reason), str(detail)) for part, reason, detail in message["faults"]),
        reason=None if message["reason"] is None else Reason(message["reason"]),
        detail=str(message["detail"]),
        duration=float(message["duration"]),
        replace_worker=bool(message["replace_worker"]),
    )
