"""Options of the watch for hangs of training jobs."""

from __future__ import annotations

from dataclasses import dataclass

from dshealthd.core.collector import CollectorOptions
from dshealthd.core.options import Duration, option


@dataclass(frozen=True, kw_only=True)
class HangOptions(CollectorOptions):
    """Options of the hang detection."""

    interval: Duration = option(
        "2s",
        "Time between checks of the ranks; a hang is reported after the second check.",
        minimum="100ms",
    )
    floor: Duration = option(
        "30s",
        "Silence below which a job is never stalled. Raise it for jobs with long pauses that "
        "are neither marked nor frequent.",
        minimum="1s",
    )
