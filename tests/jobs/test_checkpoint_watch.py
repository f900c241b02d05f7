"""When a job's checkpoints are checked, and whether it makes room for the next by itself."""

from __future__ import annotations

import stat
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dshealthd.jobs import checkpoint_files
from dshealthd.jobs.checkpoint_watch import CheckpointWatch, _Pointed
from dshealthd.linux.process_root import Root
from dshealthd.training.saved import Saved


@pytest.mark.parametrize(("tag", "before", "free", "made"), [
    ("a", 1000, 1000, True),  # over the last one
    ("b", 299, 299, True),
    ("b", 300, 10, False),
    ("b", 10, 300, False),
    ("b", None, 10, False),
    ("b", 10, None, False),
])  # fmt: skip
def test_a_save_without_room(tag: str, before: int | None, free: int | None, *, made: bool) -> None:
    """One that repeats its tag, or for which there was no room before and is none after."""
    watch = CheckpointWatch()
    assert not watch._has_made_room(_Pointed("/saved", tag, 2), before)
    watch._seen, watch.free = _Pointed("/saved", "a", 1), free
    watch._sizes.extend((200, 300, 250))
    assert watch._has_made_room(_Pointed("/saved", tag, 2), before) is made


class Disk:
    """A directory with one tag, whose files all have one size."""

    def __init__(self, files: int, size: int) -> None:
        self.files, self.size, self.tag = files, size, "tag"

    def free(self, _place: str) -> int:
        """Return the bytes that are free."""
        return 1 << 30

    def read(self, _place: str, _limit: int) -> bytes:
        """Return what `latest` says."""
        return self.tag.encode()

    def names(self, _place: str, most: int) -> list[str]:
        """Return the files of the tag."""
        return [f"{number}.pt" for number in range(self.files)][:most]

    def stat(self, place: str) -> Any:
        """Return what a path is."""
        is_folder = place.endswith(f"/{self.tag}")
        mode = stat.S_IFDIR if is_folder else stat.S_IFREG
        return SimpleNamespace(st_mode=mode, st_size=self.size, st_mtime_ns=1)


def checked(
    watch: CheckpointWatch, disk: Disk, now: float, *, has_time: bool = True
) -> dict[str, int]:
    """Return the files with problems after a look."""
    saved = Saved("/saved", 1, is_node_local=True)
    watch.check(cast("Root", disk), saved, now, lambda: has_time)
    return {problem: count for problem, count in (watch.problems or {}).items() if count}


def test_when_a_broken_checkpoint_is_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """After five minutes: a network file system may show files late. A sound one is not."""
    monkeypatch.setattr(checkpoint_files, "is_truncated", lambda *_: False)
    watch, disk = CheckpointWatch(), Disk(3, 0)
    assert checked(watch, disk, 1000.0) == {"empty": 3}
    disk.files = 2
    assert checked(watch, disk, 1299.9) == {"empty": 3}
    assert checked(watch, disk, 1300.0) == {"empty": 2}
    disk.size = 100
    assert checked(watch, disk, 1600.0) == {}
    disk.size = 0
    assert checked(watch, disk, 1900.0) == {}


@pytest.mark.parametrize(("files", "looks"), [(512, 1), (513, 2)])
def test_so_many_files_a_look(files: int, looks: int) -> None:
    """Then other jobs have their turn."""
    watch, disk = CheckpointWatch(), Disk(files, 0)
    found = [checked(watch, disk, float(look)) for look in range(looks)]
    assert found == [{}] * (looks - 1) + [{"empty": files}]


def test_a_look_without_time() -> None:
    """Goes on at the next."""
    watch, disk = CheckpointWatch(), Disk(3, 0)
    assert checked(watch, disk, 1000.0, has_time=False) == {}
    assert checked(watch, disk, 1001.0) == {"empty": 3}


def test_how_large_the_next_will_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the largest of the last three."""
    monkeypatch.setattr(checkpoint_files, "is_truncated", lambda *_: False)
    watch, disk = CheckpointWatch(), Disk(1, 0)
    for number, disk.size in enumerate((400, 300, 100, 200)):
        disk.tag = f"step{number}"
        checked(watch, disk, float(number))
    assert watch.next_size == 300


def test_the_next_before_the_first_is_read() -> None:
    """No size is known then, and no room has been made."""
    watch, disk = CheckpointWatch(), Disk(3, 0)
    checked(watch, disk, 1000.0, has_time=False)
    disk.tag = "next"
    assert checked(watch, disk, 1001.0) == {"empty": 3}
    assert watch.next_size == 0
