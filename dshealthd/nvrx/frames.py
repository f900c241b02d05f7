"""Messages between the agent and its gRPC server for NVRx, over a socket pair, and NVRx' answer.

The server writes `READY` once it listens, and `QUESTION` to request a verdict; the agent answers
with a frame of `core.wire`: a HealthCheckResponse, a byte in each character of `response`, or in
`unknown` the text of the error UNAVAILABLE.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.core import documents

if TYPE_CHECKING:
    from dshealthd.nvrx.fitness import Fitness

READY, QUESTION = b"!", b"?"
MAX_UNKNOWN = 4096
"""Most characters of what could not be checked."""
MAX_FAILURES = 32
"""Most failures that an answer names; the launcher prints it into its log."""
_VARINT, _BYTES = 0, 2
"""Wire types, https://protobuf.dev/programming-guides/encoding/."""
_SUCCESS, _EXIT_CODE, _OUTPUT, _ERROR = 1, 2, 3, 4
"""Fields of HealthCheckResponse in `nvhcd.proto`."""


def answer(fitness: Fitness) -> dict[str, str]:
    """Return the frame that answers NVRx's question: a protobuf response of a node's fitness."""
    if fitness.fit is None:
        reasons = "; ".join(fitness.unknown)[:MAX_UNKNOWN]
        return {"unknown": f"dshealthd does not know: {reasons}"}
    failures = [str(failure) for failure in fitness.failures[:MAX_FAILURES]]
    output = {
        "fail_count": len(fitness.failures),
        "failed_checks": failures,
        "source": "dshealthd",
    }
    verdict = _tag(_SUCCESS if fitness.fit else _EXIT_CODE, _VARINT) + _varint(1)
    error = _text(_ERROR, "; ".join(failures)) if failures else b""
    response = verdict + _text(_OUTPUT, documents.dumps(output)) + error
    return {"response": response.decode("latin-1")}


def _text(number: int, text: str) -> bytes:
    data = text.encode(errors="replace")
    return _tag(number, _BYTES) + _varint(len(data)) + data


def _tag(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)


def _varint(value: int) -> bytes:
    """Encode a natural number as protobuf does: in groups of seven bits, lowest first."""
    data = bytearray()
    while value > 0x7F:  # noqa: PLR2004 - seven bits
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*data, value))
