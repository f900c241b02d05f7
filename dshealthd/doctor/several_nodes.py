"""The comparison of several nodes: what most of them have is expected of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from dshealthd.core.text import plural
from dshealthd.doctor.check import Result, ok, unknown, warning
from dshealthd.doctor.examination import Examined

if TYPE_CHECKING:
    from dshealthd.doctor.report import NodeReport

SHOWN = 5
"""Maximum number of nodes named in a line."""
PEERS = "most of the nodes"


def compare(reports: Sequence[NodeReport]) -> list[Examined]:
    """Return the checks for differences between the nodes of a job."""
    answered = {one.node: one.facts for one in reports if not one.problem}
    results = tuple(_differences(answered))
    if len(answered) > 1 and not results:
        known = len({name for one in answered.values() for name in one})
        text = f"{len(answered)} nodes have the same versions, devices and settings ({known})"
        results = (ok(text),)
    if len(answered) <= 1:
        text = f"{len(answered)} of {plural(len(reports), 'node')} answered: nothing to compare"
        results = (unknown(text),)
    return [Examined("node-drift", "same-on-all-nodes", "The nodes are alike", results, 0.0)]


def _differences(answered: Mapping[str, Mapping[str, str]]) -> Iterator[Result]:
    for name in sorted({name for one in answered.values() for name in one}):
        values = {node: one[name] for node, one in answered.items() if name in one}
        yield from _missing(name, values, answered)
        counts = Counter(values.values())
        (usual, most), *_ = counts.most_common(1)
        if 2 * most <= len(values):
            groups = "; ".join(f"{value} on {_nodes(values, value)}" for value in sorted(counts))
            yield warning(f"the nodes disagree on {name}: {groups}", component=name)
            continue
        for value in sorted(counts.keys() - {usual}):
            yield warning(
                f"{_nodes(values, value)}: {name} is {value}, but {usual} on "
                f"{plural(most, 'other')}",
                value=value,
                limit=usual,
                source=PEERS,
                component=name,
            )


def _missing(
    name: str, values: Mapping[str, str], answered: Mapping[str, object]
) -> Iterator[Result]:
    without = [node for node in answered if node not in values]
    if without and len(values) > len(without):
        usual, most = Counter(values.values()).most_common(1)[0]
        yield unknown(
            f"{_list(without)}: {name} is unknown there, but {usual} on {plural(most, 'other')}",
            component=name,
        )


def _nodes(values: Mapping[str, str], value: str) -> str:
    return _list([node for node, one in values.items() if one == value])


def _list(nodes: Sequence[str]) -> str:
    more = f" and {len(nodes) - SHOWN} more" if len(nodes) > SHOWN else ""
    return ", ".join(nodes[:SHOWN]) + more
