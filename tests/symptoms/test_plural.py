"""Alerts about one of something: "1 GPU has", not "1 GPUs have"."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dshealthd.symptoms import all_symptoms
from dshealthd.symptoms.sentence import LABELS, text
from tests.singular import ONE_OF_MANY
from tests.symptoms.promtool import rendered, rule_groups

DESCRIPTIONS = [
    (rule["alert"], rule["annotations"]["description"], rule["expr"])
    for _, rule in rule_groups()
    if "alert" in rule
]
FINDINGS = [finding for symptom in all_symptoms().values() for finding in symptom.findings]
NEVER_ONE = {
    "DshealthdComputesWrong": "two GPUs at least",
    "DshealthdFabricSlow": "a ratio above 1",
    "DshealthdFleetUnreachable": "fires above one node",
    "DshealthdLemonNode": "fires above two incidents",
    "DshealthdManyNodes": "three nodes or more",
    "DshealthdNodeDrift": "fires above one version",
}
"""Alerts whose value is never 1, and why; what the rule says, not what usually happens."""


def texts(description: str, expression: str) -> Iterator[tuple[str, float, dict[str, str]]]:
    """Yield the template for the value 1, once for each label on which its words depend, and for
    each reason that the rule gives.
    """
    labels = dict.fromkeys(re.findall(r"\$labels\.(\w+)", description), "x")
    yield description, 1.0, {}
    yield description, 1.0, labels
    for name, value in re.findall(r'eq \$labels\.(\w+) "([^"]*)"', description):
        yield description, 1.0, labels | {name: value}
    for reason in re.findall(r'"reason", "([^"]+)"', expression):
        yield description, 1.0, {"reason": reason}


def test_one() -> None:
    """What an alert says of a single one is in the singular, unless there never is a single one."""
    cases = [(name, case) for name, *rule in DESCRIPTIONS for case in texts(*rule)]
    said = rendered([case for _, case in cases])
    plural = {name for (name, _), text in zip(cases, said, strict=True) if ONE_OF_MANY.search(text)}
    assert plural == NEVER_ONE.keys(), (
        "write {{ if eq $value 1.0 }}, or say in NEVER_ONE why there never is one"
    )


def test_one_found() -> None:
    """What a node finds of a single one is in the singular, too."""
    labels = dict.fromkeys(LABELS, "x")
    said = [text(one, labels, 1.0) for finding in FINDINGS for one in (finding.says, finding.step)]
    assert [match[0] for one in said for match in ONE_OF_MANY.finditer(one)] == []


def test_plurals_are_found() -> None:
    """The search finds plurals, with words between, and leaves what is right alone."""
    for wrong in (
        "1 GPUs are",
        "on 1 nodes:",
        "1 InfiniBand or RoCE ports",
        "1 OOM kills",
        "1 rendezvous ports",
    ):
        assert ONE_OF_MANY.search(wrong), wrong
    for right in (
        "127.0.0.1 fails",
        "1 process hung",
        "1 of its peers",
        "1 node has",
        "11 nodes",
        "1 rendezvous port",
    ):
        assert not ONE_OF_MANY.search(right), right
