"""Options of what the agent watches of training jobs: their heartbeats, and whether they hang."""

from __future__ import annotations

from dataclasses import dataclass

from dshealthd.core.collector import CollectorOptions
from dshealthd.core.options import Duration, option
from dshealthd.training.page import DEFAULT_PATH


@dataclass(frozen=True, kw_only=True)
class HeartbeatOptions(CollectorOptions):
    """Options of the heartbeats."""

    socket: str = option(
        DEFAULT_PATH,
        "Unix socket that trainings report to, which the agent makes; its directory must "
        "be there, and open to their users.",
    )
    max_ranks: int = option(
        64,
        "Ranks that get series of their own: users take turns, then their jobs, the oldest first.",
        minimum=1,
        maximum=256,
    )


@dataclass(frozen=True, kw_only=True)
class HangOptions(CollectorOptions):
    """Options of this collector."""

    interval: Duration = option(
        "2s",
        "Time from one look at the ranks to the next; a hang is reported at the second.",
        minimum="100ms",
    )
    floor: Duration = option(
        "30s",
        "Silence that is usual in any training. More where pauses are neither marked nor "
        "come often enough to be learnt.",
        minimum="1s",
    )
