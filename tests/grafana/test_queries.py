"""Every query of the dashboards, asked as Grafana asks it, of a real Prometheus with the shipped
rules.

Its data folder holds a fleet with faults, like what was scraped of two real agents with simulated
GPUs; then one of 240 nodes.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from grafana.queries import NODES, ROWS, SERIES
from tests.agents import Scrape
from tests.grafana.cluster import scraped, shipped
from tests.grafana.cost import samples
from tests.grafana.documents import Query, documents, panels, queries, substituted, variables
from tests.grafana.fleet import DENSE, SICK, Fleet
from tests.grafana.server import Prometheus, prometheus
from tests.symptoms.promtool import asking, promtool
from tests.waiting import until

pytestmark = pytest.mark.timeout(1800)

MANY = 240
"""More than any table may have rows."""
SICK_EVERY = 3
LARGEST = 800
"""Nodes for which the samples of a query are reckoned."""
MOST_SAMPLES = 50e6
"""For an hour of a fleet; also what Prometheus by default holds at most of one query at a time."""
BOARDS = sorted(documents())


@pytest.fixture(scope="module")
def running() -> Iterator[contextlib.ExitStack]:
    """What the tests so far have asked; beside the next one it would only take a CPU's half."""
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Scrape:
    """Return what a healthy node exports that probes another one with gloo."""
    return scraped(tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def eight(
    template: Scrape, running: contextlib.ExitStack, tmp_path_factory: pytest.TempPathFactory
) -> Prometheus:
    """Eight nodes, the second with all faults, and the shipped rules at work on them."""
    directory = tmp_path_factory.mktemp("eight")
    Fleet(template, 8).write(directory)
    server = running.enter_context(prometheus(directory, shipped(directory)))
    # A while ago: what is asked later is asked of that time.
    until(
        lambda: all(server.instant(expr, time.time() - 2.0).series for expr in SETTLED),
        (directory / "log").read_text,
        600,
    )
    server.last = time.time()
    return server


SETTLED = (
    'ALERTS{alertname="DshealthdWatchdog",alertstate="firing"}',  # of another group than the rest
    'ALERTS{severity="critical",alertstate="firing"}',
    'ALERTS{severity="warning",alertstate="firing"}',
    'ALERTS{training_job!="",alertstate="firing"}',
    "dshealthd:suspect:accusers",
    "dshealthd:node:severity == 2",
    "dshealthd:node:probe_bus_bandwidth:ratio",
    "dshealthd:node:drift",
    "dshealthd:job:work_ratio",
    "dshealthd_job_gpus_waiting > 0",
)


@pytest.fixture(scope="module")
def many(
    template: Scrape,
    eight: Prometheus,
    running: contextlib.ExitStack,
    tmp_path_factory: pytest.TempPathFactory,
) -> Prometheus:
    """Many nodes, every third with all faults and with the alerts that the rules had for one such;
    no rules of its own.
    """
    directory = tmp_path_factory.mktemp("many")
    assert eight.last is not None
    recorded = eight.instant(
        f'{{__name__=~"ALERTS|ALERTS_FOR_STATE|dshealthd:.+",node=~"{SICK}|"}}',
        min(time.time(), eight.last + 60),  # later its samples are too old for its rules
    )
    running.close()
    fleet = Fleet(template, MANY, recorded, sick_every=SICK_EVERY)
    fleet.write(directory)
    config = directory / "prometheus.yml"
    config.write_text("global: {}\n", encoding="utf-8")
    server = running.enter_context(prometheus(directory, config))
    server.last = fleet.made
    return server


def test_without_rules_nothing_is_well(eight: Prometheus) -> None:
    """Where the rules are not loaded, the numbers of alerts and suspects are unknown, and not 0.

    Their queries return nothing. Where they are, the number is that of the nodes with an alert,
    which may be 0, also of one cluster alone.
    """
    severities = {"Nodes with a page": "critical", "Nodes with a ticket": "warning"}
    asked = [query for query in queries() if query.panel in severities]
    assert len(asked) >= len(severities)
    for query in asked:
        end = time.time() - 2.0  # of which nothing changes from one question to the next
        expr = substituted(query.expr, variables())
        severity = f'severity="{severities[query.panel]}"'
        alerts = f'ALERTS{{alertstate="firing", {severity}, node!=""}}'
        firing = eight.instant(f"count by (node) ({alerts})", end).series
        assert firing
        assert eight.ask(query, expr, end).values == [[float(len(firing))]], firing
        for cluster in (".*", "a"):
            one = substituted(query.expr, variables(cluster=cluster))
            well = one.replace(severity, 'severity="other"')
            assert eight.ask(query, well, end).values == [[0.0]], cluster
        assert eight.ask(query, expr.replace("ALERTS{", "NO_ALERTS{"), end).series == []


@pytest.mark.parametrize("board", BOARDS)
def test_eight_nodes_with_faults(eight: Prometheus, board: str) -> None:
    """Every query returns series where there are faults."""
    asked = {query: substituted(query.expr, _chosen(query, node=SICK)) for query in _of(board)}
    assert [
        f"{query.place}: {expr}"
        for query, expr in asked.items()
        if not eight.ask(query, expr, _end(eight)).series
    ] == []


@pytest.mark.parametrize("board", BOARDS)
def test_series_are_few(many: Prometheus, board: str) -> None:
    """Of many nodes a panel shows no more than it says; and still something."""
    for query in _of(board):
        expr = substituted(query.expr, _chosen(query, node=SICK))
        answer = many.ask(query, expr, _end(many))
        assert len(answer.series) <= _limit(query), f"{query.place}: {expr}"
        assert answer.series or board == "dshealthd-node", f"nothing: {query.place}: {expr}"


@pytest.fixture(scope="module")
def count(many: Prometheus) -> Callable[[str], int]:
    """Return what counts the series of a selector, of as many nodes as the largest fleet has;
    many queries share some.
    """

    @functools.cache
    def counted(selector: str) -> int:
        found = many.instant(f"count({selector})", _end(many)).values
        return round(found[0][0] * LARGEST / MANY) if found else 0

    return counted


@pytest.mark.parametrize("board", [board for board in BOARDS if board != "dshealthd-node"])
def test_samples_are_few(count: Callable[[str], int], board: str) -> None:
    """An hour of 800 nodes, scraped every five seconds, has Prometheus read no more samples for a
    panel than it reads in seconds. Dense metrics are counted short; the next test is about them.
    """
    for query in _of(board):
        values = _chosen(query, node=SICK, __range="1h", __rate_interval="20s")
        expr = substituted(query.expr, values)
        cost = samples(expr, count, **({"steps": 1} if query.instant else {}))
        assert cost <= MOST_SAMPLES, f"{query.place}: {cost:.3g} samples: {expr}"


def test_the_reckoning() -> None:
    """A selector costs one sample a series and point, a range all in it, a subquery its points.
    What is fixed in time is read once.
    """
    series = {"a": 10, 'b{c="d"}': 3}.__getitem__
    assert samples("sum(a)", series, steps=240) == 2400
    assert samples('a - b{c="d"} offset 1h', series, steps=1) == 13
    assert samples("topk(5, rate(a[20s]))", series, steps=240) == 10 * 4 * 240
    assert samples("max_over_time(a[1h] @ end())", series, steps=240) == 10 * 720
    assert (
        samples("a and topk(1, max_over_time((rate(a[20s]))[15m:1m] @ end()))", series, steps=240)
        == 2400 + 10 * 4 * 15
    )


def test_what_is_dense_is_asked_for(template: Scrape) -> None:
    """Metrics with a hundred series a node, as link errors have, are read for many nodes only in
    rows that somebody has to open.
    """
    dense = {name for name, series in template.series.items() if len(series) > DENSE}
    assert {"dshealthd_nvlink_up", "dshealthd_infiniband_port_errors_total"} <= dense
    shut = {
        (uid, panel["title"])
        for uid, document in documents().items()
        for row in document["panels"]
        for panel in row.get("panels", [])
    }
    for query in queries():
        if query.board != "dshealthd-node" and any(f"{name}{{" in query.expr for name in dense):
            assert (query.board, query.panel) in shut, query.place


def test_the_worst_come_first(many: Prometheus) -> None:
    """The grid has a square for every node, those with a page first, and none of a healthy one
    before them.
    """
    (grid,) = (query for query in queries() if query.panel == "Nodes by severity")
    answer = many.ask(grid, substituted(grid.expr, variables()), _end(many))
    values = [values[0] for values in answer.values]
    assert values == sorted(values, reverse=True)
    assert len(values) == MANY <= NODES
    assert sum(value > 0 for value in values) == MANY // SICK_EVERY


def test_a_peer_is_the_node_that_it_leads_to(tmp_path: Path) -> None:
    """In Kubernetes a member is an address, of which no dashboard knows."""
    (query,) = (query for query in queries() if query.panel == "Set up differently")
    of = 'cluster="a",reason="clock"'
    disagrees = f'dshealthd_probe_peer_disagrees{{{of},exporter="dshealthd",'
    series = [
        disagrees + 'node="node-1",peer="10.0.0.2"}',
        disagrees + 'node="node-3",peer="node-4"}',
        'dshealthd:member:node{cluster="a",member="10.0.0.2",node="node-2"}',
        'dshealthd:member:node{cluster="b",member="10.0.0.2",node="other"}',
    ]
    wanted = [
        f'{{{of},node="node-1",peer="10.0.0.2",named="node-2"}}',
        f'{{{of},node="node-3",peer="node-4",named="node-4"}}',
    ]
    rows = [{"series": name, "values": "1 1"} for name in series]
    expr = substituted(query.expr, variables())
    case = asking(expr, "1m", rows, dict.fromkeys(wanted, 1))
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump({"tests": [case]}), encoding="utf-8")
    promtool("test", "rules", file)


def _of(board: str) -> list[Query]:
    """Return the queries of a dashboard."""
    return [query for query in queries() if query.board == board]


def _chosen(query: Query, *, node: str, **macros: str) -> dict[str, str]:
    """Return what is chosen in a dashboard: one node, where it is about one."""
    values = {"__rate_interval": "5m", **macros}
    return (
        variables(node=node, **values) if query.board == "dshealthd-node" else variables(**values)
    )


def _end(server: Prometheus) -> float:
    """Return the next full minute after a server's last samples. Subqueries look at full minutes
    only, and a minute ago there was nothing.
    """
    return 60.0 * math.ceil((server.last or time.time()) / 60)


def _limit(query: Query) -> int:
    """Return how many series a query may have by the kind of its panel."""
    kinds = {panel["title"]: panel["type"] for panel in panels(documents()[query.board])}
    if query.panel == "Nodes by severity":
        return NODES
    return {"stat": 1, "table": 4 * ROWS, "timeseries": 2 * SERIES, "state-timeline": ROWS}.get(
        kinds.get(query.panel, ""), 2 * SERIES
    )
