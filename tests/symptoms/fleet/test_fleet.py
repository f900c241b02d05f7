"""The rules over a fleet: nothing healthy pages, and each fault is told once, as what it is."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.findings.promtool_scenes import finding_series
from tests.symptoms.fleet.faults import catalogue, inject
from tests.symptoms.fleet.fleet import healthy
from tests.symptoms.fleet.series import Series
from tests.symptoms.promtool import asking, got, whole

Told = Counter[tuple[str, str, str, str]]
"""Alerts by severity, symptom, component, and CLUSTER/NODE."""
DAY = 1440
NODES, PART = 200, 10
LASTS = 60
"""Minutes for which a fault lasts."""
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def replay(series: Series, directory: Path, limit: float) -> Told:
    """Play series through the shipped rules and return every alert that fired at some time."""
    expression = (
        "group by (alertname, severity, symptom, component, cluster, node) (max_over_time("
        f'ALERTS{{alertstate="firing", severity=~"critical|warning"}}[{series.minutes}m]))'
    )
    scene = asking(expression, f"{series.minutes - 1}m", series.document())
    scene["input_series"] += finding_series(scene)
    file = directory / "fleet.yml"
    file.write_text(json.dumps(whole(scene)), encoding="utf-8")
    return Counter(_alerts(got(file, limit)))


def _alerts(text: str) -> Iterable[tuple[str, str, str, str]]:
    for sample in re.findall(r"\{(.*?)\} 1E\+00", text):
        labels = dict(_LABEL.findall(sample))
        where = f"{labels.get('cluster', '')}/{labels.get('node', '')}"
        yield (labels["severity"], labels["symptom"], labels["component"], where)


def pages(told: Told) -> list[tuple[str, str, str, str]]:
    """Return those that wake somebody."""
    return [alert for alert in told.elements() if alert[0] == "critical"]


def check_healthy(count: int, minutes: int, seed: int, directory: Path, limit: float) -> None:
    """Assert that a healthy fleet pages nobody.

    It has tickets for optics that flap, and for checkpoints of ten minutes.
    """
    series, found = healthy(count, minutes, seed)
    told = replay(series, directory, limit)
    assert pages(told) == []
    flapped = {f"{node.cluster}/{node.name}" for node in found if node.flaps}
    left = {
        alert
        for alert in told
        if not (alert[1] == "bad-link" and alert[3] in flapped)
        # A checkpoint of ten minutes is worth a ticket, and no page.
        and alert[1] not in {"nccl-timeout", "training-hang"}
    }
    assert left == set()


def check_faults(first: int, number: int, seed: int, directory: Path, limit: float) -> None:
    """Assert that faults of the catalogue from the first on, each on a node of its own, are told
    once.
    """
    minutes = 120
    series, found = healthy(number + 6, minutes, seed)
    quiet = [node for node in found if not (node.reboots or node.flaps or node.joins)]
    kinds = len(catalogue(found[0], 0.0))
    expected: Told = Counter()
    for place, node in enumerate(quiet[:number]):
        start = 40 + place % 7
        fault = catalogue(node, 60.0 * start)[(first + place) % kinds]
        inject(fault, node, series, start, LASTS)
        expected["", fault.symptom, fault.component, f"{node.cluster}/{node.name}"] += 1
    told = replay(series, directory, limit)
    broken = {where for _, _, _, where in expected}
    found_of: Told = Counter()
    paged = {alert[1:] for alert in told if alert[0] == "critical"}
    for (severity, symptom, component, where), times in told.items():
        # A page keeps back the tickets of its symptom and part, as Alertmanager does.
        paged_too = severity != "critical" and (symptom, component, where) in paged
        if where in broken and not paged_too:
            found_of["", symptom, component, where] += times
    assert found_of - expected == Counter(), "told twice, or as something else"
    assert expected - found_of == Counter(), "not told"


@pytest.mark.timeout(900)
def test_healthy_hours(tmp_path: Path) -> None:
    """Three hours of eight nodes: reboots, upgrades, jobs, checkpoints, missed scrapes; no page."""
    check_healthy(8, 180, 7, tmp_path, 850)


@pytest.mark.timeout(900)
def test_each_fault_is_told_once(tmp_path: Path) -> None:
    """The first faults of the catalogue lead to one alert each: its slug, its component."""
    check_faults(0, 6, 3, tmp_path, 850)


# promtool evaluates at most 10,000 samples at once, so that a fleet is replayed in parts.


@pytest.mark.fleet
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(NODES // PART))
def test_healthy_day(seed: int, tmp_path: Path) -> None:
    """A day of a part of the fleet, all of whose seeds are 200 nodes; no page."""
    check_healthy(PART, DAY, seed, tmp_path, 3600)


@pytest.mark.fleet
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(0, 60, 6))
def test_sixty_faults(first: int, tmp_path: Path) -> None:
    """Sixty faults, all of the catalogue once and most of it twice, each told once."""
    check_faults(first, 6, 100 + first, tmp_path, 1200)
