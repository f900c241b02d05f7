"""What `dshealthd doctor` examines: environments, other nodes, and what these are told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dshealthd.config import config
from dshealthd.doctor import command
from dshealthd.doctor.choice import choose_checks

PEER = {"listen_address": "127.0.0.1:10062", "key_file": "/key"}
PROBED = {"probe": {"members": {"nodes": ["n1", "n2"]}, "peer": PEER}}


def of(words: list[str]) -> list[str]:
    """Return what other nodes are told of a command line."""
    options = command.parser().parse_args(words)
    return command._passed_on(options, choose_checks(options, config.load(None)))


@pytest.mark.parametrize(("words", "passed"), [
    ([], []),
    (["--config.file", "/c.toml", "--no-agent"], ["--config.file", "/c.toml", "--no-agent"]),
    (["--only", "host-name", "--skip", "pcie-acs"],
     ["--only", "host-name", "--skip", "pcie-acs"]),
    (["--only", "host-name", "--skip", "launcher"], ["--only", "host-name", "--skip", "launcher"]),
    (["--job", "--only", "launcher,host-name", "--path", "/a/../b"],
     ["--only", "host-name,path /b", "--path", "/b"]),
    (["--python", "/env/bin/python"], ["--python", "/env/bin/python"]),
])  # fmt: skip
def test_what_other_nodes_are_told(words: list[str], passed: list[str]) -> None:
    """Nothing of the job, which is checked from here; paths as they are from everywhere."""
    assert of(words) == passed


@pytest.mark.parametrize(("words", "slurm", "tables", "several"), [
    ([], "", {}, False),
    ([], "1", {}, False),
    ([], "2", {}, True),
    ([], "x", {}, False),
    (["--across"], "", {}, True),
    ([], "", PROBED, True),
])  # fmt: skip
def test_whether_jobs_run_across_nodes(
    words: list[str],
    slurm: str,
    tables: dict[str, dict[str, object]],
    monkeypatch: pytest.MonkeyPatch,
    *,
    several: bool,
) -> None:
    """By Slurm, by who asks, or as the nodes are probed."""
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", slurm)
    options = command.parser().parse_args(words)
    assert command._several(options, config.load(None, tables)) is several


@pytest.mark.parametrize(("user", "active"), [(0, ()), (1000, ("/venv", "/conda"))])
def test_which_environments_are_examined(
    user: int, active: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Given, configured, of the probes, each once; root ignores what belongs to a user."""
    file = tmp_path / "c.toml"
    file.write_text(
        "[collectors.software]\nenvironments = ['/opt/a', '/opt/b']\n[probe]\npython = '/opt/p'\n"
    )
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setenv("VIRTUAL_ENV", "/venv")
    monkeypatch.setenv("CONDA_PREFIX", "/conda")
    options = command.parser().parse_args(["--python", "/opt/x/../b"])
    found = command._training_environments(options, config.load(file))
    assert found == ("/opt/b", "/opt/a", "/opt/p", *active)
