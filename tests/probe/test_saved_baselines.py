"""When baselines count as saved: a disk that fails or hangs is told, and written to again."""

from __future__ import annotations

import errno
import logging
import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from dshealthd.core.state_writer import LatestWriter
from dshealthd.probe import service
from dshealthd.probe.options import BaselineOptions
from dshealthd.probe.service import ProbeService
from dshealthd.probe.verdicts.baseline import Baselines, TimingClass


@pytest.mark.parametrize(
    ("disk", "said"),
    [("well", ""), ("full", "No space left"), ("hung", "the disk hangs")],
)
async def test_what_is_told_of_a_write(
    disk: str, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of one that succeeded; what was not written is still to be saved."""
    going_on = threading.Event()
    written: list[bytes] = []

    def write(content: bytes) -> None:
        if disk == "hung":
            going_on.wait(60.0)
        if disk == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "baselines")
        written.append(content)

    monkeypatch.setattr(service, "SAVE_DEADLINE", 0.1 if disk == "hung" else 60.0)
    baselines = Baselines(BaselineOptions())
    holder: Any = SimpleNamespace(_writer=LatestWriter(write, "baselines of a test"))
    with caplog.at_level(logging.WARNING):
        await ProbeService._save(holder, baselines)
        assert written == [], "nothing has changed"
        timing = TimingClass("rail", "nccl", "all_reduce", 1, "0", far=False)
        baselines.update(timing, 1.0, 0.0)
        await ProbeService._save(holder, baselines)
    assert (said in caplog.text) if said else not caplog.text
    assert baselines.changed is bool(said)
    assert bool(written) is (disk == "well")
    going_on.set()


@pytest.mark.parametrize(("error", "said"), [
    (ValueError("no baselines"), "no baselines"),
    (OverflowError("too large"), "too large"),
    (PermissionError("not for you"), "not for you"),
    (TimeoutError(), "no answer within 60 s"),
])  # fmt: skip
async def test_baselines_that_cannot_be_read(
    error: Exception, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They start from scratch, which is said with the reason; without a file there are none."""

    def load(file: str) -> None:
        files.append(file)
        raise error

    files: list[str] = []
    baselines: Any = SimpleNamespace(load=load)
    for file in (None, "/state/baselines"):
        holder: Any = SimpleNamespace(_file=file)
        await ProbeService._load(holder, baselines)
    assert files == ["/state/baselines"]
    assert caplog.messages == [f"probe: baselines start from scratch: {said}"]
