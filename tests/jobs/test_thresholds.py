"""What a node judges itself, and rules judge over several nodes, begins at the same value."""

from __future__ import annotations

import pytest

from dshealthd.jobs.hangs.judge import UNEXPLAINED
from dshealthd.jobs.hangs.silence import FLOOR
from dshealthd.jobs.own_work import LOSS
from tests.symptoms.promtool import rule_groups


@pytest.mark.parametrize(("threshold", "ours", "value"), [
    ("hang_certain_seconds", FLOOR, 30.0),
    ("hang_unexplained_seconds", UNEXPLAINED, 90.0),
    ("straggler_step_ratio", LOSS, 0.04),
])  # fmt: skip
def test_thresholds_of_the_rules(threshold: str, ours: float, value: float) -> None:
    """What a page to the phone waits for is what the node waits for."""
    (held,) = (
        rule["expr"]
        for _, rule in rule_groups()
        if rule.get("record") == f"dshealthd:threshold:{threshold}"
    )
    assert (held, ours) == (f"vector({value:g})", value)
