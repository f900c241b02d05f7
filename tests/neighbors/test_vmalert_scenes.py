"""The scenes of tests/symptoms on vmalert and VictoriaMetrics, played by vmalert-tool.

The tool writes what a group records before it evaluates the next one, as a ruler does between two
rounds.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.symptoms.promtool import FILES, pruned

pytestmark = pytest.mark.neighbors
EXACT = 12
"""Characters of a value from which on it shows how the last bits were rounded."""
LIMIT = 1500
"""Seconds: the tool flushes its storage after each group, in each round."""

KEEPS_ENDED = pytest.mark.xfail(
    reason="the tool keeps a recorded series whose rule has no result any more", strict=True
)
"""Stands in docs/other-scrapers.md. No sample is added, but the end is not marked, so it is shown
for VictoriaMetrics' five minutes; vmalert itself marks such a series as ended.
"""
_KEPT = {"child-failed", "rendezvous-env-mismatch"}


def converted(file: Path, directory: Path) -> Path:
    """Return a copy of a file of scenes as the tool reads it.

    Its alerts have the group as a label, which no scene expects. It plays a scene only up to the
    last of what `alert_rule_test` asks if there is any, so expressions have a scene of their own.
    """
    copy = pruned(file, directory)
    document = json.loads(copy.read_text(encoding="utf-8"))
    names, groups = [], set()
    for name in document["rule_files"]:
        content = json.loads(Path(name).read_text(encoding="utf-8"))
        content["groups"] = [group for group in content["groups"] if group["rules"]]
        if content["groups"]:
            names.append(name)
            groups |= {group["name"] for group in content["groups"]}
            Path(name).write_text(json.dumps(content), encoding="utf-8")
    order = [name for name in document["group_eval_order"] if name in groups]
    scenes = []
    for scene in document["tests"]:
        asked = [_without_group(entry) for entry in scene.pop("promql_expr_test", ())]
        if asked:
            scenes.append({**scene, "alert_rule_test": [], "metricsql_expr_test": asked})
        if scene.get("alert_rule_test"):
            scenes.append(scene)
    document |= {"rule_files": names, "group_eval_order": order, "tests": scenes}
    copy.write_text(json.dumps(document), encoding="utf-8")
    return copy


def _without_group(entry: dict[str, Any]) -> dict[str, Any]:
    """Return what is asked of an expression, without the group of an alert."""
    samples = [
        sample | {"labels": sample["labels"].removeprefix("ALERTS")}
        for sample in entry.get("exp_samples", ())
    ]
    if any(len(str(sample["value"])) > EXACT for sample in samples):
        rounded = [sample | {"value": round(sample["value"], 6)} for sample in samples]
        return entry | {"expr": f"round({entry['expr']}, 1e-6)", "exp_samples": rounded}
    if not any("alertname=" in sample["labels"] for sample in samples):
        return entry
    return entry | {
        "expr": f"max without (alertgroup) ({entry['expr']})",
        "exp_samples": samples,
    }


@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize(
    "file",
    [
        pytest.param(
            file,
            id=file.stem,
            marks=[KEEPS_ENDED] if file.stem in _KEPT else [],
        )
        for file in FILES
    ],
)
def test_scenes(file: Path, tmp_path: Path) -> None:
    """Alerts fire and clear as they do in Prometheus."""
    done = subprocess.run(
        [
            "vmalert-tool",
            "unittest",
            "--disableAlertgroupLabel",
            "--files",
            converted(file, tmp_path),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
        env={**os.environ, "GOMAXPROCS": "1"},
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-20_000:]
