"""Bundles on disk: who can read them, how many are kept, when none is made."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dshealthd.evidence.bundle import (
    Bundle,
    BundleRefused,
    Kept,
    bundles_in,
    make,
    parse_name,
    size,
)

NOW = 1_795_271_340.0  # 2026-11-21 14:29:00 UTC


def new(tmp_path: Path, job: str = "slurm-7", now: float = NOW, **others: Any) -> Bundle:
    """Make a bundle with little room."""
    limits = {"max_bundles": 3, "max_bytes": 10_000, "bundle_bytes": 1000, "min_free": 0, **others}
    return make(tmp_path / "evidence", job, now, **limits)


def test_a_bundle_is_named_by_time_and_job(tmp_path: Path) -> None:
    """The name tells both again, of the job so many characters, sorts by time, and is new in each
    second.
    """
    bundle = new(tmp_path)
    assert bundle.path.name == "20261121T142900Z-slurm-7"
    assert parse_name(bundle.path.name) == Kept("20261121T142900Z-slurm-7", "slurm-7", NOW)
    assert parse_name(new(tmp_path).path.name) == Kept(
        "20261121T142900Z-slurm-7-again2", "slurm-7", NOW
    )
    new(tmp_path, "a" * 81)
    jobs = ["a" * 80, "slurm-7", "slurm-7"]
    assert [bundle.job for bundle in bundles_in(tmp_path / "evidence")] == jobs


@pytest.mark.parametrize("name", [
    "lost+found",
    "20261121T142900Z-",
    "20261121T142900Z-" + "a" * 81,
    "20269921T142900Z-a",
    "20261121T142900Z-../x",
    ".20261121T142900Z-a",
])  # fmt: skip
def test_other_names_are_no_bundles(name: str) -> None:
    """What somebody else put there is neither listed nor removed."""
    assert parse_name(name) is None


def test_none_but_the_owner_can_read(tmp_path: Path) -> None:
    """Stacks may show secrets: directories are 0700 and files 0600, whatever the umask."""
    before = os.umask(0)
    try:
        bundle = new(tmp_path)
        bundle.append("a.txt", b"1")
        bundle.summarize("2")
    finally:
        os.umask(before)
    modes = {
        place.name: stat.S_IMODE(place.stat().st_mode)
        for place in (bundle.path.parent, bundle.path, *bundle.path.iterdir())
    }
    assert modes == {
        "evidence": 0o700,
        bundle.path.name: 0o700,
        "a.txt": 0o600,
        "summary.txt": 0o600,
    }


def test_a_directory_that_others_can_read_is_refused(tmp_path: Path) -> None:
    """Where somebody opened the directory, nothing is written into it."""
    (tmp_path / "evidence").mkdir(mode=0o755)
    with pytest.raises(BundleRefused, match="is not a directory that only its owner"):
        new(tmp_path)


def test_a_link_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    """A link leads wherever somebody wants."""
    (tmp_path / "other").mkdir(mode=0o700)
    (tmp_path / "evidence").symlink_to(tmp_path / "other")
    with pytest.raises(BundleRefused):
        new(tmp_path)


def test_a_bundle_has_so_much_room_and_no_more(tmp_path: Path) -> None:
    """What goes beyond is cut, and the bundle knows; the summary always has room."""
    bundle = new(tmp_path)
    bundle.append("a.txt", b"x" * 900)
    bundle.append("b.txt", b"y" * 900)
    bundle.summarize("all of it")
    assert (bundle.path / "b.txt").stat().st_size == 100
    assert bundle.full
    assert (bundle.path / "summary.txt").read_text(encoding="utf-8") == "all of it"


@pytest.mark.parametrize("name", ["../a", "a/b", ".hidden", "", "A", "a" * 100])
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    """A file of a bundle is in the bundle."""
    with pytest.raises(ValueError, match="not a valid name for an evidence file"):
        new(tmp_path).append(name, b"")


def test_a_file_goes_where_the_bundle_is_and_not_where_its_path_leads(tmp_path: Path) -> None:
    """Somebody who puts a link in the bundle's place, or into it, gets nothing written
    elsewhere.
    """
    bundle = new(tmp_path)
    bundle.path.rename(tmp_path / "moved")
    (tmp_path / "trap").mkdir()
    bundle.path.symlink_to(tmp_path / "trap")
    bundle.append("a.txt", b"1")
    assert list((tmp_path / "trap").iterdir()) == []
    (tmp_path / "moved/b.txt").symlink_to(tmp_path / "trap/target")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        bundle.append("b.txt", b"1")


def test_the_oldest_ones_go(tmp_path: Path) -> None:
    """As many stay as are asked for, the new one among them; what is no bundle stays."""
    (tmp_path / "evidence").mkdir(mode=0o700)
    (tmp_path / "evidence/notes").mkdir()
    for number in range(5):
        new(tmp_path, f"job-{number}", NOW + number)
    assert [entry.job for entry in bundles_in(tmp_path / "evidence")] == ["job-2", "job-3", "job-4"]
    assert (tmp_path / "evidence/notes").is_dir()


def test_two_at_once_remove_the_same_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evidence by hand, beside the agent's, may be faster; its files come and go meanwhile."""
    for number in range(3):
        new(tmp_path, f"job-{number}", NOW + number).append("a.txt", b"1")
    rmtree, lstat = shutil.rmtree, os.lstat

    def removed(path: Path) -> None:
        rmtree(path)
        rmtree(path)

    def replaced(path: str, **how: Any) -> os.stat_result:
        return lstat(f"{path}.gone" if "job-2" in str(path) else path, **how)

    monkeypatch.setattr(shutil, "rmtree", removed)
    monkeypatch.setattr(os, "lstat", replaced)
    assert new(tmp_path, "job-3", NOW + 3).path.is_dir()


