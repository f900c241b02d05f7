"""The page that a worker and the agent share."""

from __future__ import annotations

import os
import time

import pytest

from dshealthd.collection.progress_page import ProgressPage


def test_progress_page() -> None:
    """What a worker writes about its whereabouts is what the agent reads through its own mapping. A
    long part is cut, not refused.
    """
    writer, descriptor = ProgressPage.create()
    reader = ProgressPage(descriptor)
    os.close(descriptor)
    assert reader.read() == (0.0, "", "")
    now = time.monotonic()
    writer.write(now, "gpu", "gpu 3")
    assert reader.read() == (now, "gpu", "gpu 3")
    writer.write(now, "filesystem", "/" + "x" * 5000)
    assert reader.read()[2].startswith("/xxx")


@pytest.mark.parametrize(("step", "written"), [(1, 1), (2, 3)])
def test_a_page_that_is_being_written(step: int, written: int) -> None:
    """Neither one whose worker ended in the middle, nor one that changes meanwhile is believed."""
    page, descriptor = ProgressPage.create()
    os.close(descriptor)
    page.write(7.0, "gpu", "gpu 3")
    heads = iter([(step, 8.0, 9), (written, 8.0, 9)])

    class Head:
        """The head of the page, as the worker changes it."""

        size = ProgressPage._HEAD.size

        def unpack_from(self, _page: object) -> tuple[int, float, int]:
            """Return the next state."""
            return next(heads)

    page._HEAD = Head()  # type: ignore[assignment]
    assert page.read() == (8.0, "", "")
