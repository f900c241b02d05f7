"""Symptoms' files: what is accepted, and the exact message for what is not."""

from __future__ import annotations

import pytest

from dshealthd.symptoms.entry import EntryError, parse

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
    "# T\n": "x.md: must begin with +++, TOML and +++, each fence on a line of its own",
    "+++\na = \n+++\n": "x.md: is not TOML: Invalid value (at line 1, column 5)",
    entry(
        'alert = "a"'
    ): "x.md: alert: unknown key; known are covered_by, means, row, title, waits_for",
    entry("rwo = 3"): "x.md: rwo: unknown key; did you mean row?",
    entry('row = "3"'): "x.md: row: must be int, not str",
    entry("covered_by = [1]"): "x.md: covered_by: must be strings",
    entry('means = ["page"]'): 'x.md: means: "page" is not one of alert, doctor, explain, job',
    entry('title = ""'): "x.md: title: is missing",
    entry(
        name='"dshealthd_x"'
    ): 'x.md: alerts[0].name: "dshealthd_x" is not Dshealthd and words in CamelCase',
    entry(
        severity='"page"'
    ): 'x.md: alerts[0].severity: "page" is not one of critical, warning, info',
    entry(component='"host"'): (
        'x.md: alerts[0].component: "host" is not one of node, gpu, nic, link, '
        "nvlink_domain, leaf, path, job, "
        "fleet"
    ),
    entry(for_='"5"'): 'x.md: alerts[0].for: "5" is not a duration such as "5s", "10m" or "1h"',
    entry(expr='" "'): "x.md: alerts[0].expr: must be a string that is not empty",
    entry(expr=""): "x.md: alerts[0].expr: is missing",
    entry(
        hold='"5s"'
    ): "x.md: alerts[0].hold: unknown key; known are act, audience, component, description, "
    "every, expr, for, keep_firing_for, name, severity, summary, symptom, ticket, ticket_for",
    entry(summary='"{{ $value }}"'): "x.md: alerts[0].summary: must hold no template",
    entry(body="## Meaning\nx\n## Remedy\nx\n"): "x.md: section ## Confirm is missing",
    entry(body=BODY.replace("1. Do it.\n", "")): "x.md: section ## Remedy is missing",
    entry(body=BODY + "## Notes\nx\n"): "x.md: section ## Notes is unknown",
    "+++\ntitle = 'T'\nalerts = 1\n+++\n" + BODY: "x.md: alerts: must be [[alerts]] tables",
}


@pytest.mark.parametrize("text", BAD)
def test_what_is_wrong_is_named(text: str) -> None:
    """A bad file is refused with its name, the key and what is wrong with it."""
    with pytest.raises(EntryError) as caught:
        parse("x", text)
    assert str(caught.value) == BAD[text]


def test_all_errors_at_once() -> None:
    """A file with several errors gets all of them in one message, a line each."""
    with pytest.raises(EntryError) as caught:
        parse("x", entry("rwo = 3", body="", expr=""))
    assert len(str(caught.value).splitlines()) == 5


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
