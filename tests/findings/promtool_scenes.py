"""The scenes of `tests/symptoms` as their nodes judge them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dshealthd.findings.judge import exported
from dshealthd.findings.stalls import EXPORTED
from tests.findings.player import METRICS, MISSING, STALE, Row, Scene, identity, seconds

JUDGED = ("dshealthd_finding", *(metric.name for metric in EXPORTED))
"""What names of series that nodes judge begin with."""
OF_TARGETS = ("job", "instance", "node", "cluster", "leaf", "replica")
Labeled = tuple[str, tuple[str, ...]]
"""A series: its name, and the values of its labels."""


def finding_series(document: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Yield the series that the judges of a promtool test's nodes export, in its notation.

    Not those that the test has itself. Nodes of one name in two clusters are two, and a replica
    of Prometheus has series of its own of each. Where `up` has a gap, Prometheus has scraped
    nothing.
    """
    views: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for row in document["input_series"]:
        _, labels = identity(row["series"])
        view = (labels.get("cluster", ""), labels.get("replica", ""))
        views.setdefault(view, []).append((row["series"], str(row["values"])))
    entries = (*document.get("alert_rule_test", ()), *document.get("promql_expr_test", ()))
    until = max(seconds(str(entry["eval_time"])) for entry in entries)
    for rows in views.values():
        yield from _judged(Scene(seconds(str(document["interval"])), rows), until)


def _judged(scene: Scene, until: float) -> Iterator[dict[str, str]]:
    told = {name for name, _, _ in scene.series}
    # What other agents say of suspects is judged as if each had found it too.
    suspects = [row for row in scene.series if row[0] == "dshealthd_suspect"]
    for rows in scene.of_nodes.values():
        rows += [row for row in suspects if row not in rows]
    targets = {
        labels["node"]: {key: labels[key] for key in OF_TARGETS if key in labels}
        for _, labels, _ in scene.series
        if labels.get("node")
    }
    alike: dict[str, dict[Labeled, list[str]]] = {}
    for node, target in targets.items():
        # Nodes that read the same find the same, unless what they find names them.
        key = node if suspects else _without_node(scene.of_nodes[node], node)
        history = alike[key] if key in alike else _history(scene, node, until)
        if not any(node in values for _, values in history):
            alike[key] = history
        for (name, values), row in history.items():
            if name in told:
                continue
            labels = dict(zip(METRICS[name].dimensions, values, strict=True)) | target
            text = ", ".join(f'{key}="{_escaped(value)}"' for key, value in labels.items() if value)
            yield {"series": f"{name}{{{text}}}", "values": " ".join(row)}


def _without_node(rows: list[Row], node: str) -> str:
    """Return a node's series in a form that another node's have that reads the same."""
    read = [
        (
            name,
            [(key, text != node and text) for key, text in labels.items() if key not in OF_TARGETS],
            values,
        )
        for name, labels, values in rows
    ]
    return repr(read)


def _history(scene: Scene, node: str, until: float) -> dict[Labeled, list[str]]:
    """Return the values of each series that a node's judge exports, one for each scrape."""
    history: dict[Labeled, list[str]] = {}
    scrapes = next((row for name, _, row in scene.of_nodes[node] if name == "up"), [])
    for step, (_, findings) in enumerate(scene.play(node, until)):
        missed = MISSING in scrapes[step : step + 1]
        for sample in (*exported(findings), *scene.derived):
            row = history.setdefault((sample.metric.name, sample.labels), [MISSING] * step)
            row.append(MISSING if missed else f"{sample.value!r}")
        for row in history.values():
            if len(row) == step:
                row.append(MISSING if missed else STALE)
    return history


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
