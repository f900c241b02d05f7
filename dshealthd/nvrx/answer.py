"""The answer to NVRx' health check, in protobuf, and how NVRx judges it.

`ft_launcher` (`NodeHealthCheck._perform_health_check` in `health_check.py`, 0.6.0) takes a node for
healthy with `success` and a JSON `output` whose `fail_count` is 0, and keeps it out of the job with
any other answer. An error of gRPC it notes and takes for healthy, as if nobody had been asked. So
what is not known is answered by the error UNAVAILABLE, and never by an answer.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dshealthd.nvrx.fitness import Fitness

MAX_FAILURES = 32
"""Failures that an answer names; it is printed into the launcher's log."""
_VARINT, _BYTES = 0, 2
"""Wire types, https://protobuf.dev/programming-guides/encoding/."""
_SUCCESS, _EXIT_CODE, _OUTPUT, _ERROR = 1, 2, 3, 4
"""Fields of HealthCheckResponse in `nvhcd.proto`."""


def response(fitness: Fitness) -> bytes:
    """Return the answer, a HealthCheckResponse, for a node that is fit or not.

    ValueError if that is not known.
    """
    if fitness.fit is None:
        text = "what is not known has no answer"
        raise ValueError(text)
    failures = fitness.failures[:MAX_FAILURES]
    output = {
        "fail_count": len(fitness.failures),
        "failed_checks": [str(failure) for failure in failures],
        "source": "dshealthd",
    }
    message = b""
    if fitness.fit:
        message += _tag(_SUCCESS, _VARINT) + _varint(1)
    else:
        message += _tag(_EXIT_CODE, _VARINT) + _varint(1)
    message += _text(_OUTPUT, json.dumps(output))
    if failures:
        message += _text(_ERROR, "; ".join(str(failure) for failure in failures))
    return message


def _text(number: int, text: str) -> bytes:
    data = text.encode(errors="replace")
    return _tag(number, _BYTES) + _varint(len(data)) + data


def _tag(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)


def _varint(value: int) -> bytes:
    """Write a natural number into the answer in groups of seven bits, the lowest first."""
    data = bytearray()
    while value > 0x7F:  # noqa: PLR2004 - seven bits
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*data, value))
