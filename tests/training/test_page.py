"""A heartbeat's page that is closed, or was never created."""

from __future__ import annotations

import pytest

from dshealthd.training.message import ROOM
from dshealthd.training.page import Page


@pytest.mark.parametrize("closed", [True, False])
def test_nothing_is_written_without_a_page(*, closed: bool) -> None:
    """Another thread may have closed it just now: no training ends by that."""
    page = Page()
    if closed:
        page.close()
    page.write(b"x")
    page.write_note(b"x" * 2 * ROOM)
    page.wait(1, 1)
    page.describe(1, 600)
    assert not page.is_open
