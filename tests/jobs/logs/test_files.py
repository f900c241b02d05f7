"""How many directories and files a pattern may reach."""

from __future__ import annotations

from typing import cast

import pytest

from dshealthd.jobs.logs.files import expand_pattern
from dshealthd.linux.process_root import Root


class Wide:
    """A file system with so many entries in each directory."""

    def __init__(self, entries: int) -> None:
        self.entries = [str(number) for number in range(entries)]
        self.listed = 0

    def names(self, _place: str) -> list[str]:
        """Return the names in a directory."""
        self.listed += 1
        return self.entries


@pytest.mark.parametrize(
    ("entries", "listed", "found"), [(32, 1 + 32, 1024), (33, 1 + 33, 1024), (257, 1 + 256, 1024)]
)
def test_what_a_pattern_reaches(entries: int, listed: int, found: int) -> None:
    """Of each wildcard 256 directories are listed, and 1,024 matches count."""
    root = Wide(entries)
    assert len(list(expand_pattern(cast("Root", root), "/jobs/*/*"))) == found
    assert root.listed == listed
