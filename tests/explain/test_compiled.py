"""What `explain` keeps in the user's cache: taken only where nobody else can have written it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dshealthd.explain import compiled, finders
from dshealthd.explain.compiled import NotKept

NAME = "literals-1"


def kept(home: Path) -> Path:
    """Keep something and return its file."""
    compiled.save(NAME, b"payload", str(home))
    assert compiled.load(NAME, str(home)) == b"payload"
    return home / ".cache/dshealthd-explain" / NAME


def test_what_another_release_kept_goes(tmp_path: Path) -> None:
    """One file of half a megabyte is enough; it is nobody else's to read."""
    file = kept(tmp_path)
    compiled.save("literals-2", b"newer", str(tmp_path))
    assert [entry.name for entry in file.parent.iterdir()] == ["literals-2"]
    assert (file.parent / "literals-2").stat().st_mode & 0o077 == 0
    with pytest.raises(NotKept, match="literals-1"):
        compiled.load(NAME, str(tmp_path))


@pytest.mark.parametrize("part", [".", ".cache", ".cache/dshealthd-explain", f".cache/dshealthd-explain/{NAME}"])  # fmt: skip
def test_what_others_can_write_is_not_taken(tmp_path: Path, part: str) -> None:
    """The home, each folder, and the file itself."""
    kept(tmp_path)
    path = tmp_path / part
    path.chmod(path.stat().st_mode | 0o020)
    with pytest.raises(NotKept, match="not this user's alone"):
        compiled.load(NAME, str(tmp_path))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_what_another_user_owns_is_neither_taken_nor_written_to(tmp_path: Path) -> None:
    """As where root runs with the home of a user."""
    file = kept(tmp_path)
    os.chown(file, 4711, 4711)
    with pytest.raises(NotKept, match="not this user's alone"):
        compiled.load(NAME, str(tmp_path))
    os.chown(file.parent, 4711, 4711)
    before = list(file.parent.iterdir())
    with pytest.raises(NotKept, match="not this user's alone"):
        compiled.save("literals-3", b"x", str(tmp_path))
    assert list(file.parent.iterdir()) == before


def test_no_symbolic_link_is_followed(tmp_path: Path) -> None:
    """Neither to a folder nor to a file."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    home = tmp_path / "home"
    home.mkdir()
    (home / ".cache").symlink_to(elsewhere)
    with pytest.raises(NotKept):
        compiled.save(NAME, b"x", str(home))
    assert list(elsewhere.iterdir()) == []
    file = kept(tmp_path)
    file.rename(elsewhere / NAME)
    file.symlink_to(elsewhere / NAME)
    with pytest.raises(NotKept):
        compiled.load(NAME, str(tmp_path))


def test_a_file_that_is_not_whole_is_not_taken(tmp_path: Path) -> None:
    """Cut short, changed, empty, endless, and no file at all."""
    file = kept(tmp_path)
    whole = file.read_bytes()
    for data in (whole[:-1], whole[:-1] + b"x", b"", whole + bytes(compiled.MAX_BYTES)):
        file.write_bytes(data)
        with pytest.raises(NotKept, match="not whole"):
            compiled.load(NAME, str(tmp_path))
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(NotKept, match="not this user's alone"):
        compiled.load(NAME, str(tmp_path))


def test_without_a_home_nothing_is_kept(tmp_path: Path) -> None:
    """As of the user nobody."""
    with pytest.raises(NotKept):
        compiled.save(NAME, b"x", str(tmp_path / "nonexistent"))


def test_hyperscan_finds_the_same_with_a_kept_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made, kept and loaded again; what is broken is made anew."""
    pytest.importorskip("hyperscan")
    monkeypatch.setattr("pwd.getpwuid", lambda _: type("Entry", (), {"pw_dir": str(tmp_path)}))
    literals = ("out of memory", "abc\\x00(", "No space")
    block = b"xx out of memory abc\\x00( No space\n"
    found = finders.Hyperscan(literals)(block)
    assert len(found) == 3
    for _ in range(2):
        finders._compiled.cache_clear()
        assert finders.Hyperscan(literals, keep=True)(block) == found
    (file,) = Path(tmp_path, ".cache/dshealthd-explain").iterdir()
    compiled.save(file.name, b"no database", str(tmp_path))
    finders._compiled.cache_clear()
    assert finders.Hyperscan(literals, keep=True)(block) == found
