"""Findings against the alert rules and their thresholds, in both directions."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dshealthd import findings
from dshealthd.findings.catalogue import catalogue, found, part
from dshealthd.findings.judge import signs
from dshealthd.jobs.hangs.hang import PROBLEMS, explain
from dshealthd.symptoms.entry import Alert
from dshealthd.symptoms.runbooks import first_step
from dshealthd.symptoms.template import render
from tests.findings.player import values
from tests.findings.promtool_scenes import Moment, moments, scenes

if TYPE_CHECKING:
    from dshealthd.findings.finding import Finding

SOURCES = "".join(
    file.read_text(encoding="utf-8") for file in Path(findings.__file__).parent.glob("*.py")
)
FOUND = frozenset(
    name
    for name in re.findall(r'"(Dshealthd\w+)"', SOURCES)
    if isinstance(catalogue()[name].alert, Alert)
)
"""The alerts that are rules of their own, and that findings stand for besides."""
UNKNOWN = "DshealthdCollectorFailing"
"""It makes the node unknown; its alert, five minutes later, is a warning."""

HISTORY = "needs the history of a counter or a gauge, which Prometheus keeps"
FLEET = "needs the other nodes"
LEFT_TO_PROMETHEUS = {
    "DshealthdAgentGone": "an agent that is gone has no findings",
    "DshealthdFindingsIncomplete": "is about the judge itself",
    "DshealthdFleetUnreachable": FLEET,
    "DshealthdTargetsLost": FLEET,
    "DshealthdRulesBroken": "is about Prometheus",
    "DshealthdManyNodes": FLEET,
    "DshealthdGpusWaiting": HISTORY,
    "DshealthdNvlinkDomainUnhealthy": FLEET,
    "DshealthdLeafPortsDown": FLEET,
}
"""Critical alerts that no finding stands for, and why."""
BY_HISTORY = {
    "DshealthdMaintenance": "its alert remembers a node whose agent is gone",
    "DshealthdPathSlow": "its alert looks at five minutes",
    "DshealthdLoopbackSlow": "its alert looks at a minute",
    "DshealthdGpuComputesWrong": "its alert compares nodes, and with the past",
    "DshealthdJobHang": "its alert knows the job's ranks on other nodes",
    "DshealthdCollectiveStuck": "its alert knows the GPUs possibly stuck",
    "DshealthdLossNotFinite": "its alert names the ranks at which it began",
    "DshealthdProbeResultWrong": "its alert leaves out nodes that are gone",
    "DshealthdProbeFails": "its alert leaves out nodes that are gone",
    "DshealthdProbeHung": "its alert leaves out nodes that are gone",
    "DshealthdStraggler": "its alert leaves out nodes that are gone",
    "DshealthdLinkSuspect": "its alert leaves out nodes that are gone",
    "DshealthdRendezvousPortOrphaned": "its alert knows the job's ranks on other nodes",
}
"""Findings that may be there where their alert is not, or the other way round, and why."""


def findings_at(moment: Moment, node: str) -> list[Finding]:
    """Return what an agent finds at a moment."""
    series = moment.scene.look(node, moment.at)
    common = {"node": node, "instance": f"{node}:1"}
    query = functools.partial(series.query, wall=moment.at)
    return [found(sign, common, query) for sign in signs(series, node, moment.at)]


@functools.cache
def everything() -> tuple[Moment, ...]:
    """Return the moments of all scenes."""
    return tuple(moments())


def test_every_finding_has_its_alert() -> None:
    """Each alert that findings stand for exists, so that slug, severity and words come from it."""
    assert catalogue().keys() >= FOUND


def test_every_critical_alert_has_its_finding() -> None:
    """An alert that wakes somebody is a finding on its node, or it is said why it cannot be."""
    critical = {
        name
        for name, entry in catalogue().items()
        if isinstance(entry.alert, Alert) and entry.alert.severity == "critical"
    }
    assert critical - FOUND == LEFT_TO_PROMETHEUS.keys()
    assert all(
        entry.alert.severity in {"critical", "warning"}
        for name, entry in catalogue().items()
        if name in FOUND
    )


@pytest.mark.parametrize("name", sorted(FOUND - {UNKNOWN}))
def test_findings_are_where_alerts_fire(name: str) -> None:
    """Where a scene has an alert fire for a node, its agent has the finding, of the same part."""
    entry = catalogue()[name]
    seen = 0
    for moment in everything():
        if moment.alert != name:
            continue
        for labels in moment.fires:
            # What is about a job as a whole names no node: one of its nodes shows it.
            nodes = {labels["node"]} if labels.get("node") else moment.scene.nodes()
            here = [finding for node in nodes for finding in findings_at(moment, node)]
            mine = [one for one in here if one.alert == name]
            named = part(labels, entry.alert.component)
            if name in BY_HISTORY and named not in {one.part for one in mine}:
                continue
            seen += 1
            assert mine, (moment.scene.name, moment.at, labels)
            assert not named or named in {one.part for one in mine}, moment.scene.name
            assert {(one.slug, str(one.severity)) for one in mine} == {
                (labels.get("symptom", entry.slug), labels.get("severity", entry.alert.severity))
            }
    assert seen, f"no scene has shown {name} as a finding"


def test_healthy_nodes_have_no_findings() -> None:
    """The fleet in which no alert fires has no finding at any moment."""
    seen = 0
    for scene in scenes("healthy.yml"):
        for node in scene.nodes():
            for at in (60.0, 300.0, 380.0):
                seen += 1
                assert list(signs(scene.look(node, at), node, at)) == []
    assert seen > 6


def test_words_are_the_alerts() -> None:
    """What a finding says is what Prometheus writes, to the letter.

    Its queries are answered by the node's samples.

    Where the value is that of a longer history it differs by that.
    """
    compared = set()
    for moment in everything():
        alert = catalogue()[moment.alert].alert
        if not isinstance(alert, Alert):
            continue
        for labels, texts in zip(moment.fires, moment.texts, strict=True):
            node = labels.get("node", "")
            words = alert.description
            if not texts or moment.alert not in FOUND or "$value" in words:
                continue
            query = functools.partial(moment.scene.look(node, moment.at).query, wall=moment.at)
            assert render(alert.description, labels, None, query) == texts["description"]
            assert alert.summary == texts["summary"]
            compared.add(moment.alert)
    assert "DshealthdJobHang" in compared


def job_hang() -> Alert:
    """Return the alert for hung jobs."""
    alert = catalogue()["DshealthdJobHang"].alert
    assert isinstance(alert, Alert)
    return alert


@pytest.mark.parametrize("reason", sorted({*PROBLEMS} - {"traced"}))  # which is no page
def test_problems_of_ranks_have_one_wording(reason: str) -> None:
    """The page to the phone words the problem of a rank as page, commands and evidence do."""
    classes = {"stopped": "process", "gone": "process", "checkpoint": "checkpoint"}
    classes |= {"blocked": "input", "input": "input"}
    labels = {
        "training_job": "j",
        "node": "n1",
        "rank": "3",
        "class": classes.get(reason, "desync"),
        "reason": reason,
    }
    text = render(job_hang().description, labels, None)
    assert PROBLEMS[reason] in text


@pytest.mark.parametrize("reason", ["tie", "elsewhere"])
def test_a_node_that_names_no_rank_says_why(reason: str) -> None:
    """The finding says in the words of the page why ranks at different places name none."""
    whole = reason == "tie"
    labels = {"training_job": "j", "node": "n1", "class": "desync", "reason": reason}
    text = render(job_hang().description, labels, None)
    assert explain("desync", named=False, whole=whole).partition("different places")[2] in text
    assert "rank " not in text.partition("First step")[0].replace("rank has made", "")


@pytest.mark.parametrize(
    "name", sorted(name for name, one in catalogue().items() if isinstance(one.alert, Alert))
)
def test_every_alert_can_be_rendered(name: str) -> None:
    """The words of every alert are known to the renderer, and end with something to do."""
    alert = catalogue()[name].alert
    assert isinstance(alert, Alert)
    text = render(alert.description, {"node": "n1", "gpu": "3"}, 1.5)
    assert "{{" not in text
    assert first_step(alert)


def test_notation_of_promtool() -> None:
    """The scenes are read as promtool reads them."""
    assert list(values("1x2 _x2 0+2x2 stale 5")) == [1, 1, 1, "_", "_", 0, 2, 4, "stale", 5]
    assert list(values("76e9x1 1e-15x1 -2x1")) == [76e9, 76e9, 1e-15, 1e-15, -2, -2]
