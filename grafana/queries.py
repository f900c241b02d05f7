"""PromQL as the dashboards use it.

Which series a panel is about, and how many of them it may show.
"""

from __future__ import annotations

import re

SERIES = 20
"""Most lines of a graph and rows of a timeline that choose their series from the fleet."""
ROWS = 50
"""Most rows of a table that chooses them from the fleet."""
NODES = 1000
"""Most nodes of the grid; the worst come first."""

SCOPES = {
    "@fleet": 'cluster=~"$cluster",job=~"$job"',
    "@nodes": 'cluster=~"$cluster",job=~"$job",node=~"$node"',
    "@node": 'cluster=~"$cluster",job=~"$job",node="$node"',
    "@gpus": 'cluster=~"$cluster",job=~"$job",node="$node",gpu=~"$gpu"',
    "@jobs": 'cluster=~"$cluster",job=~"$job",exported_job=~"$training"',
    "@of_jobs": 'cluster=~"$cluster",exported_job=~"$training"',
    "@rules": 'cluster=~"$cluster"',
    "@alerts": 'cluster=~"$cluster",alertname=~"Dshealthd.+"',
}
"""What a selector may begin with, and the matchers that it stands for.

`node` is the label that `deploy/prometheus/prometheus.yml` gives
every target, and that the rules go by. `cluster` may be an external label, which a Prometheus does
not add to what it answers itself: all matchers of it admit its absence. What rules record has no
`job`. `exported_job` is a training job, and `@of_jobs` for what rules record of one.
"""
_SCOPE = re.compile(r"@(?:fleet|nodes|node|gpus|jobs|of_jobs|rules|alerts)\b")


def promql(text: str) -> str:
    """Return an expression on one line, with its scopes written out."""
    return _SCOPE.sub(lambda match: SCOPES[match[0]], " ".join(text.split()))


def worst(
    expression: str, labels: str, by: str = "", *, lowest: bool = False, limit: int = SERIES
) -> str:
    """Return an expression for a graph with the same at most `limit` series over its whole time,
    and not others at each step.

    `expression` has one series for each value of `labels`; the series are those with the highest,
    or lowest, value of `by` (without it, of the expression itself) in the last quarter of an hour
    shown: the whole time would have a long graph of a large fleet read too much.
    """
    over, top = ("min_over_time", "bottomk") if lowest else ("max_over_time", "topk")
    return f"({expression}) and on ({labels}) {top}({limit}, {over}(({by or expression})[15m:1m] @ end()))"


def parts(expression: str, *labels: str) -> str:
    """Return the expression with a label `which`.

    The values of these labels, each after its name, as far as there are any.
    """
    for label in labels:
        expression = f'label_replace({expression}, "_{label}", "{label} $1", "{label}", "(.+)")'
    names = ", ".join(f'"_{label}"' for label in labels)
    return f'label_join({expression}, "which", " ", {names})'


def grown(selector: str) -> str:
    """Return by how much counters have grown in the time shown, those that have.

    For counters of which a node has hundreds, almost all of them 0: `increase` would read all their
    samples, this reads two of each. A counter that started again in the meantime is left out,
    unless it has passed its old value.
    """
    return f"(({selector} > 0) - {selector} offset $__range > 0)"


def grown_or_new(selector: str) -> str:
    """Return the same for counters that are exported once they are above 0: one that was not there
    at the begin of the time shown has grown from 0.
    """
    return f"({grown(selector)} or ({selector} > 0 unless {selector} offset $__range))"
