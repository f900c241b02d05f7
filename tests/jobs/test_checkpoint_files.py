"""How much of a checkpoint is looked at."""

from __future__ import annotations

import stat
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from dshealthd.jobs import checkpoint_files
from dshealthd.jobs.checkpoint_files import Checkpoint, Scan, check_tag

MODEL, EXPERT = "mp_rank_00_model_states.pt", "layer_0_expert_0_mp_rank_00_model_states.pt"
SHARD = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
PARTITION = "zero_pp_rank_0_mp_rank_00_model_states.pt"


def root(files: int) -> Any:
    """Return a file system whose every directory has so many files."""
    names = [f"{number}.pt" for number in range(files)]
    mode = {True: stat.S_IFDIR, False: stat.S_IFREG}
    return SimpleNamespace(
        names=lambda _place, most: names[:most],
        stat=lambda place: SimpleNamespace(st_mode=mode[place.endswith("/tag")], st_size=1),
    )


@pytest.mark.parametrize(("files", "read"), [(20_000, True), (20_001, False)])
def test_so_many_files_of_a_tag(files: int, *, read: bool) -> None:
    """More are no checkpoint."""
    with nullcontext() if read else pytest.raises(ValueError, match="more than 20000 files"):
        assert len(Scan(root(files), "/saved", "tag").todo) == files


def test_so_many_files_are_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the rest the size alone counts."""
    opened: list[str] = []

    def is_truncated(_root: object, place: str) -> bool:
        opened.append(place)
        return False

    monkeypatch.setattr(checkpoint_files, "is_truncated", is_truncated)
    scan = Scan(root(2050), "/saved", "tag")
    while scan.todo:
        scan.check(root(2050))
    assert (len(opened), len(scan.files)) == (2048, 2050)
    assert opened == sorted(opened)


@pytest.mark.parametrize(("names", "stage"), [
    ((SHARD, PARTITION), 3),
    ((SHARD, MODEL), 1),
    ((MODEL,), 0),
    ((MODEL, EXPERT), None),
    ((), None),
])  # fmt: skip
def test_stages(names: tuple[str, ...], stage: int | None) -> None:
    """Which ranks have files, and of what, shows how ZeRO has partitioned."""
    assert Checkpoint(dict.fromkeys(names, 1)).stage == stage


@pytest.mark.parametrize(
    ("tag", "valid"), [("a" * 255, True), ("a" * 256, False), ("a/b", False), ("..", False)]
)
def test_names_of_tags(tag: str, *, valid: bool) -> None:
    """A tag is the name of a directory below the one that has its checkpoints."""
    with nullcontext() if valid else pytest.raises(ValueError, match="not a valid checkpoint"):
        check_tag(tag, "latest")
