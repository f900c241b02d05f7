"""Pages of this node's status document for other members, each of which fits into a message.

The doctor of another node requests them. The document is rendered and packed for the first page and
cached for a moment, so that its pages belong together and many callers cost one rendering.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dshealthd.probe.peers.messages import MAX_DOCUMENT, MAX_PAYLOAD
from dshealthd.probe.peers.protocol import Refusal, Rejection

if TYPE_CHECKING:
    from collections.abc import Callable

KEPT = 5.0
"""Seconds for which a document is cached: collectors do not run more often."""


class StatusPages:
    """Serves the packed status document, one page per call."""

    def __init__(self, packed: Callable[[], bytes], monotonic: Callable[[], float]) -> None:
        """`packed` renders the current document, compressed with gzip."""
        self._packed, self._monotonic = packed, monotonic
        self._document = b""
        self._made = -KEPT
        self._stamp = 0

    def __call__(self, offset: int) -> dict[str, Any]:
        """Return the page from the byte `offset` on, as the answer of the peer API's `document`.

        Each document has a different stamp. Raises Refusal if the document is too large.
        """
        now = self._monotonic()
        if now - self._made >= KEPT:
            self._document, self._made, self._stamp = self._packed(), now, self._stamp + 1
        if len(self._document) > MAX_DOCUMENT:
            raise Refusal(Rejection.TOO_LARGE)
        return {
            "stamp": self._stamp,
            "size": len(self._document),
            "data": self._document[offset : offset + MAX_PAYLOAD],
        }
