"""Pages are found among the descriptors of a process, and nothing that only looks like one."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import pytest

from dshealthd.core.host import Host
from dshealthd.jobs.heartbeats import page
from dshealthd.jobs.heartbeats.page import find_page
from dshealthd.jobs.heartbeats.receiver import Receiver
from dshealthd.training.message import PAGE, Message, encode, newest
from dshealthd.training.page import Page
from tests.agents import running


def test_the_page_of_a_process(tmp_path: Path) -> None:
    """The page is found, read only, and what it holds is what the process writes."""
    page = Page(str(tmp_path / "nobody"))
    assert find_page(Host(), os.getpid()) is None
    page.open()
    page.write(encode(Message(7, 1.0)), 1.0)
    found = find_page(Host(), os.getpid())
    assert found is not None
    try:
        assert newest(os.pread(found, PAGE, 0)).step == 7
        assert fcntl.fcntl(found, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    finally:
        os.close(found)
        page.close()


def test_what_only_looks_like_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that can shrink, memory of another size, and a file of that name are left alone."""
    name = "memfd:dshealthd-heartbeat (deleted)"
    fifo = tmp_path / name
    os.mkfifo(fifo)  # to open it for reading would block
    with contextlib.ExitStack() as held:
        for size in (PAGE, 2 * PAGE):
            file = os.memfd_create("dshealthd-heartbeat", os.MFD_ALLOW_SEALING)
            held.callback(os.close, file)
            os.ftruncate(file, size)
            if size != PAGE:
                fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        assert find_page(Host(), os.getpid()) is None
        held.callback(os.close, os.open(fifo, os.O_RDWR))
        monkeypatch.setattr(page, "_LINK", str(fifo))
        assert find_page(Host(), os.getpid()) is None


async def test_without_descriptors_a_page_is_left_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent starts all the same, and says which process it does not hear."""

    def full(*_: object) -> NoReturn:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    receiver = Receiver(str(tmp_path / "h.sock"), Host(), monotonic=time.monotonic, wall=time.time)
    receiver.open(asyncio.get_running_loop())
    with monkeypatch.context() as patched:
        patched.setattr(socket, "socketpair", full)
        receiver.adopt(4711, 1, 0)
    assert receiver.connections == 0
    receiver.close()
    assert (
        "process 4711: no heartbeats are read until it reconnects: Too many open files"
        in caplog.text
    )


STEPS = """
import time
from dshealthd.training.heartbeat import Heartbeat
heartbeat = Heartbeat(socket="/nowhere/h.sock", warns=False)
while True:
    heartbeat.step()
    time.sleep(0.1)
"""


def test_rank_that_cannot_reach_the_socket(tmp_path: Path) -> None:
    """Its heartbeat is found all the same, as that of a pod without any directory of the host."""
    path = tmp_path / "h.sock"
    config = f'[collectors.training]\ninterval = "250ms"\nsocket = "{path}"\n'
    config += '[collectors.job_environment]\ninterval = "500ms"\n'
    environ = {**os.environ, "RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "nowhere"}
    with running(tmp_path, config) as agent:
        rank = subprocess.Popen([sys.executable, "-c", STEPS], env=environ)
        try:
            agent.wait(
                lambda scrape: any(
                    dict(labels)["rank"] == "5" and value > 1
                    for labels, value in scrape.series.get("dshealthd_job_step", {}).items()
                ),
                120.0,
            )
        finally:
            rank.kill()
            rank.wait()
        agent.wait(lambda scrape: "dshealthd_job_step" not in scrape.series)
