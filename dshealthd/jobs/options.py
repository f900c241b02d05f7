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
        "Time between two checks of the ranks; a hang is reported after the second one.",
        minimum="100ms",
    )
    floor: Duration = option(
        "30s",
        "Silence that is usual in any job. Set it higher if pauses are neither marked nor "
        "frequent enough to be learnt.",
        minimum="1s",
    )
