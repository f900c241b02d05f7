"""Building blocks of the dashboards' PromQL: which series a panel shows, and how many at most."""

from __future__ import annotations

import re

SERIES = 20
"""Most lines of a graph or rows of a timeline that picks its series from the fleet."""
ROWS = 50
"""Most rows of a table that picks them from the fleet."""
NODES = 1000
"""Most nodes in the grid; the worst come first."""

SCOPES = {
    "@fleet": 'cluster=~"$cluster",exporter="dshealthd"',
    "@nodes": 'cluster=~"$cluster",exporter="dshealthd",node=~"$node"',
    "@node": 'cluster=~"$cluster",exporter="dshealthd",node="$node"',
    "@gpus": 'cluster=~"$cluster",exporter="dshealthd",node="$node",gpu=~"$gpu"',
    "@jobs": 'cluster=~"$cluster",exporter="dshealthd",training_job=~"$training"',
    "@of_jobs": 'cluster=~"$cluster",training_job=~"$training"',
    "@rules": 'cluster=~"$cluster"',
    "@alerts": 'cluster=~"$cluster",alertname=~"Dshealthd.+"',
    "@server": 'cluster="",node="",training_job="",alertname=~"Dshealthd.+"',
}
"""Scopes that a selector may begin with, and the matchers that each stands for.

`exporter` and `node` are labels that `deploy/prometheus/dshealthd.yml` gives every target and that
the rules use: a scrape job may have any name, and targets of other exporters, which have `up`, too.
`cluster` may be an external label, which a Prometheus does not add to its own answers, so all its
matchers also match series without it. Recorded series have no `exporter`; `training_job` names a
training, and `@of_jobs` is for recorded series of one. `@server` are alerts about Prometheus itself
and what it no longer scrapes: they are of no cluster, and concern each.
"""
_SCOPE = re.compile(r"@(?:fleet|nodes|node|gpus|jobs|of_jobs|rules|alerts|server)\b")


def promql(text: str) -> str:
    """Return a PromQL expression on one line, with its scopes expanded."""
    return _SCOPE.sub(lambda match: SCOPES[match[0]], " ".join(text.split()))


def by(function: str, labels: str, expression: str) -> str:
    """Return an aggregation of an expression, with one series for each value of `labels`."""
    return f"{function} by ({labels}) ({expression})"


def most(function: str, labels: str, expression: str, *, limit: int = ROWS) -> str:
    """Return an expression for a table with the `limit` highest series of an aggregation."""
    return f"topk({limit}, {by(function, labels, expression)})"


def least(function: str, labels: str, expression: str) -> str:
    """Return an expression for a table with the lowest series of an aggregation."""
    return f"bottomk({ROWS}, {by(function, labels, expression)})"


def worst(function: str, labels: str, expression: str, *, lowest: bool = False) -> str:
    """Return `worst_of` an aggregation."""
    return worst_of(by(function, labels, expression), labels, lowest=lowest)


def worst_line(
    function: str, labels: str, expression: str, *, lowest: bool = False
) -> tuple[str, str]:
    """Return `worst` with the legend of its labels, without that of the cluster."""
    shown = " ".join(f"{{{{{label}}}}}" for label in labels.split(", ") if label != "cluster")
    return worst(function, labels, expression, lowest=lowest), shown


def worst_of(expression: str, labels: str, rank: str = "", *, lowest: bool = False) -> str:
    """Return an expression for a graph with the same SERIES series at most over its whole time,
    rather than different ones at each step.

    `expression` has one series for each value of `labels`. The series shown are those with the
    highest, or lowest, value of `rank` (by default the expression itself) in the last quarter of an
    hour shown: over the whole time, a long graph of a large fleet would read too much.
    """
    over, top = ("min_over_time", "bottomk") if lowest else ("max_over_time", "topk")
    return (
        f"({expression}) and on ({labels}) {top}({SERIES}, "
        f"{over}(({rank or expression})[15m:1m] @ end()))"
    )


def parts(expression: str, *labels: str) -> str:
    """Return the expression with a label `which`, made of the names and values of these labels that
    are not empty; of those that findings have, the values say what they are.
    """
    names = []
    for label in labels:
        if label in {"part", "reason"}:
            names.append(label)
        else:
            names.append(f"_{label}")
            expression = f'label_replace({expression}, "_{label}", "{label} $1", "{label}", "(.+)")'
    joined = ", ".join(f'"{name}"' for name in names)
    return f'label_join({expression}, "which", " ", {joined})'


def grown(selector: str) -> str:
    """Return an expression for how much counters have grown in the time shown, without those that
    have not.

    For counters of which a node has hundreds, almost all of them 0: `increase` would read all their
    samples, this reads two of each. A counter that was reset in the meantime is left out, unless it
    has passed its old value.
    """
    return f"(({selector} > 0) - {selector} offset $__range > 0)"


def grown_or_new(selector: str, source: str) -> str:
    """Like `grown`, for counters that are exported only once they are above 0, see `new`."""
    return f"({grown(selector)} or {new(selector, source)})"


def increase(selector: str, source: str, over: str = "$__range") -> str:
    """Return an expression for how much counters have grown, also those that are exported only once
    they are above 0, see `new`: PromQL's `increase` does not know that they began at 0.
    """
    return f"({new(selector, source, over)} or increase({selector}[{over}]))"


def new(selector: str, source: str, over: str = "$__range") -> str:
    """Return an expression for counters above 0 that did not exist at the beginning of a time, and
    so have grown from 0, where `source` was 1 then: it says that they would have been exported.
    """
    return (
        f"({selector} > 0 unless {selector} offset {over} "
        f"and on (cluster, instance) {source} offset {over} == 1)"
    )
