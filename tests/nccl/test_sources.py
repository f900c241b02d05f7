"""NCCL's sources are taken only where their hash is right; this needs none of them."""

from __future__ import annotations

import hashlib
import subprocess
import tarfile
from typing import TYPE_CHECKING

import pytest

from tests.nccl.sources import FOLDER, NoSource, Release, unpack

if TYPE_CHECKING:
    from pathlib import Path

VERSION = "2.99.1"


def tree(place: Path) -> Path:
    """Make a tree that looks like NCCL's."""
    (place / "src").mkdir(parents=True)
    (place / "src/nccl.h.in").write_text("genuine\n")
    return place


def test_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive with the right hash is unpacked; another is refused and leaves nothing."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    release = Release(VERSION, "0" * 40, "")
    archive = tmp_path / f"nccl-{release.tag}.tar.xz"
    with tarfile.open(archive, "w:xz") as made:
        made.add(tree(tmp_path / release.tag), release.tag)
    right = release._replace(archive=hashlib.sha256(archive.read_bytes()).hexdigest())
    with pytest.raises(NoSource, match="and should have"):
        unpack(release._replace(archive="1" * 64), tmp_path / "wrong")
    assert not (tmp_path / "wrong" / release.tag).exists()
    root = unpack(right, tmp_path / "out")
    assert (root / "src/nccl.h.in").read_text() == "genuine\n"


def test_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clone is taken at the commit of the tag, whatever has come since; another is not there."""
    clone = tree(tmp_path / "clone")
    git = ("git", "-C", str(clone), "-c", "user.name=a", "-c", "user.email=a@example.com")

    def run(*arguments: str) -> str:
        done = subprocess.run([*git, *arguments], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    run("init", "-q")
    run("add", ".")
    run("commit", "-q", "-m", "one")
    commit = run("rev-parse", "HEAD")
    run("tag", f"v{VERSION}-1")
    (clone / "src/nccl.h.in").write_text("later\n")
    run("commit", "-q", "-a", "-m", "two")
    monkeypatch.setenv(FOLDER, str(clone))
    root = unpack(Release(VERSION, commit, ""), tmp_path / "out")
    assert (root / "src/nccl.h.in").read_text() == "genuine\n"
    assert not (root / ".git").exists()
    with pytest.raises(NoSource, match="could not be fetched"):
        unpack(Release(VERSION, "2" * 40, ""), tmp_path / "wrong")
