"""Settings of Python's cyclic garbage collector for processes that run for months."""

from __future__ import annotations

import gc

_NEW_OBJECTS = 10_000
"""Surplus of created over freed objects that triggers a search for cycles among the new ones.

A sweep replaces thousands of samples at once, none of them in a cycle. With Python's default of
700, checking them takes a tenth of the CPU of the agent and its workers. Cycles are rare, and this
many objects take a MiB.
"""


def settled() -> None:
    """Treat all current objects as permanent: later collections check only new ones."""
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS)
