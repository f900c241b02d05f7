"""Settings of Python's cyclic garbage collector for processes that run for months."""

from __future__ import annotations

import gc


def settled() -> None:
    """Treat all current objects as permanent: later collections check only new ones.

    The thresholds stay Python's. With 10,000 new objects in place of 700 the agent and its workers
    take a tenth less CPU, but memory grew in a soak (bench/README.md, `make soak`).
    """
    gc.freeze()
