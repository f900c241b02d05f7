"""Symptoms' files: what is accepted and what is not, and that those that ship are valid."""

from __future__ import annotations

import re
import typing
from typing import Literal

import pytest

from dshealthd.symptoms import all_symptoms
from dshealthd.symptoms.entry import (
    ADVICE,
    COMPONENTS,
    SECTIONS,
    Alert,
    EntryError,
    FindingType,
    FleetRule,
    parse,
)

BODY = "## Meaning\nIt is.\n## Confirm\n`ls`\n```\n## no heading\n```\n## Remedy\n1. Do it.\n"
ALERT = {
    "name": '"DshealthdX"',
    "severity": '"warning"',
    "component": '"node"',
    "expr": '"x"',
    "summary": '"s"',
    "description": '"d"',
}


def entry(top: str = "", body: str = BODY, **alert: str) -> str:
    """Return a file with one alert; a key that is given as "" is left out."""
    keys = {key.rstrip("_"): value for key, value in (ALERT | alert).items() if value}
    title = "" if "title" in top else 'title = "T"\n'
    rows = "".join(f"{key} = {value}\n" for key, value in keys.items())
    return f"+++\n{title}{top}\n[[alerts]]\n{rows}+++\n{body}"


BAD = {
    "# T\n": "must begin with",
    "+++\na = \n+++\n": "Invalid value",
    entry("rwo = 3"): "rwo",
    entry(expr=""): "expr",
    entry(hodl='"5s"'): "hodl",
    entry(expr="3"): "strip",
    entry('[[findings]]\nname = "DshealthdX"\nsays = "{path}"\nstep = ""'): "no placeholder",
}


@pytest.mark.parametrize("text", BAD)
def test_what_is_wrong_is_named(text: str) -> None:
    """A bad file is refused with its name and what is wrong with it."""
    with pytest.raises(EntryError, match=f"^x.md: .*{BAD[text]}"):
        parse("x", text)


SYMPTOMS = all_symptoms().values()
RULES = [
    (kind, rule)
    for symptom in SYMPTOMS
    for each in symptom.entries
    for kind, rule in ((type(each), each), (FleetRule, getattr(each, "rule", None)))
    if rule is not None
]


def test_values_are_valid() -> None:
    """A shipped rule has no word, duration or name that Prometheus or Alertmanager would not
    know.
    """
    for kind, rule in RULES:
        for name, hint in typing.get_type_hints(kind).items():
            value = getattr(rule, name)
            assert typing.get_origin(hint) is not Literal or value in typing.get_args(hint), rule
        for name in ("hold", "keep", "every", "page_after", "ticket_hold"):
            assert re.fullmatch(r"(\d+h)?(\d+m)?(\d+s)?", getattr(rule, name, "")), rule
        if isinstance(rule, Alert | FindingType):
            assert rule.component in COMPONENTS
            assert re.fullmatch("Dshealthd([A-Z][A-Za-z0-9]*)+", rule.name)
            assert rule.summary, rule
            assert "{" not in rule.summary, rule
        assert not isinstance(rule, Alert) or rule.expr


def test_runbooks_are_whole() -> None:
    """A shipped file has a title, known means and the sections that `doctor` and pages show."""
    for symptom in SYMPTOMS:
        assert symptom.title, symptom.slug
        assert {*symptom.means} <= {"alert", "doctor", "explain", "job"}
        assert [*symptom.sections] in ([*SECTIONS], [*SECTIONS, ADVICE])
        assert all(symptom.sections.values()), symptom.slug


def test_what_is_read() -> None:
    """A good file gives its alerts, with `for` and `every`, and its sections.

    A heading inside a code block is none.
    """
    symptom = parse(
        "x",
        entry(
            'row = 3\ncovered_by = ["y"]\nmeans = ["alert"]',
            for_='"1m30s"',
            every='"1m"',
            expr='"""\na\n  > b\n"""',
        ),
    )
    assert (symptom.slug, symptom.title, symptom.row, symptom.covered_by, symptom.means) == (
        "x",
        "T",
        3,
        ("y",),
        ("alert",),
    )
    (alert,) = symptom.alerts
    assert (alert.hold, alert.every, alert.expr) == ("1m30s", "1m", "a\n  > b")
    assert list(symptom.sections) == ["Meaning", "Confirm", "Remedy"]
    assert "## no heading" in symptom.sections["Confirm"]
