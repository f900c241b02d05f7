"""Checks of a job through the command: those of what is named, beside those of the node."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dshealthd.cli import main as cli


def test_job_and_node_in_one_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is named of a job is checked with --job alone; a requested check says why not."""
    file = tmp_path / "ds_config.json"
    file.write_text(
        '{"train_batch_size": 24, "fp16": {"enabled": true}, "bf16": {"enabled": true}}'
    )
    named = ["--job", "--deepspeed-config", str(file), "--only", "config-conflicts,host-name"]
    assert cli.main(["doctor", "--json", *named]) == 2
    (node,) = json.loads(capsys.readouterr().out)["nodes"]
    found = {check["check"]: check for check in node["checks"]}
    assert set(found) == {"config-conflicts", "host-name"}
    assert found["config-conflicts"]["slug"] == "config-key"
    assert "bf16" in found["config-conflicts"]["results"][0]["text"]
    assert cli.main(["doctor", "--only", "config-conflicts"]) == 3
    assert "add --job" in capsys.readouterr().err
    assert cli.main(["doctor", "--only", "clock", "--skip", "clock"]) == 3
    assert "no check is left" in capsys.readouterr().err
    assert cli.main(["doctor", "--job", "--only", "master-port"]) == 3
    assert "no rendezvous port is given" in capsys.readouterr().out
