"""The names that exist: metrics with their labels, and what the rules record."""

from __future__ import annotations

import functools

from dshealthd.core.collector import MetricKind
from generate.reference import all_metrics
from grafana import limits
from tests import yaml_files

TARGET_LABELS = {"cluster", "job", "exporter", "instance", "node", "leaf"}
"""Labels that a target has."""


@functools.cache
def labels_of() -> dict[str, set[str]]:
    """Return the labels of every series that an agent can export, and of those that Prometheus
    adds, by its name.
    """
    found: dict[str, set[str]] = {"up": set()}
    for metric in all_metrics().values():
        labels = {
            f"exported_{label}" if label in TARGET_LABELS else label for label in metric.labels
        }
        if metric.kind is MetricKind.HISTOGRAM:
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
    groups = [group for file in files for group in yaml_files.load(file)["groups"]]
    return {rule["record"] for group in groups for rule in group["rules"]}
