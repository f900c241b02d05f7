"""The commands, as a user types them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from dshealthd import __version__, cli

if TYPE_CHECKING:
    from pathlib import Path


def dshealthd(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "dshealthd", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """`--version` prints the package's version."""
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"dshealthd {__version__}\n"


def test_check_config(tmp_path: Path) -> None:
    """`check-config` says ok and 0, or lists what is wrong and gives 2."""
    file = tmp_path / "c.toml"
    file.write_text("[log]\nlevel = 'debug'\n", encoding="utf-8")
    good = dshealthd("check-config", "--config.file", str(file))
    assert (good.returncode, good.stderr) == (0, "")
    assert re.fullmatch(rf"{file}: ok, (\d+) of \1 collectors enabled\n", good.stdout)
    file.write_text("[log]\nlevel = 1\n[wbe]\n", encoding="utf-8")
    bad = dshealthd("check-config", "--config.file", str(file))
    assert bad.returncode == 2
    assert len(bad.stderr.splitlines()) == 2


def test_bad_flag_is_named() -> None:
    """A flag's value is checked like the file's key of the same name."""
    bad = dshealthd("check-config", "--web.max-connections", "many")
    assert bad.returncode == 2
    assert (
        bad.stderr == "command line: web.max_connections: must be an integer, not a string (many)\n"
    )


def test_metrics_of_this_machine_are_sound(tmp_path: Path) -> None:
    """`metrics` prints one scrape of this machine, with which promtool finds no fault, and no
    series has a pid.
    """
    promtool = shutil.which("promtool")
    assert promtool, "promtool comes with Debian's prometheus; ./dev test installs it"
    done = dshealthd("metrics", "--path.state", str(tmp_path))
    assert done.returncode == 0
    assert 'dshealthd_collector_up{collector="memory"} 1.0' in done.stdout
    assert "pid=" not in done.stdout
    check = subprocess.run(
        [promtool, "check", "metrics"],
        input=done.stdout,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert (check.returncode, check.stdout, check.stderr) == (0, "", "")
