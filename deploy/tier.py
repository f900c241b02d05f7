"""The verdict tier: what the shipped rules and the dashboard *Fleet* read of an agent.

`python -m deploy.tier [--check]` writes its selectors for the agent, which serves them alone to
`/metrics?tier=verdict`, and the list of names that a Prometheus with everything passes on.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import promql_parser
import yaml

from deploy.kubernetes import rules
from dshealthd.core import exposition
from dshealthd.core.collector import MetricKind
from dshealthd.core.exposition import Matcher, Selector
from dshealthd.findings import judge as findings
from generate import files
from generate.reference import all_metrics
from grafana.__main__ import DIRECTORY

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dshealthd.core.collector import Metric

AGENT = Path(exposition.__file__).parent / exposition.FILE
REMOTE_WRITE = rules.SOURCE / "remote_write.yml"
FLEET = DIRECTORY / "dshealthd-fleet.json"
"""The dashboard of all nodes, which belongs to the server that has the tier."""
WHOLE = (findings.FINDING.name, findings.VALUE.name)
"""Families that are in the tier whole, as rules read them finding by finding."""
OF_SCRAPES = ("up",)
"""What Prometheus adds to a scrape, and the rules read."""
_OPERATORS = {"Equal": "=", "NotEqual": "!=", "Re": "=~", "NotRe": "!~"}
_CHILDREN = ("lhs", "rhs", "expr", "vector_selector", "param")
_RANGE = re.compile(r"\$__\w+")
_ACTION = re.compile(r"\{\{.*?\}\}")
"""What a template does: it may query what it names."""
_NAME = re.compile(r"(?<![\w:])dshealthd_\w+")
_HEADER = """\
# Series that the shipped rules read of an agent: what `/metrics?tier=verdict` serves.
# Generated from the rules and the dashboard Fleet by `./dev generate`; do not edit.
"""
_REMOTE_WRITE = """\
# For a Prometheus that scrapes everything and passes on what the rules of another one read; see
# docs/large-fleets.md. Names are generated from the rules and the dashboard Fleet; do not edit.
remote_write:
  - url: http://prometheus.example:9090/api/v1/write
    write_relabel_configs:
      - source_labels: [__name__]
        action: keep
        regex: "\\
          {names}"
"""


def expressions() -> Iterator[str]:
    """Yield the expressions of all rules, and of the dashboard that shows all nodes."""
    for name in rules.FILES:
        document = yaml.safe_load((rules.SOURCE / name).read_text(encoding="utf-8"))
        for group in document["groups"]:
            for rule in group["rules"]:
                yield rule["expr"]
                for action in _ACTION.findall(str(rule.get("annotations", ""))):
                    yield from _NAME.findall(action)
    yield from shown(json.loads(FLEET.read_text(encoding="utf-8")))


def shown(document: Any) -> Iterator[str]:
    """Yield the expressions of a dashboard, and the metrics by which its variables find values."""
    if isinstance(document, dict):
        if "expr" in document:
            yield _RANGE.sub("5m", document["expr"])
        if "definition" in document:
            yield from _NAME.findall(document["definition"])
        for part in document.values():
            yield from shown(part)
    elif isinstance(document, list):
        for part in document:
            yield from shown(part)


def selectors(expression: str) -> Iterator[promql_parser.VectorSelector]:
    """Yield the selectors of a PromQL expression."""
    left = [promql_parser.parse(expression)]
    while left:
        node = left.pop()
        if isinstance(node, promql_parser.VectorSelector):
            yield node
            continue
        children = (getattr(node, name, None) for name in _CHILDREN)
        left += [*filter(None, children), *getattr(node, "args", ())]


def tier(read: Iterable[str]) -> tuple[Selector, ...]:
    """Return the selectors of an agent's series that expressions read, without repetition.

    Raises KeyError for a family that no agent has.
    """
    metrics = all_metrics()
    found = {Selector(name) for name in WHOLE}
    for expression in read:
        for selector in selectors(expression):
            if selector.name is None or not selector.name.startswith("dshealthd_"):
                continue
            metric = metrics.get(selector.name) or metrics[selector.name.rpartition("_")[0]]
            labels = set(metric.labels) | ({"le"} if metric.kind is MetricKind.HISTOGRAM else set())
            found.add(
                Selector(
                    metric.name,
                    tuple(
                        Matcher(one.name, _OPERATORS[str(one.op).rpartition(".")[2]], one.value)
                        for one in selector.matchers.matchers
                        # Those of other labels are about targets; a variable may be anything.
                        if one.name in labels and "$" not in one.value
                    ),
                )
            )
    return tuple(
        sorted(
            selector
            for selector in found
            if not selector.matchers or Selector(selector.family) not in found
        )
    )


def _series(metric: Metric) -> tuple[str, ...]:
    """Return the names that the series of a family have."""
    if metric.kind is not MetricKind.HISTOGRAM:
        return (metric.name,)
    return tuple(f"{metric.name}_{part}" for part in ("bucket", "count", "sum"))


def documents() -> dict[Path, str]:
    """Return the text of each generated file: the tier's selectors, and their names."""
    chosen = tier(expressions())
    metrics = all_metrics()
    names = {name for selector in chosen for name in _series(metrics[selector.family])}
    return {
        AGENT: _HEADER + "".join(f"{selector}\n" for selector in chosen),
        REMOTE_WRITE: _REMOTE_WRITE.format(
            names="|\\\n          ".join(sorted({*OF_SCRAPES, *names}))
        ),
    }


if __name__ == "__main__":
    sys.exit(files.main("deploy.tier", documents))
