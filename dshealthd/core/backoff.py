"""The back-off: how long to wait before something that failed is tried again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    """Waiting times between tries, doubled up to a limit; in seconds."""

    first: float = 1.0
    limit: float = 60.0

    def after(self, failures: int) -> float:
        """Return how long to wait after this many failures in a row."""
        return min(self.limit, self.first * 2.0 ** min(failures - 1, 16))
