"""An archive of NCCL's sources is taken only if its hash is right; this needs none of them."""

from __future__ import annotations

import hashlib
import tarfile
from pathlib import Path

import pytest

from tests.nccl.sources import FOLDER, NoSource, Release, unpack


def test_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive with the right hash is unpacked; another is refused and leaves nothing."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    release = Release("2.99.1", "0" * 40, "")
    archive = tmp_path / f"nccl-{release.tag}.tar.xz"
    (tmp_path / release.tag / "src").mkdir(parents=True)
    (tmp_path / release.tag / "src/nccl.h.in").write_text("genuine\n")
    with tarfile.open(archive, "w:xz") as made:
        made.add(tmp_path / release.tag, release.tag)
    right = release._replace(archive=hashlib.sha256(archive.read_bytes()).hexdigest())
    with pytest.raises(NoSource, match="and should have"):
        unpack(release._replace(archive="1" * 64), tmp_path / "wrong")
    assert not (tmp_path / "wrong" / release.tag).exists()
    root = unpack(right, tmp_path / "out")
    assert (root / "src/nccl.h.in").read_text() == "genuine\n"
