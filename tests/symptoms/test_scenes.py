"""What the alerts do in the scenes of tests/symptoms/*.yml, played by promtool."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.findings.player import seconds
from tests.symptoms.promtool import FILES, promtool, pruned


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_scenes(file: Path, tmp_path: Path) -> None:
    """Alerts fire on the faults, not on the near misses, and clear afterwards."""
    promtool("test", "rules", pruned(file, tmp_path))


WITH_MATCHES = (
    "bad-link-members",
    "many-nodes",
    "node-drift-job",
    "straggler-job",
    "struck",
    "training-hang-job",
)
"""Scenes of the rules that match series with others."""


@pytest.mark.parametrize("name", WITH_MATCHES)
def test_no_rule_fails_where_series_come_twice(name: str, tmp_path: Path) -> None:
    """Two replicas in one view, or a target of which a label changes, are two series of each: that
    counts twice what is counted, but a rule that fails is silent.
    """
    file = pruned(next(file for file in FILES if file.stem == name), tmp_path)
    document = json.loads(file.read_text(encoding="utf-8"))
    for test in document["tests"]:
        asked = test.pop("alert_rule_test", []) + test["promql_expr_test"]
        last = max((entry["eval_time"] for entry in asked), key=seconds)
        well = {"expr": "vector(1)", "exp_samples": [{"labels": "{}", "value": 1}]}
        test["promql_expr_test"] = [well | {"eval_time": last}]
        test["input_series"] += [
            row | {"series": row["series"][:-1] + ', replica="b"}'}
            for row in test["input_series"]
            if row["series"].startswith(("dshealthd_", "up{"))
        ]
    file.write_text(json.dumps(document), encoding="utf-8")
    promtool("test", "rules", file)
