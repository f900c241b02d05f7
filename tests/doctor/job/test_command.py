"""`dshealthd doctor --job`, from its command line to its exit status."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import TYPE_CHECKING

from dshealthd.cli.main import main
from dshealthd.doctor import node
from dshealthd.doctor.job.checks import CHECKS

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong batch is critical: status 2, with the slug, the key and a remedy in the document."""
    config, hostfile = tmp_path / "ds_config.json", tmp_path / "hostfile"
    config.write_text('{"train_batch_size": 12, "train_micro_batch_size_per_gpu": 4}')
    hostfile.write_text("127.0.0.1 slots=8\n")
    arguments = ["doctor", "--job", "--json", "--only", "batch-sizes,hostfile"]
    named = ["--deepspeed-config", str(config), "--hostfile", str(hostfile)]
    assert main([*arguments, *named]) == 2
    output = capsys.readouterr().out
    document = json.loads(output)
    assert "batch-arithmetic" in output
    assert "train_batch_size 12 is not a multiple" in json.dumps(document)
    config.write_text('{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}')
    assert main([*arguments, *named]) == 0


def test_names_and_symptoms() -> None:
    """Names are unique among all checks and in kebab case; each symptom has a runbook."""
    names = [check.name for check in CHECKS] + [check.name for check in node.CHECKS]
    assert len(set(names)) == len(names)
    symptoms = files("dshealthd") / "symptoms"
    for check in CHECKS:
        assert re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", check.name)
        assert (symptoms / f"{check.slug}.md").is_file(), check.slug


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    """All checks of a job are listed beside those of the node."""
    assert main(["doctor", "--list"]) == 0
    output = capsys.readouterr().out
    assert all(check.name in output for check in CHECKS)
