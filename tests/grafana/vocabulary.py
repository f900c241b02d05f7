"""The names that exist: metrics with their labels, and what the rules record."""

from __future__ import annotations

import functools

import yaml

from dshealthd import self_metrics as telemetry
from dshealthd.collection import registry, supervisor
from dshealthd.core import snapshot
from dshealthd.core.collector import Kind
from dshealthd.reference import PROBES
from dshealthd.web import server
from grafana import limits

TARGET_LABELS = {"cluster", "job", "instance", "node"}
"""Labels that a target has; a metric's own `job` is called `exported_job` then."""
AGENT = (snapshot, supervisor, telemetry, server)


@functools.cache
def labels_of() -> dict[str, set[str]]:
    """Return the labels of every series that an agent can export, and of those that Prometheus
    adds, by its name.
    """
    declared = [
        metric
        for kind in registry.all_collectors().values()
        for metric in registry.metrics(kind).values()
    ]
    declared += [metric for module in (*AGENT, *PROBES) for metric in module.METRICS]
    found: dict[str, set[str]] = {"up": set()}
    for metric in declared:
        labels = {
            f"exported_{label}" if label in TARGET_LABELS else label for label in metric.labels
        }
        if metric.kind is Kind.HISTOGRAM:
            found |= {
                f"{metric.name}_bucket": labels | {"le"},
                f"{metric.name}_sum": labels,
                f"{metric.name}_count": labels,
            }
        else:
            found[metric.name] = labels
    return found


@functools.cache
def records() -> set[str]:
    """Return the names that recording rules of `deploy/prometheus` give."""
    files = (limits.FILE, limits.FILE.with_name("recording.yml"))
    groups = [
        group
        for file in files
        for group in yaml.safe_load(file.read_text(encoding="utf-8"))["groups"]
    ]
    return {rule["record"] for group in groups for rule in group["rules"]}
