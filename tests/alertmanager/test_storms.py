"""How soon a page comes while others are open, and how large it is when a thousand nodes have it.

By a real Alertmanager with the times of the shipped file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from dshealthd.symptoms.entry import RULESET
from tests.alertmanager.conftest import page_by_examples
from tests.lab.receiver import Notification, Receiver
from tests.lab.servers import Server, alertmanager
from tests.lab.station import Loopback
from tests.stopwatch import Stopwatch

ADDRESS = "127.0.0.64"
SECONDS = 15.0
"""From an alert that fires to its message, at most."""
MOST_PARTS = 20
MOST_BYTES = 32 << 10
"""Of a message, whatever it is about; PagerDuty refuses events above 512 KB, and people read
less."""
NODES = 1000
LONG = "why " * 175 + "First step: " + "do " * 60
"""As long as the descriptions of alerts come to be."""


@pytest.fixture(scope="module")
def server(
    station: Loopback, tmp_path_factory: pytest.TempPathFactory, receiver: Receiver
) -> Iterator[Server]:
    """An Alertmanager that pages by webhook, PagerDuty and Slack, as the examples do."""
    directory = tmp_path_factory.mktemp("server")
    adapt = partial(page_by_examples, receiver=receiver, directory=directory)
    with alertmanager(station, directory, receiver, adapt) as made:
        yield made


def page(alert: str, symptom: str, component: str, node: str, **labels: str) -> dict[str, Any]:
    """Return a page about a node."""
    return {
        "labels": {
            **RULESET,
            "alertname": alert,
            "symptom": symptom,
            "severity": "critical",
            "component": component,
            "job": "dshealthd",
            "instance": f"{node}:10061",
            "node": node,
            **labels,
        },
        "annotations": {
            "summary": "Something that is wrong with this node",
            "description": LONG,
            "runbook_url": "https://github.com/dshealthd/dshealthd/blob/main/docs/runbooks/x.md#x",
        },
    }


port = partial(page, "DshealthdFabricPortDown", "bad-link", "nic", part="mlx5_0/1")


def of_cluster(receiver: Receiver, name: str, cluster: str) -> Sequence[Notification]:
    """Return the messages of a receiver about a cluster."""
    return [
        entry
        for entry in receiver.sent(name)
        if entry.document["groupLabels"].get("cluster") == cluster
    ]


def test_second_fault_of_a_symptom_is_told_at_once(server: Server, receiver: Receiver) -> None:
    """While the page of one node is open, the same fault of another node is a page of its own.

    It does not wait for the next update of the first.
    """
    cluster = "second"
    pages = partial(of_cluster, receiver, "page", cluster)
    first = port(node="a", cluster=cluster)
    server.ask("/api/v2/alerts", [first])
    assert receiver.wait(lambda: len(pages()) == 1, 60)
    watch = Stopwatch(server.process.pid)
    server.ask("/api/v2/alerts", [first, port(node="b", cluster=cluster)])
    assert receiver.wait(lambda: len(pages()) == 2, 60)
    assert watch.seconds() < SECONDS
    assert [[alert.labels["node"] for alert in entry.alerts] for entry in pages()] == [["a"], ["b"]]


@pytest.fixture(scope="module")
def storm(server: Server, receiver: Receiver) -> dict[str, list[Any]]:
    """Return what all receivers were sent of a path that hangs on a thousand nodes.

    The pages of the single nodes come first, as they do from Prometheus.
    """
    cluster = "storm"
    nodes = [f"node-{number:04}" for number in range(NODES)]
    hangs = partial(page, "DshealthdPathFailing", "checkpoint-path", "path", part="/ckpt")
    many = partial(page, "DshealthdManyNodes", "checkpoint-path", "fleet", pages="PathFailing")
    alerts = [kind(node=node, cluster=cluster) for kind in (hangs, many) for node in nodes]
    server.ask("/api/v2/alerts", alerts)

    def told(name: str) -> list[Any]:
        documents = [entry.document for entry in receiver.sent(name)]
        return [document for document in documents if "node-0000" in json.dumps(document)]

    names = ("page", "slack", "pagerduty")
    assert receiver.wait(lambda: all(map(told, names)), 60)
    receiver.wait(lambda: len(told("page")) > 1, 10)
    return {name: told(name) for name in names}


def test_storm_is_one_page(storm: dict[str, list[Any]]) -> None:
    """What a thousand nodes have at once is one message, whose title counts them."""
    (found,) = storm["page"]
    assert found["groupLabels"]["symptom"] == "checkpoint-path"
    assert len(found["alerts"]) == MOST_PARTS
    assert found["truncatedAlerts"] == NODES - MOST_PARTS
    (slack,) = storm["slack"]
    title = slack["attachments"][0]["title"]
    assert title.endswith(f"… ({NODES} in all)")
    assert "(PathFailing)" in title


def test_storm_is_no_long_message(storm: dict[str, list[Any]]) -> None:
    """No message is too long for whoever delivers it: twenty parts, and how many there are."""
    for name, documents in storm.items():
        (document,) = documents
        text = json.dumps(document, ensure_ascii=False)
        assert len(text.encode()) <= MOST_BYTES, name
    text = storm["slack"][0]["attachments"][0]["text"]
    assert text.count("\n  since: ") == MOST_PARTS
    assert f"The first {MOST_PARTS} of {NODES} that fire." in text


def test_long_texts_are_cut(server: Server, receiver: Receiver) -> None:
    """Descriptions that list what a fleet has do not make a message too long."""
    alerts = [
        port(node="node-1", cluster="long", part=f"mlx5_{number}/1")
        | {"annotations": {"description": "why " * 2000 + "First step: " + "do " * 2000}}
        for number in range(MOST_PARTS)
    ]
    server.ask("/api/v2/alerts", alerts)

    def found() -> list[str]:
        texts = [one.document["attachments"][0]["text"] for one in receiver.sent("slack")]
        return [text for text in texts if "mlx5_19/1" in text]

    assert receiver.wait(found, 60)
    assert found()[0].count("first step: do do") == MOST_PARTS
    assert len(found()[0].encode()) <= MOST_BYTES
