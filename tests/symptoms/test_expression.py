"""Finding the names in PromQL."""

from __future__ import annotations

import pytest

from tests.symptoms.expression import selectors

CASES = {
    "up == 0": {"up": set()},
    'a{b="c", d!~"e{f}"} > on (x) group_left (y) b:c:d': {"a": {"b", "d"}, "b:c:d": set()},
    'sum by (x, y) (rate(a_total{z=~"1|2"}[5m:1m] offset 1h)) / 2e9 > bool Inf': {"a_total": {"z"}},
    "sum(a) by (x) unless ignoring(x) b and c or d # not e": {
        "a": set(),
        "b": set(),
        "c": set(),
        "d": set(),
    },
    'label_replace(a, "x", "$1", "y", "(.*)") + quantile without (z) (0.5, b)': {
        "a": set(),
        "b": set(),
    },
    "vector(1) + scalar(x:y) * time()": {"x:y": set()},
    'count({__name__=~"a:.+"}) < 3': {},
    "absent(a{}) or b @ end()": {"a": set(), "b": set()},
}


@pytest.mark.parametrize("text", CASES)
def test_names_and_labels(text: str) -> None:
    """Metrics and the labels that select them are found.

    Functions, keywords, numbers, label lists and strings are not.
    """
    assert {found.metric: set(found.labels) for found in selectors(text)} == CASES[text]
