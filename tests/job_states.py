"""What the state of a job is, by what its two nodes show of it: one table, by which both that join
the nodes are tested, the view of the fleet and the rules of Prometheus.
"""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """What one node shows of a job of 16 ranks."""

    state: str
    cause: str = ""
    ranks: int = 8
    step: int = 99


TOGETHER: tuple[tuple[tuple[Part, Part], str], ...] = (
    # The others wait for a rank that pauses, works, or still moves: as the page, which is none.
    ((Part("hung", "waiting"), Part("paused")), "paused"),
    ((Part("hung", "waiting"), Part("stalled", "working")), "stalled"),
    ((Part("hung", "waiting"), Part("stalled", "debugger")), "stalled"),
    ((Part("hung", "input"), Part("training")), "stalled"),
    ((Part("hung", "waiting"), Part("hung", "input")), "hung"),
    ((Part("hung", "waiting"), Part("stalled", "between_steps")), "hung"),
    # A stopped rank is certain, whatever the others may still be allowed.
    ((Part("hung", "process"), Part("paused")), "hung"),
    ((Part("suspended", "suspended"), Part("suspended", "suspended")), "suspended"),
    ((Part("suspended", "suspended"), Part("stalled", "waiting")), "hung"),
    ((Part("suspended", "suspended"), Part("hung", "waiting")), "hung"),
    # No rank is left that could be at work between two steps.
    ((Part("stalled", "collective"), Part("stalled", "collective")), "hung"),
    ((Part("stalled", "between_steps"), Part("stalled", "collective", step=100)), "hung"),
    # One may write a checkpoint; not all ranks are seen; or there are two runs, of eight each.
    ((Part("stalled", "collective"), Part("stalled", "between_steps")), "stalled"),
    ((Part("stalled", "collective"), Part("stalled", "collective", 7)), "stalled"),
    ((Part("stalled", "collective"), Part("stalled", "working", step=100)), "stalled"),
    ((Part("stalled", "collective", 16), Part("stalled", "collective", step=100)), "stalled"),
)
"""State and cause on each of two nodes, and the state of the job."""
WORLD = 16
