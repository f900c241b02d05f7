"""The protocol of NCCL's RAS, without I/O.

The client sends lines of text, each with one reply. The answer then extends to the end of the
connection.
"""

from __future__ import annotations

import enum

from dshealthd.core.collector import Reason

OPENING = b"CLIENT PROTOCOL 2\n"
JSON = b"SET FORMAT json\n"
STATUS = b"VERBOSE STATUS\n"
COLLECTION = 5
"""Seconds that RAS waits for its own peers before it answers without them; NCCL's default."""
MAY_BE_SENT = frozenset(
    (OPENING, JSON, STATUS, *(b"TIMEOUT %d\n" % seconds for seconds in range(1, COLLECTION + 1)))
)
"""Everything that is ever sent to a job: status queries.

The port has no authentication, and newer releases accept commands there that change the job
(`CONTROL` in 2.31).
"""
GRACE = 6
"""Seconds that RAS may take beyond that: it aborts the whole collection after 5 more."""
MAX_ANSWER = 16 << 20
"""Bytes of the largest answer; a rank takes some 600 for each communicator."""
_LINE = 1024


class Unanswered(Exception):
    """There is no answer, or no valid one."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


class NoListener(Exception):
    """Nothing listens where RAS would: the job has no NCCL, not yet, or one older than 2.24."""


class Stranger(Exception):
    """The listening process does not belong to the job."""


class _Step(enum.Enum):
    GREETING = enum.auto()
    TIMEOUT = enum.auto()
    FORMAT = enum.auto()
    STATUS = enum.auto()


class Conversation:
    """The dialogue on one connection: bytes in, bytes out, without I/O."""

    def __init__(self) -> None:
        self._step = _Step.GREETING
        self._received = bytearray()

    @property
    def greeted(self) -> bool:
        """Whether the other end speaks the protocol of RAS."""
        return self._step is not _Step.GREETING

    @property
    def answering(self) -> bool:
        """Whether everything has been sent, and only the answer is left to read."""
        return self._step is _Step.STATUS

    def receive(self, data: bytes, seconds: float) -> bytes:
        """Take data from RAS, and return what to send next, with `seconds` left.

        Raises Unanswered.
        """
        self._received += data
        if self.answering:
            if len(self._received) > MAX_ANSWER:
                raise Unanswered(Reason.MALFORMED, f"the answer is longer than {MAX_ANSWER} bytes")
            return b""
        end = self._received.find(b"\n")
        if end < 0 and len(self._received) <= _LINE:
            return b""
        line = bytes(self._received[: min(end, _LINE) if end >= 0 else _LINE])
        if end != len(self._received) - 1 or end > _LINE:
            raise Unanswered(Reason.MALFORMED, f"more than the expected line: {line[:80]!r}")
        self._received.clear()
        return self._reply(line.strip().upper(), seconds)

    def end(self) -> bytes:
        """Return the answer in JSON, complete as far as the protocol shows, after the other end has
        closed. Raises Unanswered.
        """
        if not self.answering or not self._received:
            raise Unanswered(
                Reason.MALFORMED,
                f"the connection was closed at {self._step.name.lower()}, without an answer",
            )
        return bytes(self._received)

    def _reply(self, line: bytes, seconds: float) -> bytes:
        # Any version: RAS reports an error for what it does not know.
        if self._step is _Step.GREETING and line.startswith(b"SERVER PROTOCOL "):
            self._step = _Step.TIMEOUT
            return b"TIMEOUT %d\n" % max(1, min(COLLECTION, int(seconds) - GRACE))
        if self._step is _Step.TIMEOUT and line == b"OK":
            self._step = _Step.FORMAT
            return JSON
        if self._step is _Step.FORMAT and line == b"OK":
            self._step = _Step.STATUS
            return STATUS
        if self._step is _Step.FORMAT and line.startswith(b"ERROR"):
            # A text answer of this release may crash the job: nothing more is sent.
            raise Unanswered(Reason.MALFORMED, "JSON was refused, and text is not requested")
        raise Unanswered(
            Reason.MALFORMED, f"not a reply to {self._step.name.lower()}: {line[:80]!r}"
        )
