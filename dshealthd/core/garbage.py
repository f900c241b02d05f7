"""Python's cyclic garbage collector, as processes want it that run for months."""

from __future__ import annotations

import gc

_NEW_OBJECTS = 10_000
"""How many more must have been made than freed before a collection looks for cycles among them.

A sweep replaces thousands of samples at once, none of which is in a cycle: with Python's 700, looking
at them took a tenth of the CPU of the agent and its workers. Cycles are few, and of so many objects
take a MiB.
"""


def settled() -> None:
    """Take what there is as made to stay: later collections look only at what is new."""
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS)
