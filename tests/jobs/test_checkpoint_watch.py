"""Which jobs make room for their next checkpoint by themselves."""

from __future__ import annotations

import pytest

from dshealthd.jobs.checkpoint_watch import CheckpointWatch, _Pointed


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
