"""The protocol of NCCL's RAS: all that is ever sent, the limits, and how a query may fail.

The client sends lines of text, each with one reply. The answer then extends to the end of the
connection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
MAX_LINE = 1024
"""Bytes of the longest reply."""


class Unanswered(Exception):
    """There is no answer, or no valid one."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


class NoListener(Exception):
    """Nothing listens where RAS would: the job has no NCCL, not yet, or one older than 2.24."""


class Stranger(Exception):
    """The listening process does not belong to the job."""