def test_bytes_of_all_are_bounded(tmp_path: Path) -> None:
    """Before a bundle is made there is room for all of it below the limit."""
    for number in range(3):
        new(tmp_path, f"job-{number}", NOW + number).append("a.txt", b"x" * 900)
    new(tmp_path, "job-3", NOW + 3, max_bytes=2000, max_bundles=100)
    assert [entry.job for entry in bundles_in(tmp_path / "evidence")] == ["job-2", "job-3"]
    assert size(tmp_path / "evidence") == 900


def test_a_disk_that_is_nearly_full_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No bundle is made where too little would be left, and the reason says how much there is."""
    with pytest.raises(BundleRefused, match=r"MiB are free, and \d+ MiB must be left"):
        new(tmp_path, min_free=1 << 60)
    assert bundles_in(tmp_path / "evidence") == []
    room = SimpleNamespace(f_bavail=4000, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda _: room)
    with pytest.raises(BundleRefused):
        new(tmp_path, min_free=3001)
    new(tmp_path, min_free=3000)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_root_takes_for_an_agent_becomes_the_agent_s(tmp_path: Path) -> None:
    """Evidence by hand, as root, goes to the owner of the agent's state."""
    os.chown(tmp_path, 1234, 1235)
    bundle = new(tmp_path)
    bundle.append("a.txt", b"1")
    bundle.summarize("2")
    bundle.hand_over()
    owners = {
        (place.stat().st_uid, place.stat().st_gid)
        for place in (bundle.path.parent, bundle.path, *bundle.path.iterdir())
    }
    assert owners == {(1234, 1235)}


def test_one_user_s_many_jobs_take_nobody_else_s_bundle(tmp_path: Path) -> None:
    """Room is made at the cost of who has most, by number and by bytes."""

    def add(job: str, number: int, user: int | None, **others: Any) -> None:
        limits = {"max_bundles": 4, "max_bytes": 10_000, "bundle_bytes": 1000, "min_free": 0}
        bundle = make(tmp_path / "evidence", job, NOW + number, user=user, **{**limits, **others})
        bundle.append("a.txt", b"x" * 900)

    add("victim", 0, 1000)
    add("by-hand", 1, None)
    for number in range(17):
        add(f"tiny-{number}", 2 + number, 666)
    jobs = [entry.job for entry in bundles_in(tmp_path / "evidence")]
    assert jobs == ["victim", "by-hand", "tiny-15", "tiny-16"]
    add("tiny-17", 20, 666, max_bytes=3000)
    jobs = [entry.job for entry in bundles_in(tmp_path / "evidence")]
    assert jobs == ["victim", "by-hand", "tiny-17"]
    for number in range(3):
        add(f"victim-{number}", 30 + number, 1000)
    jobs = [entry.job for entry in bundles_in(tmp_path / "evidence")]
    assert jobs == ["by-hand", "tiny-17", "victim-1", "victim-2"]
