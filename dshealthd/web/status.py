"""The status document in JSON: the whole current state, for the page and for `curl`."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dshealthd import __version__
from dshealthd.collection import supervisor
from dshealthd.core import documents
from dshealthd.core.documents import LeftOut
from dshealthd.core.exposition import clean_label, number
from dshealthd.core.result import CollectionOutcome

if TYPE_CHECKING:
    from dshealthd.core.collector import Sample
    from dshealthd.core.snapshot import Latest, Snapshot

MAX_DETAIL = 500
"""Most characters of a free text."""
_text = functools.partial(documents.cut, most=MAX_DETAIL)


def document(
    snapshot: Snapshot,
    own: Iterable[Sample],
    *,
    node: str,
    started: float,
    begun: float,
    monotonic: float,
    wall: float,
    ready: bool,
    sections: Mapping[str, Any] = MappingProxyType({}),
    left_out: LeftOut | None = None,
) -> bytes:
    """Return the status document, the current state as JSON.

    `ready` says whether all sources were judged, `sections` are parts that are made elsewhere.
    `own` are the agent's own samples, `started` and `wall` Unix times, `begun` and `monotonic` the
    same by the snapshot's clock, which is never set; all in seconds. Numbers that JSON lacks are
    strings, as Prometheus writes them. `left_out` has what the sections already lack.
    """
    left_out = left_out or LeftOut()
    mine = list(own)
    metrics: dict[str, dict[str, Any]] = {}
    _group(metrics, mine, left_out)
    for latest in snapshot:
        _group(metrics, snapshot.samples(latest), left_out)
    collectors = left_out.each(
        "collector",
        snapshot,
        operator.attrgetter("name"),
        lambda latest: _collector(latest, monotonic),
    )
    return documents.whole(
        {
            "node": _text(node),
            "version": __version__,
            "time": round(wall, 3),
            "started": round(started, 3),
            "uptime_seconds": round(monotonic - begun, 3),
            "ready": ready,
            "collectors": list(collectors),
            "workers": _workers(mine),
            **sections,
            "metrics": metrics,
        },
        left_out,
    ).encode()


def _collector(latest: Latest, now: float) -> dict[str, Any]:
    """Return one collector's entry in the status document.

    The reason `expired` comes in addition to the collector's own last reason.
    """
    result = latest.result
    state, reason, detail = "ok", result.reason, result.detail
    if latest.sampled is None:
        state, detail = "pending", "not sampled yet"
    elif result.outcome is CollectionOutcome.NOT_AVAILABLE:
        state = "not available"
    elif result.outcome is CollectionOutcome.ERROR:
        state = "failing"
    elif latest.expired(now):
        state, reason = "failing", next(iter(latest.reasons(now)))
        detail = f"no sample for {now - latest.sampled:.0f} s"
    return {
        "name": latest.name,
        "state": state,
        "reason": reason,
        "detail": _text(detail),
        "age_seconds": None if latest.sampled is None else round(now - latest.sampled, 3),
        "expires_after_seconds": latest.expires_after,
        "duration_seconds": round(result.duration, 6) if state in {"ok", "failing"} else None,
        "last_success_timestamp_seconds": latest.last_success,
        "errors": dict(latest.errors),
        "faults": [
            {"part": _text(part), "reason": reason, "detail": _text(detail)}
            for part, reason, detail in result.faults
        ],
    }


def _workers(own: Iterable[Sample]) -> list[dict[str, Any]]:
    names = {
        supervisor.UP: "up",
        supervisor.STARTS: "starts",
        supervisor.STUCK: "stuck",
        supervisor.QUARANTINED: "quarantined",
    }
    workers: dict[str, dict[str, Any]] = {}
    for metric, labels, value in own:
        if metric not in names and metric is not supervisor.REPLACED:
            continue
        worker = workers.setdefault(labels[0], {"name": labels[0], "failures": {}})
        if metric is supervisor.REPLACED:
            worker["failures"][labels[1]] = int(value)
        else:
            worker[names[metric]] = bool(value) if metric is supervisor.UP else int(value)
    return sorted(workers.values(), key=lambda worker: str(worker["name"]))


def _group(
    metrics: dict[str, dict[str, Any]], samples: Iterable[Sample], left_out: LeftOut
) -> None:
    for metric, labels, value in samples:
        try:
            named = dict(zip(metric.dimensions, map(clean_label, labels), strict=True))
            written = value if math.isfinite(value) else number(value)
        except documents.MISSHAPEN as error:
            left_out.add(f"sample of {metric.name}", error)
            continue
        family = metrics.get(metric.name)
        if family is None:
            family = metrics[metric.name] = {
                "kind": metric.kind,
                "help": metric.help,
                "samples": [],
            }
        family["samples"].append({"labels": named, "value": written})
