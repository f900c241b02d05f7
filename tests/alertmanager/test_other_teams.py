"""Alerts of other teams in the same Alertmanager: none of our rules touches them, nor they ours.

Alerts are made from each inhibition rule's own matchers and posted to a real Alertmanager.
"""

from __future__ import annotations

import re
import time
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from dshealthd.symptoms.entry import RULESET
from tests import yaml_files
from tests.lab.servers import ALERTMANAGER, PART

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.lab.servers import Server

Labels = dict[str, str]

RULES = yaml_files.load(ALERTMANAGER / PART)["inhibit_rules"]
NUMBERED = pytest.mark.parametrize("number", range(len(RULES)))
COMMON = {f'{name}="{value}"' for name, value in RULESET.items()}
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
TARGET = {"exporter": "dshealthd", "job": "dshealthd", "service": "dshealthd", "instance": "a:1"}
"""What a site's own alert about an agent has from its target."""
NODE = {"cluster", "node", "severity", "job", "instance"}
"""What a site's own alert about a node may share with ours."""
SECONDS = 120.0


def matching(matchers: list[str], other: Mapping[str, str]) -> Labels:
    """Return labels that matchers accept; `other` are those of a label that must not be empty."""
    labels: Labels = {}
    for name, operator, value in (MATCHER.fullmatch(text).groups() for text in matchers):  # type: ignore[union-attr]
        if operator in {"=", "=~"}:
            # One text that the pattern matches.
            one = re.sub(r"\((?:[^|)]*\|)*([^|)]*)\)", r"\1", value).replace(".*", "")
            labels[name] = one.split("|")[-1]
        elif value == "":
            labels.setdefault(name, other.get(name, "x"))
        elif operator == "!~":
            labels.setdefault(name, "other")
    return {name: value for name, value in labels.items() if value}


def pair(rule: Mapping[str, Any]) -> tuple[Labels, Labels]:
    """Return labels of a source and of a target of a rule, alike in what it compares."""
    source = matching(rule["source_matchers"], {})
    target = matching(rule["target_matchers"], source)
    compared = {name: source.get(name, target.get(name, "x")) for name in rule["equal"]}
    for name in rule["equal"]:
        if f'{name}=""' in rule["source_matchers"]:
            del compared[name]
    source, target = compared | source, compared | target
    source.setdefault("alertname", "DshealthdSource")
    target.setdefault("alertname", "DshealthdTarget")
    return source, target


def foreign(labels: Labels) -> list[Labels]:
    """Return alerts of another team that are like one of ours, but for the common label."""
    own = {name: value for name, value in labels.items() if name not in RULESET}
    names = {"alertname": "SomebodyElses"}
    node = {name: value for name, value in own.items() if name in NODE}
    warning = {"severity": "warning"}
    return [
        own,
        own | TARGET,
        own | names,
        node | TARGET | names,
        node | names | warning,
        names | warning,
    ]


@pytest.fixture(scope="module")
def inhibited(server: Server) -> dict[str, list[str]]:
    """Post, for each rule, a source and a target of ours, foreign alerts like either, and a target
    whose only sources are foreign. Return what inhibits each alert, by its label `id`.
    """
    alerts, numbers = [], count()

    def post(what: str, cluster: str, labels: Labels) -> None:
        mark = f"{what} {next(numbers)}"
        alerts.append({"labels": labels | {"cluster": cluster, "id": mark}})

    for number, rule in enumerate(RULES):
        source, target = pair(rule)
        shared, alone = f"rule {number}", f"rule {number} without source"
        post(f"{number} source", shared, source)
        post(f"{number} target", shared, target)
        for labels in (*foreign(source), *foreign(target)):
            post(f"{number} foreign", shared, labels)
        post(f"{number} alone", alone, target)
        for labels in foreign(source):
            post(f"{number} foreign", alone, labels)
    server.ask("/api/v2/alerts", alerts)
    end = time.monotonic() + SECONDS
    while True:
        found = {
            alert["labels"]["id"]: alert["status"]["inhibitedBy"]
            for alert in server.ask("/api/v2/alerts")
            if "id" in alert["labels"]
        }
        held = sum(bool(by) for name, by in found.items() if " target " in name)
        if (len(found) == len(alerts) and held == len(RULES)) or time.monotonic() > end:
            return found
        time.sleep(0.2)


def of(inhibited: Mapping[str, list[str]], what: str) -> list[list[str]]:
    """Return what inhibits the alerts of a kind."""
    return [by for name, by in inhibited.items() if name.startswith(f"{what} ")]


@NUMBERED
def test_our_source_holds_back_ours_alone(number: int, inhibited: Mapping[str, list[str]]) -> None:
    """A rule inhibits its target, and no alert of another team with the same labels, or with none."""
    (by,) = of(inhibited, f"{number} target")
    assert by
    others = of(inhibited, f"{number} foreign")
    assert len(others) == 18
    assert not any(others)


@NUMBERED
def test_foreign_source_holds_back_nothing_of_ours(
    number: int, inhibited: Mapping[str, list[str]]
) -> None:
    """Another team's alert that looks like a rule's source inhibits no alert of ours."""
    assert of(inhibited, f"{number} alone") == [[]]


@NUMBERED
def test_rules_require_our_label(number: int) -> None:
    """Each rule requires the label that all our alerts have of its source and of its target."""
    assert set(RULES[number]["source_matchers"]) >= COMMON
    assert set(RULES[number]["target_matchers"]) >= COMMON
