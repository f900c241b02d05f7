"""The page that a worker and the agent share."""

from __future__ import annotations

import os
import time

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
