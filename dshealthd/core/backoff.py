"""The back-off: the wait before a retry."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    """Waits between retries in seconds, doubled up to a limit."""

    first: float = 1.0
    limit: float = 60.0

    def after(self, failures: int) -> float:
        """Return the wait after this many consecutive failures."""
        return min(self.limit, self.first * 2.0 ** min(failures - 1, 16))
