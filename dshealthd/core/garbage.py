"""Settings of Python's cyclic garbage collector for processes that run for months."""

from __future__ import annotations

import gc


def settled() -> None:
    """Treat all current objects as permanent: later collections check only new ones.

    The thresholds stay Python's. With 10,000 new objects in place of 700 a collection costs a
    tenth less CPU, but cycles that pin large texts stay for hours (bench/README.md, `make soak`).
    """
    gc.freeze()
