"""The protocol of NCCL's RAS, without I/O.

Lines of text, one reply to each, and then the answer up to the end of the connection.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from dshealthd.core.collector import Reason
from dshealthd.jobs.ras.policy import Form

OPENING = b"CLIENT PROTOCOL 2\n"
JSON = b"SET FORMAT json\n"
STATUS = b"VERBOSE STATUS\n"
COLLECTION = 5
"""Seconds that RAS waits for its own peers before it answers without them; NCCL's default."""
MAY_BE_SENT = frozenset(
    (OPENING, JSON, STATUS, *(b"TIMEOUT %d\n" % seconds for seconds in range(1, COLLECTION + 1)))
)
"""All that is ever sent to a training: questions about its status.

The port knows no authentication, and newer releases take commands there that change the job
(`CONTROL` of 2.31).
"""
GRACE = 6
"""Seconds that RAS may take beyond that: it gives the whole collection up after 5 more."""
_LINE = 1024


class Unanswered(Exception):
    """There is no answer, or none that is one."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


class NoListener(Exception):
    """Nothing listens where RAS would.

    There is no NCCL in the job, not yet, or one older than 2.24.
    """


class Stranger(Exception):
    """What listens there is no process of the job."""


class RasAnswer(NamedTuple):
    """An answer, whole as far as the protocol can tell."""

    json: bool
    data: bytes


class _Step(enum.Enum):
    GREETING = enum.auto()
    TIMEOUT = enum.auto()
    FORMAT = enum.auto()
    STATUS = enum.auto()


class Conversation:
    """What is said on one connection: bytes in, bytes out, without I/O."""

    def __init__(self, limit: int, form: Form) -> None:
        """Ask in one form alone, and take at most `limit` bytes of answer."""
        self._limit = limit
        self._form = form
        self._step = _Step.GREETING
        self._received = bytearray()

    @property
    def greeted(self) -> bool:
        """Whether the other end speaks the protocol of RAS."""
        return self._step is not _Step.GREETING

    @property
    def answering(self) -> bool:
        """Whether RAS was asked all, and what is left is to read."""
        return self._step is _Step.STATUS

    def receive(self, data: bytes, seconds: float) -> bytes:
        """Take what RAS said, and return what to say next, in the `seconds` left.

        Raises Unanswered.
        """
        self._received += data
        if self.answering:
            if len(self._received) > self._limit:
                raise Unanswered(Reason.MALFORMED, f"the answer is longer than {self._limit} bytes")
            return b""
        end = self._received.find(b"\n")
        if end < 0 and len(self._received) <= _LINE:
            return b""
        line = bytes(self._received[: min(end, _LINE) if end >= 0 else _LINE])
        if end != len(self._received) - 1 or end > _LINE:
            raise Unanswered(
                Reason.MALFORMED, f"more than the line that was asked for: {line[:80]!r}"
            )
        self._received.clear()
        return self._reply(line.strip().upper(), seconds)

    def end(self) -> RasAnswer:
        """Return the RAS answer, now that the other end has closed. Raises Unanswered."""
        if not self.answering or not self._received:
            raise Unanswered(
                Reason.MALFORMED,
                f"the connection was closed at {self._step.name.lower()}, without an answer",
            )
        return RasAnswer(self._form is Form.JSON, bytes(self._received))

    def _reply(self, line: bytes, seconds: float) -> bytes:
        # Whichever version: what it does not know it says.
        if self._step is _Step.GREETING and line.startswith(b"SERVER PROTOCOL "):
            self._step = _Step.TIMEOUT
            return b"TIMEOUT %d\n" % max(1, min(COLLECTION, int(seconds) - GRACE))
        if self._step is _Step.TIMEOUT and line == b"OK":
            if self._form is Form.JSON:
                self._step = _Step.FORMAT
                return JSON
            self._step = _Step.STATUS
            return STATUS
        if self._step is _Step.FORMAT and line == b"OK":
            self._step = _Step.STATUS
            return STATUS
        if self._step is _Step.FORMAT and line.startswith(b"ERROR"):
            # A release whose text may be deadly: nothing more is said.
            raise Unanswered(Reason.MALFORMED, "JSON was refused, and text is not asked for")
        raise Unanswered(
            Reason.MALFORMED, f"not a reply to {self._step.name.lower()}: {line[:80]!r}"
        )
