"""Frames between the agent and its gRPC server for NVRx, over a socket pair.

The server writes `READY` once it listens, and `QUESTION` to request a verdict; the agent answers
with a frame: its length, then `ANSWER` and a HealthCheckResponse, or `UNKNOWN` and the text of the
error UNAVAILABLE.
"""

from __future__ import annotations

import struct

READY, QUESTION = b"!", b"?"
ANSWER, UNKNOWN = b"+", b"-"
LENGTH = struct.Struct("!I")
MAX_FRAME = 1 << 20
