"""The examination of several nodes in parallel, through agents or SSH, and their comparison.

This node is examined directly. Others are examined through their agents if this configuration and
this user may call them; otherwise, or if an agent does not answer, over SSH.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dshealthd.core.text import plural, printable
from dshealthd.doctor.check import Check, Result, ok, unknown, warning
from dshealthd.doctor.examination import Examined
from dshealthd.doctor.hosts import ask
from dshealthd.doctor.report import NodeReport, parse_node
from dshealthd.linux.forked import Pool
from dshealthd.probe.options import ProbeOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dshealthd.config.config import Config
    from dshealthd.doctor.report import Report

    Progress = Callable[[int, int, Sequence[str]], object]

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
        if len(counts) < 2:  # noqa: PLR2004 - all have the same
            continue
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


HERE_DEADLINE = 20.0
"""Seconds for this node; reading its status and each check have their own deadlines."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to examine on which nodes, and how."""

    hosts: tuple[str, ...]
    checks: Sequence[Check[Any]]
    ssh: str
    remote: Sequence[str]
    """The command that examines a node over SSH."""
    host_timeout: float
    agents: bool
    """Whether agents may be queried."""


def examine_all(
    request: Request, loaded: Config, here: Callable[[], Report], progress: Progress
) -> tuple[list[NodeReport], list[Examined]]:
    """Return each node's report, in the order of the hosts, and the checks across them.

    `here` examines this node.
    """
    found: dict[str, NodeReport] = {}
    problems: dict[str, str] = {}
    if request.agents and loaded.section(ProbeOptions).peer.listen_address:
        found, problems = _by_agents(request, loaded, here, progress)
    if left := [host for host in request.hosts if host not in found]:
        reports = ask(left, [request.ssh], request.remote, request.host_timeout, progress)
        found |= {one.node: _with(one, problems.get(one.node, "")) for one in reports}
    reports = [found[host] for host in request.hosts]
    return reports, compare(reports)


def _by_agents(
    request: Request, loaded: Config, here: Callable[[], Report], progress: Progress
) -> tuple[dict[str, NodeReport], dict[str, str]]:
    """Return the reports from the nodes' agents, and for the other members why there is none."""
    from dshealthd.doctor import agents

    found: dict[str, NodeReport] = {}
    problems: dict[str, str] = {}
    try:
        me, names = agents.channel(loaded)
    except agents.ChannelError as error:
        why = printable(str(error))
        print(f"dshealthd doctor: agents are not queried: {why}", file=sys.stderr)
        return found, problems
    pool = Pool()
    try:
        for host in request.hosts:
            if host == me:
                pool.start(host, lambda _emit: here().document(), HERE_DEADLINE)
            elif host in names:
                call = functools.partial(
                    agents.examined, loaded=loaded, me=me, checks=request.checks, name=host
                )
                pool.start(host, call, agents.DEADLINE)
        for ended in pool.ended(
            on_tick=lambda: progress(len(found), len(request.hosts), pool.names)
        ):
            if problem := ended.problem or ended.value.get("problem"):
                problems[ended.name] = str(problem)
            else:
                found[ended.name] = parse_node(ended.value, ended.name)
    finally:
        pool.close()
    return found, problems


def _with(report: NodeReport, problem: str) -> NodeReport:
    """Return one node's report; if SSH failed too, add why its agent failed."""
    if not problem or not report.problem:
        return report
    return dataclasses.replace(
        report, problem=f"its agent: {printable(problem)}; over SSH: {report.problem}"
    )
