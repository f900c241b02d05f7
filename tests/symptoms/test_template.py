"""Alert texts rendered without Prometheus."""

from __future__ import annotations

import pytest

from dshealthd.collectors.gpu import UP
from dshealthd.findings.series import Point, Series
from dshealthd.symptoms.template import TemplateError, render

LABELS = {"node": "n1", "class": "input", "empty": ""}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("on {{ $labels.node }}: {{ $value }}", "on n1: 1.5"),
        ("{{ $labels.absent }}!", "!"),
        (
            (
                '{{ if eq $labels.class "gpu" }}a{{ else if eq $labels.class "input" }}b{{ else '
                "}}c{{ end }}"
            ),
            "b",
        ),
        ("{{ if $labels.empty }}a{{ else }}b{{ end }}", "b"),
        ("{{ with $labels.node }}<{{ . }}>{{ else }}none{{ end }}", "<n1>"),
        ("{{ with $labels.empty }}<{{ . }}>{{ else }}none{{ end }}", "none"),
        ("{{ if $labels.node }}{{ with $labels.class }}{{ . }}{{ end }} x{{ end }}", "input x"),
        ("a{{ range query `up == 1` }} {{ .Labels.node }}{{ end }}", "a"),
        ("a{{ with printf `up{x=%q}` $labels.node | query }} {{ first . | value }}{{ end }}", "a"),
        ("{{ if gt $value 1.0 }}more{{ end }}{{ if lt $value 1.0 }}less{{ end }}", "more"),
        ("{{ $value | humanizePercentage }} {{ $value | humanizeDuration }}", "150% 1.5s"),
        ('{{ printf "%.2f" $value }}', "1.50"),
    ],
)
def test_rendered(template: str, text: str) -> None:
    """What alerts use of Go's templates is rendered; a query finds nothing."""
    assert render(template, LABELS, 1.5) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(1500.0, "1.5k"), (0.5, "500m"), (2e9, "2G"), (999.0, "999"), (-3e6, "-3M")],
)
def test_humanize(value: float, text: str) -> None:
    """Numbers are written as Prometheus writes them."""
    assert render("{{ $value | humanize }}", {}, value) == text


def test_numbers_are_those_of_prometheus() -> None:
    """Each function that formats a number is Prometheus' own, by promtool's word."""
    from tests.symptoms.promtool import rendered

    functions = ("humanize", "humanize1024", "humanizePercentage", "humanizeDuration")
    values = (
        0.0,
        -0.0004,
        0.25,
        1.0,
        1.5,
        59.0,
        -61.5,
        999.0,
        1023.0,
        4096.0,
        90061.0,
        1.5e9,
        -3e6,
    )
    cases = [(f"{{{{ $value | {name} }}}}", value) for name in functions for value in values]
    assert [render(template, {}, value) for template, value in cases] == rendered(cases)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.25, "250ms"),
        (59.0, "59s"),
        (61.0, "1m 1s"),
        (7322.0, "2h 2m 2s"),
        (90061.0, "1d 1h 1m 1s"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    """Durations are written with the units that count."""
    assert render("{{ $value | humanizeDuration }}", {}, seconds) == text


def test_queries() -> None:
    """What a query finds is written with its labels and values."""
    samples = Series((UP(0, "3", "GPU-d"), UP(1, "4", "GPU-e")))

    def ask(text: str) -> list[Point]:
        return samples.query(text, 0)

    for query, text in (
        ('dshealthd_gpu_up{instance="%s", gpu="4"}', "GPU-e 1"),
        ("dshealthd_gpu_up{instance=%q} == 0", "GPU-d 0"),
        ('dshealthd_gpu_up{gpu=~"[45]", uuid!="x"} > 0.5', "GPU-e 1"),
        ('dshealthd_gpu_up{gpu!~"3|4"}', "none"),
        ("sum(dshealthd_gpu_up)", "none"),
    ):
        node = " $labels.node" if "%" in query else ""
        template = f"{{{{ with printf `{query}`{node} | query }}}}"
        template += '{{ first . | label "uuid" }} {{ first . | value }}{{ else }}none{{ end }}'
        assert render(template, LABELS, None, ask) == text
    each = "{{ range query `dshealthd_gpu_up` }}{{ .Labels.gpu }}={{ .Value }} {{ end }}"
    assert render(each, LABELS, None, ask) == "3=0 4=1 "


def test_unknown_value() -> None:
    """A value that is not known is said to be so, not 0."""
    assert render("{{ $value | humanize }}", {}, None) == "unknown"


@pytest.mark.parametrize(
    "template",
    ["{{ if $value }}", "{{ end }}", "{{ strvalue $value }}", "{{ (f) }}", "{{ $other }}"],
)
def test_what_is_not_known(template: str) -> None:
    """A construct that is not known is an error, not a text."""
    with pytest.raises(TemplateError):
        render(template, {}, 1)
