"""Counts of consecutive checks, between the runs of one boot."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import pytest

from dshealthd.slurm.check import Busy, kept

if TYPE_CHECKING:
    from pathlib import Path


def test_kept(tmp_path: Path) -> None:
    """What one run counts the next one finds; a run that fails changes nothing."""
    place = tmp_path / "run"
    for expected in (1, 2):
        with kept(place, 0) as streaks:
            assert streaks.count_bad(["gpu-lost gpu=3"]) == expected
    with contextlib.suppress(KeyError), kept(place, 0) as streaks:
        streaks.bad = {}
        raise KeyError
    with kept(place, 0) as streaks:
        assert streaks.bad == {"gpu-lost gpu=3": 2}
        assert streaks.count_bad(["gpu-lost gpu=4"]) == 1


def test_one_at_a_time(tmp_path: Path) -> None:
    """A second check of the node does not begin."""
    with kept(tmp_path / "run", 0), pytest.raises(Busy), kept(tmp_path / "run", 0.2):
        pass


def test_garbage_begins_anew(tmp_path: Path) -> None:
    """A file of another version is no reason to fail, or to drain."""
    (tmp_path / "streaks.json").write_text('{"bad": [1]}')
    tmp_path.chmod(0o700)
    with kept(tmp_path, 0) as streaks:
        assert streaks.bad == {}


def test_directory_of_somebody_else(tmp_path: Path) -> None:
    """A directory in which others can write is not used."""
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError), kept(tmp_path, 0):
        pass
    assert os.listdir(tmp_path) == []
