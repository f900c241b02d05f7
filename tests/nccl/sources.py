"""NCCL's sources, by release: where they come from, and that they are what they should be.

An archive is taken only if its SHA-256 is one of those below, and a clone only at the commit of
the tag (a commit's name is a hash of all that is in it). Nothing of NCCL is in this repository.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import NamedTuple

UPSTREAM = "https://github.com/NVIDIA/nccl"
FOLDER = "DSHEALTHD_NCCL_SOURCES"
"""Environment variable: a folder with `nccl-TAG.tar.xz` or a git clone; unset fetches upstream."""


class Release(NamedTuple):
    """One tag of NCCL."""

    version: str
    commit: str
    """Of the tag upstream."""
    archive: str
    """SHA-256 of `nccl-TAG.tar.xz`, the tag without documentation, examples and plug-ins."""

    @property
    def tag(self) -> str:
        """Return the tag's name upstream."""
        return f"v{self.version}-1"


RELEASES = {
    release.version: release
    for release in (
        Release(
            "2.27.7",
            "593de54e52679b51428571c13271e2ea9f91b1b1",
            "6bac5ea39ca1a1d049a457d4585335f1b3dfb01c3fdd679cd4c1ff93449b54aa",
        ),
        Release(
            "2.28.9",
            "dbc86fd06e8b0c4517b95d8958a09ccacf9520c9",
            "dc9cea0e62d1531b81eb996c9f4b9de6a3d33e7aa050cfe15a9b289f16236f6b",
        ),
        Release(
            "2.30.7",
            "73cf112295c33aee2b895f329f592f2a9b4b0f97",
            "188428c1a76c7d48fe074f32a038362de6ec47eed8bd8066286d6c6b5a113e7a",
        ),
    )
}


class NoSource(Exception):
    """The sources of a release are not to be had; the message says why."""


def unpack(release: Release, place: Path) -> Path:
    """Put the sources of a release under `place` and return their root. Raises NoSource."""
    root = place / release.tag
    if (root / "src").is_dir():
        return root
    scratch = place / f"{release.tag}.part"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    folder = os.environ.get(FOLDER)
    if folder and (archive := Path(folder) / f"nccl-{release.tag}.tar.xz").is_file():
        _extract(archive, release.archive, scratch)
    else:
        _clone(folder or UPSTREAM, release.commit, scratch)
    made = scratch if (scratch / "src").is_dir() else next(scratch.glob("*/src")).parent
    made.rename(root)
    shutil.rmtree(scratch, ignore_errors=True)
    return root


def _extract(archive: Path, digest: str, place: Path) -> None:
    data = archive.read_bytes()
    if (found := hashlib.sha256(data).hexdigest()) != digest:
        message = f"{archive} has the SHA-256 {found}, and should have {digest}"
        raise NoSource(message)
    with tarfile.open(archive) as opened:
        opened.extractall(place, filter="data")


def _clone(upstream: str, commit: str, place: Path) -> None:
    git = ("git", "-C", str(place), "-c", "init.defaultBranch=main", "-c", "advice.detachedHead=0")
    for arguments in (
        ("init", "-q"),
        ("fetch", "-q", "--depth", "1", upstream, commit),
        ("checkout", "-q", "FETCH_HEAD"),
    ):
        done = subprocess.run([*git, *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            message = (
                f"{FOLDER} names no folder with the sources, and {upstream} could not be fetched: "
                f"{done.stderr.strip()[-300:]}"
            )
            raise NoSource(message)
    shutil.rmtree(place / ".git")
