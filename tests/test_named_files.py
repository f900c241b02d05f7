"""Files that somebody names to a command: a FIFO in the place of any hangs none."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from dshealthd.cli import main as cli

COMMANDS = {
    "configuration": ("check-config", "--config.file", "PIPE"),
    "configuration of the agent": ("run", "--config.file", "PIPE"),
    "authorities": ("status", "127.0.0.1", "--tls", "--ca-file", "PIPE"),
    "password": ("status", "127.0.0.1", "--user", "a", "--password-file", "PIPE"),
    "log": ("explain", "PIPE"),
    "log of a healthy run": ("explain", "--healthy", "PIPE", "LOG"),
    "hostfile": ("targets", "--hostfile", "PIPE"),
    "web configuration": ("check-config", "--web.config-file", "PIPE"),
    "keys": ("keys", "show", "--file", "PIPE"),
    "script": ("doctor", "--no-agent", "--job", "PIPE"),
    "DeepSpeed": ("doctor", "--no-agent", "--job", "--deepspeed-config", "PIPE"),
    "hostfile of a job": ("doctor", "--no-agent", "--job", "--hostfile", "PIPE"),
    "checkpoint": ("doctor", "--no-agent", "--job", "--checkpoint", "PIPE"),
    "interpreter": ("doctor", "--no-agent", "--job", "--python", "PIPE"),
    "hostfile of a configuration": ("targets", "--config.file", "hostfile.toml"),
    "topology of a configuration": ("targets", "--config.file", "topology.toml"),
    "certificate": ("check-config", "--web.config-file", "certificate.yml"),
    "client authorities": ("check-config", "--web.config-file", "authorities.yml"),
}
TLS = "tls_server_config:\n  cert_file: pipe\n  key_file: pipe\n"
FILES = {
    "LOG": "step 1\n",
    "hostfile.toml": '[probe.members]\nhostfile = "pipe"\n',
    "topology.toml": '[probe.members]\nnodes = ["a", "b"]\ntopology = "pipe"\n',
    "certificate.yml": TLS,
    "authorities.yml": (
        f"{TLS}  client_ca_file: pipe\n  client_auth_type: RequireAndVerifyClientCert\n"
    ),
}
"""What the commands are given beside it, some of which name it."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_pipe_for_a_file(
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The command ends, not well, and says which file it is."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # nobody writes to it
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert cli.main([word.replace("PIPE", str(pipe)) for word in words]) != 0
    said = capfd.readouterr()
    assert re.search(r"\bpipe\b", said.out + said.err)
    assert "unknown arguments" not in said.err
    assert "Traceback" not in said.err
