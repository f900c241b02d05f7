"""Collectives that the ranks of jobs launch, as `dshealthd-launches.service` counts them from
outside.

The service is separate because it needs more privileges than the agent, and is off by default.
Times are when the host launches, not when the GPU computes. CUDA graph launches are not counted, so
an old launch alone is not a fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dshealthd.core import schema, state_file
from dshealthd.core.collector import (
    Collector,
    CollectorOptions,
    Fault,
    NotAvailable,
    Reason,
    Sample,
    SourceError,
    Worker,
    gauge,
)
from dshealthd.core.options import Duration, option
from dshealthd.jobs.launches import OUTPUT, SCHEMA
from dshealthd.jobs.launches.obstacle import Obstacle

LAUNCHES = gauge(
    "dshealthd_job_launches",
    "NCCL operations that the rank has launched in its current communicators since counting "
    "began: collectives, or sends and receives (send). Absent for ranks that are not counted.",
    *("training_job", "rank", "kind"),
)
AGE = gauge(
    "dshealthd_job_launch_age_seconds",
    "Time since the rank last launched an NCCL operation. Absent if none was counted. CUDA "
    "graph replays are not counted.",
    *("training_job", "rank"),
)
BEHIND = gauge(
    "dshealthd_job_launches_behind",
    "Collectives by which the rank is behind the furthest rank of this node, in the "
    "communicator where it is furthest behind. Covers only communicators counted from their "
    "first collective on in at least two ranks here; absent otherwise.",
    *("training_job", "rank"),
)
LATE = gauge(
    "dshealthd_job_launch_lateness_seconds",
    "Median delay between the first rank of this node launching a collective and this rank "
    "launching it, over at most the latest 60, in the busiest communicator that all ranks here "
    "share. Host time, so it does not show a slow GPU. Absent without such a communicator.",
    *("training_job", "rank"),
)
UNCOUNTED = gauge(
    "dshealthd_job_launches_uncounted_ranks",
    "Ranks on this node whose launches are not counted, or not all counted "
    "(too_many_communicators), by reason.",
    *("training_job", "reason"),
)

MAX_BYTES = 4 << 20
"""Sixty-four ranks with sixty-four communicators each write some 0.5 MiB."""
FRESH = 30.0
"""Seconds; it is written each second, and a machine may be busy."""
_REASONS = {
    Obstacle.DENIED: Reason.PERMISSION_DENIED,
    Obstacle.LOCKDOWN: Reason.PERMISSION_DENIED,
}


@dataclass(frozen=True, kw_only=True)
class JobLaunchesOptions(CollectorOptions):
    """Options of this collector."""

    interval: Duration = option("5s", "Time from one sample to the next.", minimum="1s")
    file: Path = option(Path(OUTPUT), "Where dshealthd-launches.service writes its counts.")


class JobLaunches(Collector):
    """Reads one file, in a worker: whoever configures it may have put it anywhere."""

    worker = Worker.STORAGE
    Options = JobLaunchesOptions

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield each job's kernel launches; of ranks whose launches are not counted only why."""
        now = self.context.monotonic()
        try:
            text = state_file.read(self.options.file, MAX_BYTES)
        except FileNotFoundError:
            raise NotAvailable("dshealthd-launches.service does not run") from None
        try:
            with schema.reading(str(self.options.file)):
                found = _samples(schema.document(text), now)
        except schema.SchemaError as error:
            raise SourceError(Reason.MALFORMED, str(error)) from error
        yield from found


def _samples(document: Mapping[str, Any], now: float) -> list[Sample]:
    if document["schema"] != SCHEMA:
        raise ValueError(f"schema {document['schema']} in place of {SCHEMA}: restart the service")
    if now - document["at"] > FRESH:
        message = f"dshealthd-launches.service wrote last {now - document['at']:.0f} s ago"
        raise SourceError(Reason.EXPIRED, message)
    if document["refused"] is not None:
        reason = Obstacle(document["refused"])
        detail = f"launches cannot be counted: {reason} ({document['detail']})"
        raise SourceError(_REASONS.get(reason, Reason.NOT_FOUND), detail)
    found: list[Sample] = []
    uncounted: Counter[tuple[str, str]] = Counter()
    runs = Counter((rank["job"], rank["run"]) for rank in document["ranks"])
    members = Counter(
        (rank["job"], rank["run"], one["name"])
        for rank in document["ranks"]
        for one in rank["communicators"]
        if one["late"] is not None
    )
    for rank in document["ranks"]:
        labels = str(rank["job"]), str(int(rank["rank"]))
        reason = rank["refused"]
        if reason is not None:
            uncounted[labels[0], Obstacle(reason)] += 1
        if reason not in {None, Obstacle.TOO_MANY_COMMUNICATORS}:
            continue
        every = rank["communicators"]
        for kind, name in (("collective", "collectives"), ("send", "sends")):
            found.append(LAUNCHES(float(sum(one[name] for one in every)), *labels, kind))
        launched = [one["last"] for one in every if one["last"] is not None]
        if launched:
            found.append(AGE(max(0.0, now - max(launched)), *labels))
        compared = [one for one in every if one["behind"] is not None]
        if compared:
            found.append(BEHIND(float(max(one["behind"] for one in compared)), *labels))
        run = rank["job"], rank["run"]
        whole = [one for one in compared if members[*run, one["name"]] == runs[run]]
        if whole:
            busiest = max(whole, key=lambda one: (one["collectives"] + one["behind"], one["name"]))
            found.append(LATE(float(busiest["late"]), *labels))
    return [*found, *(UNCOUNTED(float(n), *which) for which, n in uncounted.items())]
