"""`dshealthd keys`: key files that the peer API accepts, and a rotation that locks nobody out."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dshealthd.cli import main as cli
from dshealthd.probe.cli import keys as command
from dshealthd.probe.peers.credentials import parse_keys


def keys(action: str, file: Path) -> int:
    """Run the command."""
    return cli.main(["keys", action, "--file", str(file)])


def held(file: Path) -> tuple[bytes, ...]:
    """Return the keys of a file as the agent reads them."""
    return parse_keys(file.read_bytes())


def test_new(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A new file is 0600 whatever the umask, holds one key, and none of it is printed."""
    file = tmp_path / "probe.key"
    before = os.umask(0)
    try:
        assert keys("new", file) == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    (key,) = held(file)
    assert len(key) == 64
    assert key.decode() not in capsys.readouterr().out
    other = tmp_path / "other.key"
    keys("new", other)
    assert held(other) != (key,)


def test_which_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configured one, but for the name of a credential of the agent's unit: a file of that name
    in the working directory is no agent's.
    """
    usual = tmp_path / "usual.key"
    monkeypatch.setattr(command, "DEFAULT", usual)
    monkeypatch.chdir(tmp_path)
    for configured, made in ((str(tmp_path / "own.key"), "own.key"), ("probe.key", "usual.key")):
        file = tmp_path / "c.toml"
        file.write_text(f"[probe.peer]\nkey_file = '{configured}'\n", encoding="utf-8")
        assert cli.main(["keys", "new", "--config.file", str(file)]) == 0
        assert (tmp_path / made).exists()
    assert not (tmp_path / "probe.key").exists()


def test_new_replaces_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An existing file, or a link in its place, is not replaced."""
    file = tmp_path / "probe.key"
    keys("new", file)
    before = file.read_bytes()
    assert keys("new", file) == 1
    assert file.read_bytes() == before
    assert "File exists" in capsys.readouterr().err
    (tmp_path / "link").symlink_to(tmp_path / "target")
    assert keys("new", tmp_path / "link") == 1
    assert not (tmp_path / "target").exists()


def test_rotate(tmp_path: Path) -> None:
    """At each step, nodes with this file and nodes with the previous one accept each other. A node
    signs with its first key and accepts every key in its file.
    """
    file = tmp_path / "probe.key"
    keys("new", file)
    (old,) = held(file)
    files = [held(file)]
    for _ in range(3):
        assert keys("rotate", file) == 0
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        files.append(held(file))
    for ahead, behind in zip(files[1:], files, strict=False):
        assert ahead[0] in behind
        assert behind[0] in ahead
    assert len(files[-1]) == 1
    assert files[-1] != (old,)
    assert os.listdir(tmp_path) == ["probe.key"]


def test_rotate_goes_on_after_an_interruption(tmp_path: Path) -> None:
    """Leftovers of an interrupted rotation do not stop the next one."""
    file = tmp_path / "probe.key"
    keys("new", file)
    (tmp_path / ".probe.key.new").write_text("half")
    assert keys("rotate", file) == 0
    assert len(held(file)) == 2


def test_what_cannot_be_rotated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two keys of unknown order, a file that is too large, none, or one that others can read."""
    file = tmp_path / "probe.key"
    file.write_text("a" * 64 + "\n" + "b" * 64 + "\n")
    file.chmod(0o600)
    assert keys("rotate", file) == 1
    assert "does not say which is new" in capsys.readouterr().err
    file.write_text("a" * 5000)
    assert keys("rotate", file) == 1
    assert "is larger than 4096 bytes" in capsys.readouterr().err
    file.chmod(0o644)
    assert keys("rotate", file) == 1
    assert "it must be 0600" in capsys.readouterr().err
    assert keys("rotate", tmp_path / "none") == 1
    assert "No such file" in capsys.readouterr().err


def test_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fingerprints identify a key across nodes, and each key has its role."""
    file = tmp_path / "probe.key"
    keys("new", file)
    keys("rotate", file)
    capsys.readouterr()
    assert keys("show", file) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines[:2]] == ["signs", "accepted"]
    assert "step 1 of 3" in lines[2]
    assert not any(key.decode() in line for key in held(file) for line in lines)
