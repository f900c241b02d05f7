"""Files that somebody names to a command: a FIFO in the place of any hangs none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFIGURATIONS = {
    "hostfile": '[probe.members]\nhostfile = "PIPE"\n',
    "topology": '[probe.members]\nnodes = ["a", "b"]\ntopology = "PIPE"\n',
}
WEB = {
    "certificate": "tls_server_config:\n  cert_file: PIPE\n  key_file: PIPE\n",
    "client authorities": (
        "tls_server_config:\n  cert_file: PIPE\n  key_file: PIPE\n  client_ca_file: PIPE\n"
        "  client_auth_type: RequireAndVerifyClientCert\n"
    ),
}
COMMANDS = {
    "configuration": ("check-config", "--config.file", "PIPE"),
    "configuration of the agent": ("run", "--config.file", "PIPE"),
    "authorities": ("status", "127.0.0.1", "--tls", "--ca-file", "PIPE"),
    "password": ("status", "127.0.0.1", "--user", "a", "--password-file", "PIPE"),
    "log": ("explain", "PIPE"),
    "log of a healthy run": ("explain", "--healthy", "PIPE", "LOG"),
    "hostfile": ("targets", "--hostfile", "PIPE"),
    "web configuration": ("check-config", "--web.config-file", "PIPE"),
    "keys": ("keys", "show", "--key-file", "PIPE"),
    "script": ("doctor", "--no-agent", "--job", "PIPE"),
    "DeepSpeed": ("doctor", "--no-agent", "--job", "--deepspeed-config", "PIPE"),
    "hostfile of a job": ("doctor", "--no-agent", "--job", "--hostfile", "PIPE"),
    "checkpoint": ("doctor", "--no-agent", "--job", "--checkpoint", "PIPE"),
    "interpreter": ("doctor", "--no-agent", "--job", "--python", "PIPE"),
}


def run(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command; it fails if it does not end."""
    words = tuple(word.replace("PIPE", str(place / "pipe")) for word in words)
    return subprocess.run(
        [sys.executable, "-m", "dshealthd", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
        cwd=place,
    )


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a pipe that nobody writes to, and a log."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "LOG").write_text("step 1\n")
    return tmp_path


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_arguments(words: tuple[str, ...], place: Path) -> None:
    """The command ends, not well, and says which file it is."""
    done = run(place, *words)
    assert done.returncode != 0
    assert "pipe" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("text", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_configurations(text: str, place: Path) -> None:
    """So does one whose configuration names it."""
    (place / "c.toml").write_text(text.replace("PIPE", str(place / "pipe")))
    done = run(place, "targets", "--config.file", "c.toml")
    assert done.returncode != 0
    assert "pipe" in done.stderr


@pytest.mark.parametrize("text", WEB.values(), ids=WEB)
def test_web_configurations(text: str, place: Path) -> None:
    """And one whose web configuration does."""
    (place / "web.yml").write_text(text.replace("PIPE", str(place / "pipe")))
    done = run(place, "check-config", "--web.config-file", "web.yml")
    assert done.returncode != 0
    assert "pipe" in done.stderr
