"""Writes of a state file in the background, while its disk may hang."""

from __future__ import annotations

import threading

from dshealthd.core.state_writer import LatestWriter, wait_until_written
from tests.threads import running_threads
from tests.waiting import eventually


async def test_one_write_runs_and_the_newest_waits() -> None:
    """What a disk that hangs has not taken is replaced by what is newer; no second thread waits
    for it.
    """
    disk, begun, written = threading.Event(), threading.Event(), []

    def write(content: bytes) -> None:
        begun.set()
        disk.wait(60.0)
        written.append(content)

    writer = LatestWriter(write, "test")
    assert (writer.busy, writer.hung_for()) == (False, 0.0)
    writer.put(b"1")
    assert begun.wait(60.0)
    for content in (b"2", b"3"):
        writer.put(content)
    assert running_threads("state of test") == 1
    assert await wait_until_written(0.05) == ["test"]
    assert writer.hung_for() > 0.0
    disk.set()
    await eventually(lambda: not writer.busy)
    assert await wait_until_written(60.0) == []
    assert (written, writer.written, writer.hung_for()) == ([b"1", b"3"], 2, 0.0)
    writer.put(b"4")
    await eventually(lambda: not writer.busy)
    assert written[-1] == b"4"
