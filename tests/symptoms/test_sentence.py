"""Sentences of findings: what the agent writes is what Prometheus writes."""

from __future__ import annotations

import math

import pytest

from dshealthd.symptoms.sentence import FORMS, SentenceError, placeholders, template, text

LABELS = {"node": "n1", "part": "GPU 3", "reason": "gpu_lost", "training_job": "llama"}


def test_labels_are_filled_in() -> None:
    """A placeholder is a label of the finding, on the node and in the alert."""
    sentence = "{part} of {node} is lost ({reason})."
    assert text(sentence, LABELS, None) == "GPU 3 of n1 is lost (gpu_lost)."
    assert (
        template(sentence)
        == "{{ $labels.part }} of {{ $labels.node }} is lost ({{ $labels.reason }})."
    )
    assert placeholders(sentence) == {"node", "part", "reason"}


@pytest.mark.parametrize(
    "sentence", ["{path}", "{value:parsecs}", "{part:percent}", "{value:a|b|c}"]
)
def test_unknown_placeholders_are_refused(sentence: str) -> None:
    """A sentence that no finding could fill is an error of its file."""
    with pytest.raises(SentenceError, match="no placeholder"):
        template(sentence)


def test_braces_of_queries_stay() -> None:
    """What is in braces and no placeholder, such as a query's labels, is left alone."""
    sentence = 'see `dshealthd_gpu_up{gpu="3"}`'
    assert text(sentence, LABELS, None) == template(sentence) == sentence


def test_unknown_value_is_said() -> None:
    """A value that is not known is not written as 0."""
    assert text("{value:percent} used", LABELS, None) == "unknown used"


VALUES = (
    0.0,
    -61.5,
    3e-11,
    2.0**55,
    750.0,
    1000.0,
    0.001,
    0.12,
    1.0,
    2.0,
    59.0,
    60.0,
    61.5,
    97.0,
    1023.0,
    1024.0,
    86_400.0,
    1.5e9,
    123456.789,
)


def test_forms_are_those_of_prometheus() -> None:
    """Each form of a value reads the same on the page and in the alert, by promtool's own word."""
    from tests.symptoms.promtool import rendered

    cases = [(f"{{value:{form}}}", value) for form in (*FORMS, "GPU|GPUs") for value in VALUES]
    theirs = rendered([(template(sentence), value, {}) for sentence, value in cases])
    assert [text(sentence, LABELS, value) for sentence, value in cases] == theirs


def test_any_figure_can_be_said() -> None:
    """A figure that is none leaves the finding there."""
    for form in (*FORMS, "line|lines"):
        for value in (math.inf, -math.inf, math.nan, 1.7e308, -1.7e308, 5e-324):
            assert text(f"{{value:{form}}}", {}, value)
