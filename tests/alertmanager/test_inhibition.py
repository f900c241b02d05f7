"""What is told and what is held back, by a real Alertmanager.

Alerts are posted to it, and its webhooks seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dshealthd.symptoms.entry import RULESET
from tests import yaml_files
from tests.findings.player import each_series, identity
from tests.lab.receiver import Receiver
from tests.lab.servers import Server

Labels = dict[str, str]


def alert(symptom: str, severity: str = "critical", **labels: str) -> Labels:
    """Return the labels of an alert."""
    known = {"symptom": symptom, "severity": severity, "component": "node", "job": "dshealthd"}
    return {**RULESET, "alertname": f"Test {symptom}", **known, **labels}


def alerts(rows: list[str]) -> list[Labels]:
    """Return the labels of the alerts of a scene."""
    found = [identity(series) for row in rows for series in each_series(row)]
    return [alert(symptom, **labels) for symptom, labels in found]


SCENES: Mapping[str, tuple[list[Labels], list[Labels]]] = {
    scene["name"]: (alerts(scene["told"]), alerts(scene.get("held", [])))
    for scene in yaml_files.load(Path(__file__).with_name("inhibition.yml"))
}


def members(labels: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    """Return labels as a member of a set."""
    return frozenset(labels.items())


@pytest.fixture(scope="module")
def told(server: Server, receiver: Receiver) -> dict[str, list[frozenset[tuple[str, str]]]]:
    """Post every scene, each in a cluster of its own.

    Return what was told of it, two seconds after all that is expected has come.
    """
    posted = [
        {"labels": labels | {"cluster": scene}}
        for scene, groups in SCENES.items()
        for group in groups
        for labels in group
    ]
    server.ask("/api/v2/alerts", posted)
    everybody = ("page", "ticket", "job-owner", "watchdog")
    expected = sum(len(shown) for shown, _ in SCENES.values())
    receiver.wait(lambda: len(receiver.firing(*everybody)) >= expected, 60)
    receiver.wait(lambda: len(receiver.firing(*everybody)) > expected, 2)
    found: dict[str, list[frozenset[tuple[str, str]]]] = {scene: [] for scene in SCENES}
    for entry in receiver.firing(*everybody):
        found[entry.labels["cluster"]].append(
            members({key: value for key, value in entry.labels.items() if key != "cluster"})
        )
    return found


@pytest.mark.parametrize("scene", SCENES)
def test_inhibition(scene: str, told: Mapping[str, list[Any]]) -> None:
    """Of the alerts of a scene, those that are causes or stand alone are told, and their
    consequences are held back.
    """
    shown, held_back = SCENES[scene]
    assert set(told[scene]) == set(map(members, shown)), f"held back should be {held_back}"
