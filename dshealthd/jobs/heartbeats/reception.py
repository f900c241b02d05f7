"""Where the heartbeats of this agent come in, for what reads them beside the collector that
receives them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dshealthd.core.collector import Context
    from dshealthd.jobs.heartbeats.receiver import Receiver


class Reception:
    """The receiver of an agent, if it has one: `context.shared(Reception)`."""

    def __init__(self, _context: Context) -> None:
        """Have none yet."""
        self.receiver: Receiver | None = None
