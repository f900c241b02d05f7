"""Threads that cannot be started, and what is done in those that can."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dshealthd.agent.logs import LineWriter
from dshealthd.core import background
from dshealthd.core.child import StartError
from dshealthd.core.state_writer import LatestWriter
from dshealthd.jobs.heartbeats import blocking_tasks
from dshealthd.probe.peers.resolver import LookupFailed, Resolver
from dshealthd.web.auth import Authenticator
from dshealthd.web.config_file import WebConfigFile
from tests.threads import running_threads
from tests.waiting import eventually, until


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let no thread start, as at the pids limit; `undo` ends that."""

    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    return monkeypatch


@pytest.mark.usefixtures("short")
def test_a_call_without_a_thread_is_an_os_error() -> None:
    """The error names what was short, and what it was for."""
    with pytest.raises(OSError, match="thread for members cannot be started: no more processes"):
        asyncio.run(background.call(lambda: 1, "members", 1.0))


def test_repeated_calls_on_a_hung_disk_take_few_threads() -> None:
    """After the second they fail at once, for a time; calls of other names do not."""
    answers = threading.Event()

    async def run() -> None:
        for _ in range(20):
            with pytest.raises(TimeoutError):
                await background.call(lambda: answers.wait(60.0), "test members", 0.2)
        assert running_threads("test members") < 6
        assert await background.call(lambda: 1, "test key", 60.0) == 1
        answers.set()
        await eventually(lambda: not running_threads("test members"))
        assert await background.call(lambda: 2, "test members", 60.0) == 2

    try:
        asyncio.run(run())
    finally:
        answers.set()


def test_pauses_double_up_to_the_longest() -> None:
    """However long a disk hangs: two thousand calls are six weeks of it."""
    hung, pauses = background._Hung(), []
    for _ in range(2000):
        hung.add(10.0)
        pauses.append(hung.pause)
    assert pauses[:4] == [0.0, 10.0, 30.0, 70.0]
    assert pauses[-1] == 1800.0


def test_call_that_hangs_for_ever_is_not_the_last_of_its_name() -> None:
    """A disk that was replaced answers new calls: they are tried, in spite of the old ones."""
    answers = threading.Event()

    async def run() -> None:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await background.call(lambda: answers.wait(60.0), "test disk", 0.2)
        async with asyncio.timeout(60.0):
            while True:
                with contextlib.suppress(TimeoutError):
                    assert await background.call(lambda: 1, "test disk", 60.0) == 1
                    break
                await asyncio.sleep(0.01)
        assert running_threads("test disk") >= 2  # they hang still

    try:
        asyncio.run(run())
    finally:
        answers.set()


def test_a_call_that_fails_unexpectedly_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An exception that the caller does not expect ends the call."""
    printed = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: printed.set())

    async def run() -> int:
        return await background.call(lambda: int("x"), "members", 20.0, OSError)

    with pytest.raises(RuntimeError, match="members: the thread ended"):
        asyncio.run(run())
    assert printed.wait(60.0)


def test_a_write_without_a_thread_is_an_error_until_one_succeeds(short: pytest.MonkeyPatch) -> None:
    """The writer stays usable."""
    written: list[bytes] = []
    writer = LatestWriter(written.append, "test")
    with pytest.raises(StartError):
        writer.put(b"1")
    assert isinstance(writer.error, StartError)
    short.undo()
    writer.put(b"2")
    until(lambda: not writer.busy)
    assert written == [b"2"]
    assert not isinstance(writer.error, StartError)


@pytest.mark.usefixtures("short")
def test_a_log_line_without_a_thread_is_counted() -> None:
    """It is dropped, and nothing is raised."""
    writer = LineWriter(2)
    writer.put("x")
    assert writer.dropped == 1


def test_log_lines_that_wait_are_bounded() -> None:
    """A thousand, while standard error takes none."""
    writer = LineWriter(2)
    writer._started = True  # by a thread that hangs
    for number in range(1001):
        writer.put(f"{number}")
    assert writer.dropped == 1


@pytest.mark.usefixtures("short")
def test_a_name_without_a_thread_is_no_verdict_on_it() -> None:
    """A look-up that cannot begin ends as one that fails: nothing is known of the name."""
    with pytest.raises(LookupFailed) as caught:
        asyncio.run(Resolver(lambda *_, **__: []).addresses("node7"))
    assert caught.type is LookupFailed  # not UnknownName


@pytest.mark.usefixtures("short")
def test_a_login_without_a_thread_is_refused_for_now() -> None:
    """The client is told to try again; it is neither let in nor remembered as wrong."""
    users = {"alice": "$2b$04$" + "a" * 53}
    answer = asyncio.run(Authenticator().refusal(users, "Basic YWxpY2U6eA==", "192.0.2.1"))
    assert answer == 503


def test_a_web_config_file_without_a_thread_stays_in_force(
    short: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is looked at again once there are threads."""
    place = tmp_path / "web.yml"
    place.write_text("{}")
    now = [0.0]
    file = WebConfigFile(place, lambda: now[0])
    place.write_text("http_server_config: {headers: {X-Frame-Options: deny}}")

    async def look() -> dict[str, str]:
        now[0] += 2.0
        return dict((await file.current()).headers)

    assert asyncio.run(look()) == {}
    short.undo()
    assert asyncio.run(look()) == {"X-Frame-Options": "deny"}


def hasty(waits: list[float]) -> Any:
    """Return the running loop, but what is called after some seconds comes soon; note these."""
    loop = asyncio.get_running_loop()

    def call_later(seconds: float, call: Callable[[], object]) -> asyncio.TimerHandle:
        waits.append(seconds)
        return loop.call_later(0.01, call)

    return SimpleNamespace(
        call_later=call_later,
        call_soon_threadsafe=loop.call_soon_threadsafe,
        is_closed=loop.is_closed,
    )


async def test_senders_wait_for_threads(short: pytest.MonkeyPatch) -> None:
    """What a sender needs is done within a second once threads can be started again."""
    done: list[int] = []
    waits: list[float] = []
    tasks = blocking_tasks.BlockingTasks(hasty(waits))
    for number in range(20):
        tasks.run(number, 1, functools.partial(int, number), done.append)
    await eventually(lambda: len(waits) == 3)
    assert done == []
    short.undo()
    await eventually(lambda: len(done) == 20)
    assert sorted(done) == list(range(20))
    assert {*waits} == {1.0}


async def test_senders_that_are_let_go_without_a_thread(short: pytest.MonkeyPatch) -> None:
    """What waits when the reader is closed is not done any more."""
    done: list[str] = []
    tasks = blocking_tasks.BlockingTasks(hasty([]))
    tasks.run(1, 1, lambda: "before", done.append)
    tasks.close()
    short.undo()
    tasks.run(2, 1, lambda: "after", done.append)
    await eventually(lambda: "after" in done)
    assert done == ["after"]
