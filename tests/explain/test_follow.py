"""Logs that are still being written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from dshealthd.explain.follow import Follower, follow

if TYPE_CHECKING:
    from pathlib import Path

OOM = "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3\n"


def test_the_verdict_follows_what_is_appended(tmp_path: Path) -> None:
    """Nothing, then a victim's time-out, then the cause; files that appear later count too."""
    (tmp_path / "rank0.log").write_text("step 1 | loss 2.0\n")

    turn = 0

    def write(_seconds: float) -> None:
        nonlocal turn
        turn += 1
        if turn == 1:
            with (tmp_path / "rank0.log").open("a") as file:
                file.write("[rank0]: RuntimeError: [pair.cc:553] Connection closed by peer "
                           "[10.0.0.1]:3\n")  # fmt: skip
        elif turn == 2:
            (tmp_path / "rank3.log").write_text(OOM[:40])
        elif turn == 3:
            with (tmp_path / "rank3.log").open("a") as file:
                file.write(OOM[40:])
        assert turn < 20

    seen = []
    for finding, _ in follow([str(tmp_path)], year=2026, sleep=write):
        seen.append((finding.slug, finding.ranks))
        if finding.slug == "cuda-oom":
            break
    assert seen[0] == ("", ())
    assert seen[1][0] == "nccl-remote-error"
    assert seen[-1] == ("cuda-oom", (3,))


def test_a_log_that_is_replaced_is_read_from_its_start(tmp_path: Path) -> None:
    """Rotation by name and by truncation."""
    path = tmp_path / "job.out"
    path.write_text("step 1\n" * 100)
    follower = Follower([str(path)])
    assert follower.poll()
    assert not follower.poll()
    path.rename(tmp_path / "job.out.1")
    path.write_text(OOM)
    assert follower.poll()
    assert [event.place.line for event in follower.recognizer.found.events] == [1]


@pytest.mark.timeout(20)
def test_what_is_no_file_is_not_followed(tmp_path: Path) -> None:
    """A FIFO that a user has put among the logs does not block root, and a device is not opened."""
    names = [str(tmp_path / name) for name in ("fifo", "device", "log")]
    os.mkfifo(names[0])
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "log").write_text(OOM)
    follower = Follower(names)
    assert follower.poll()
    assert [event.place.file for event in follower.recognizer.found.events] == [names[2]]
    os.replace(names[0], names[2])
    assert not follower.poll()


def heed_ctrl_c() -> None:
    """Have a child end at SIGINT, though the tests may run where it is ignored, as in background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_the_command_answers_within_two_seconds(tmp_path: Path) -> None:
    """The time from the line that tells the cause to the answer, as a whole program."""
    path = tmp_path / "job.out"
    path.write_text("step 1\n")
    command = [sys.executable, "-m", "dshealthd", "explain", "--follow", "--json", str(path)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=heed_ctrl_c,  # noqa: PLW1509 - only a system call
    ) as process:
        assert process.stdout is not None
        first: dict[str, Any] = json.loads(process.stdout.readline())
        assert first["outcome"] == "nothing"
        start = time.monotonic()
        with path.open("a") as file:
            file.write(OOM)
        second: dict[str, Any] = json.loads(process.stdout.readline())
        waited = time.monotonic() - start
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 1
    assert second["slug"] == "cuda-oom"
    assert waited < 20, "0.5 s on a machine with nothing else to do; the bench has the figure"
    print(f"{waited:.2f} s")
