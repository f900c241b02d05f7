"""A rolling upgrade of 100 nodes, each in maintenance while it reboots: nobody is woken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.symptoms.fleet.series import Series, Value
from tests.symptoms.promtool import asking, got, whole

NODES = 100
PEERS = 5
"""Others that find each node unreachable while it is away, and accuse it."""
OUT = 6
"""Minutes from `maintenance on` to `off`: one before it goes down, one after it is back."""
LASTS = 30 * 60.0
"""Seconds that `--for` allows."""
WOKEN = (
    'count(max_over_time((ALERTS{alertstate="firing", severity="critical"}'
    ' unless on (cluster, node) ALERTS{alertname="DshealthdMaintenance", alertstate="firing"})'
    "[%dm:1m]))"
)
"""Pages that Alertmanager does not hold back, whose inhibition is tested by itself."""


def upgrade(at_a_time: int, *, announced: bool, nodes: int = NODES) -> Series:
    """Return the series of an upgrade, so many nodes at a time."""
    rounds = nodes // at_a_time
    minutes = OUT * rounds + 10
    series = Series(minutes)
    for number in range(nodes):
        target = {
            "exporter": "dshealthd",
            "job": "dshealthd",
            "instance": f"10.0.0.{number}:10061",
            "node": f"n{number}",
        }
        start = 3 + OUT * (number // at_a_time)
        away = range(start + 1, start + OUT - 1)
        up: list[Value] = [float(minute not in away) for minute in range(minutes)]
        series.put("up", target, up)
        shown = range(start, start + OUT) if announced else range(0)
        end = 60.0 * start + LASTS
        for name, at in (("maintenance", 1.0), ("maintenance_end_timestamp_seconds", end)):
            off = 0.0 if name == "maintenance" else None
            series.put(
                f"dshealthd_{name}",
                target,
                [
                    None if not up[minute] else at if minute in shown else off
                    for minute in range(minutes)
                ],
            )
        for peer in range(1, 1 + PEERS):
            other = (number + peer) % nodes
            accuser = target | {"instance": f"10.0.0.{other}:10061", "node": f"n{other}"}
            suspect = {"kind": "node", "component": f"n{number}", "reason": "unreachable"}
            series.put(
                "dshealthd_suspect",
                accuser | suspect,
                [1.0 if minute - 1 in away else None for minute in range(minutes)],
            )
    return series


def woken(series: Series, directory: Path) -> int:
    """Play the series through the shipped rules and return how many pages somebody gets."""
    scene = asking(WOKEN % series.minutes, f"{series.minutes - 1}m", series.document())
    file = directory / "upgrade.yml"
    file.write_text(json.dumps(whole(scene)), encoding="utf-8")
    found = got(file, limit=850)
    return int(float(found.removeprefix("{}") or 0))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("at_a_time", [pytest.param(1, marks=pytest.mark.fleet), 10])
def test_an_upgrade_in_maintenance_wakes_nobody(at_a_time: int, tmp_path: Path) -> None:
    """One after the other or ten at a time, away for minutes: no page, of a node or of its
    peers.
    """
    assert woken(upgrade(at_a_time, announced=True), tmp_path) == 0


@pytest.mark.timeout(900)
def test_an_upgrade_without_it_pages(tmp_path: Path) -> None:
    """A smaller one without maintenance is as many pages as nodes: the test above can fail."""
    assert woken(upgrade(10, announced=False, nodes=30), tmp_path) >= 30
