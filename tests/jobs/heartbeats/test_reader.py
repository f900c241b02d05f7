"""The agent's end of the heartbeats.

Whose they are, and what strangers, garbage and floods can do.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import gc
import os
import resource
import statistics
import struct
import threading
import time
from binascii import crc32
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from dshealthd.core.collector import Context, SourceError
from dshealthd.core.host import Host
from dshealthd.jobs.heartbeats import reader as reader_module
from dshealthd.jobs.heartbeats.identity import Identity, UnidentifiedSender
from dshealthd.jobs.heartbeats.page import PageHolder
from dshealthd.jobs.heartbeats.reader import HeartbeatReader
from dshealthd.jobs.heartbeats.sender import Sender
from dshealthd.jobs.processes import ProcessTable
from dshealthd.training.message import PAGE, SLOT, Message, StepStage, encode
from tests.jobs.heartbeats.senders import STRANGER, own_pages, sending
from tests.jobs.machines import TORCH, started
from tests.stopwatch import Stopwatch
from tests.waiting import eventually

PERIOD = 0.5

as_root = pytest.mark.skipif(os.getuid() != 0, reason="processes of other users take root")


@contextlib.contextmanager
def reading() -> Iterator[HeartbeatReader]:
    """Run a reader in the running loop."""
    reader = HeartbeatReader(Host())
    reader.start(asyncio.get_running_loop())
    try:
        yield reader
    finally:
        reader.close()


async def until(
    reader: HeartbeatReader, condition: Callable[[], object], seconds: float = 60.0
) -> None:
    """Wait until the condition holds, for so many seconds in which this process had a CPU; tend
    the reader meanwhile, as the service does.
    """
    watch = Stopwatch(os.getpid())
    while not condition():
        assert watch.seconds() < seconds, "not in time"
        reader.refresh()
        reader.follow(own_pages())
        await asyncio.sleep(0.05)


def shown(reader: HeartbeatReader) -> dict[tuple[str, int], int]:
    """Return the step of each job and rank."""
    return {
        (who.process.job, who.process.launch.rank): sender.message.step
        for who, sender in reader.senders()
        if sender.message is not None
    }


def only(reader: HeartbeatReader) -> tuple[Identity, Sender]:
    """Return the one sender."""
    (found,) = reader.senders()
    return found


def beat(step: int, sent: float | None = None) -> Message:
    """Return a heartbeat of now."""
    return Message(step=step, sent=time.monotonic() if sent is None else sent)


async def test_sender_is_who_proc_says() -> None:
    """Job and rank come from the sender's environment, and are those that every other metric of the
    job has.
    """
    with reading() as reader:
        with sending(TORCH) as sender:
            sender.tell(beat(7))
            await until(reader, lambda: shown(reader))
            context = Context(host=Host())
            (process,) = (
                found for found in ProcessTable(context).refresh() if found.pid == sender.pid
            )
            assert shown(reader) == {(process.job, 3): 7}
            assert only(reader)[0].process == process
            sender.tell(beat(8))
            await until(reader, lambda: shown(reader)[process.job, 3] == 8)
        await until(reader, lambda: not shown(reader))


async def test_it_sleeps_without_a_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is polled before the first sender and after the last, and the next one is heard."""
    turns: list[float] = []
    turn = HeartbeatReader._turn

    def counted(self: HeartbeatReader) -> None:
        turns.append(time.monotonic())
        turn(self)

    monkeypatch.setattr(HeartbeatReader, "_turn", counted)

    async def asleep() -> bool:
        before = len(turns)
        await asyncio.sleep(2 * PERIOD)
        return len(turns) == before

    with reading() as reader:
        for step in (7, 8):
            assert await asleep()
            with sending(TORCH) as sender:
                sender.tell(beat(step))
                shows = functools.partial(lambda step: step in shown(reader).values(), step)
                await until(reader, shows)
                assert not await asleep()
            await until(reader, lambda: not len(reader))
            while reader._turns is not None:
                await asyncio.sleep(PERIOD)


async def test_sender_without_a_job() -> None:
    """A process that no launcher has started is counted, and not shown."""
    with reading() as reader, sending({"HOME": "/"}) as sender:
        sender.tell(beat(1))
        await until(reader, lambda: reader.unidentified[UnidentifiedSender.NO_LAUNCHER] == 1)
        assert shown(reader) == {}


@as_root
async def test_forgery_by_another_user() -> None:
    """Another user's process that claims a job is of another job, whatever it says."""
    with reading() as reader, sending(TORCH) as sender:
        sender.tell(beat(7))
        await until(reader, lambda: shown(reader))
        job = only(reader)[0].process.job
        time.sleep(0.05)  # processes' ages are told apart by hundredths of a second
        with sending(TORCH, user=STRANGER) as stranger:
            stranger.tell(beat(1_000_000))
            other = f"{job}-uid{STRANGER}"
            await until(reader, lambda: shown(reader) == {(job, 3): 7, (other, 3): 1_000_000})
            stranger.tell(beat(2_000_000))
            sender.tell(beat(8))
            await until(reader, lambda: shown(reader) == {(job, 3): 8, (other, 3): 2_000_000})


BAD_PAGES = {
    "size": "page(size=1 << 20)",
    "not sealed": "page(seals=0)",
    "may shrink": "page(seals=fcntl.F_SEAL_GROW)",
    "none": "",
}


@pytest.mark.parametrize("code", BAD_PAGES.values(), ids=BAD_PAGES)
async def test_what_is_no_page(code: str) -> None:
    """A process that is said to have a page, and has something else, is let go, and no descriptor
    of it kept.
    """
    with reading() as reader, sending(TORCH) as sender:
        sender.tell(beat(7))
        await until(reader, lambda: shown(reader))
        (holder,) = own_pages()
        gc.collect()  # descriptors that other tests of this process have left
        before = descriptors()
        code += "\nprint('made', flush=True)\ntime.sleep(60)"
        with sending(TORCH, code) as vandal:
            assert vandal.popen.stdout is not None
            assert vandal.popen.stdout.readline() == "made\n"
            for descriptor in (holder.descriptor, -1):
                pid, start = vandal.pid, started(vandal.pid)
                claimed = holder._replace(pid=pid, start=start, descriptor=descriptor)
                reader.follow([holder, claimed])
                assert len(reader) == 2
                await eventually(lambda: len(reader) == 1)
        assert descriptors() == before
        sender.tell(beat(8))
        await eventually(lambda: list(shown(reader).values()) == [8])


async def test_pid_that_is_reused() -> None:
    """A process that is not the one with the page is not read."""
    with reading() as reader, sending(TORCH) as sender:
        sender.tell(beat(7))
        (holder,) = own_pages()
        reader.follow([holder._replace(start=holder.start - 1)])
        assert len(reader) == 1
        await eventually(lambda: len(reader) == 0)
        assert shown(reader) == {}


async def test_page_whose_descriptor_is_not_known() -> None:
    """An agent that starts again knows its ranks, and finds their pages by itself."""
    with reading() as reader, sending(TORCH) as sender:
        sender.tell(beat(7))
        (holder,) = own_pages()
        reader.follow([PageHolder(*holder[:3])])
        await eventually(lambda: list(shown(reader).values()) == [7])
        reader.follow([holder])
        await eventually(lambda: list(shown(reader).values()) == [7])
        before = [*reader._senders.values()]
        reader.follow([PageHolder(*holder[:3])])
        assert [*reader._senders.values()] == before


AGAIN = """
for line in sys.stdin:
    if (data := bytes.fromhex(line)):
        file = page(data)
    else:
        os.close(file)
    print("told", flush=True)
"""
"""Makes a new page for each message, and closes the one before for each empty one."""


async def test_page_that_is_closed_and_made_anew() -> None:
    """A training that closes its heartbeat is not read any more, as it goes on without; one that is
    attached to again is, by its new page alone.
    """
    with reading() as reader, sending(TORCH, AGAIN) as sender:
        sender.tell(beat(7))
        await until(reader, lambda: list(shown(reader).values()) == [7])
        sender.tell(b"")
        reader.refresh()
        assert shown(reader) == {}
        sender.tell(beat(1))
        await until(reader, lambda: list(shown(reader).values()) == [1])
        (before,) = own_pages()
        sender.tell(b"")
        sender.tell(beat(2))
        (after,) = own_pages()
        assert before.descriptor == after.descriptor
        assert before.inode != after.inode
        await until(reader, lambda: list(shown(reader).values()) == [2])


async def test_process_that_ends() -> None:
    """The end of a process is seen with the next turn, after what it told last was read."""
    with reading() as reader, sending(TORCH) as sender:
        sender.tell(beat(7))
        await until(reader, lambda: shown(reader))
        found = only(reader)[1]
        sender.tell(beat(8))
        sender.end()
        await eventually(lambda: len(reader) == 0)
        assert found.message is not None
        assert found.message.step == 8


async def test_processes_that_end_before_it_is_known_whose_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While two of a user's hang, the others wait. Of those that end meanwhile nothing is kept, as
    often as that user starts new ones.
    """
    answer = threading.Event()

    def hang(*_: object) -> tuple[None, UnidentifiedSender]:
        answer.wait(100)
        return None, UnidentifiedSender.NO_LAUNCHER

    monkeypatch.setattr(reader_module, "_open", hang)
    with reading() as reader:
        try:
            with contextlib.ExitStack() as stack:
                for _ in range(3):
                    stack.enter_context(sending(TORCH)).tell(beat(1))
                reader.follow(own_pages())
                assert reader._blocking_tasks is not None
                assert len(reader._blocking_tasks._waiting) == 1
            await eventually(lambda: len(reader) == 0)
            assert not reader._blocking_tasks._waiting
        finally:
            answer.set()


async def test_before_pidfds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel has none, the end of a process is seen when the senders are checked, and not
    before it is known whose it is.
    """
    monkeypatch.setattr(os, "pidfd_open", refuse)
    with reading() as reader, sending(TORCH) as sender:
        sender.tell(beat(7))
        reader.follow(own_pages())
        reader.refresh()
        assert len(reader) == 1
        await until(reader, lambda: shown(reader))
        sender.end()
        assert len(reader) == 1
        reader.refresh()
        assert len(reader) == 0


def refuse(*_: object) -> NoReturn:
    """Fail as a system call that the kernel does not have."""
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


async def test_process_that_runs_another_program() -> None:
    """A rank whose process calls exec has no page any more, although the process goes on."""
    code = """
file = page(bytes.fromhex(sys.stdin.readline()))
print("told", flush=True)
sys.stdin.readline()
os.execv("/bin/sleep", ["sleep", "60"])
"""
    with reading() as reader, sending(TORCH, code) as sender:
        sender.tell(beat(7))
        await until(reader, lambda: shown(reader))
        assert sender.popen.stdin is not None
        sender.popen.stdin.write("\n")
        sender.popen.stdin.flush()
        command = Path(f"/proc/{sender.pid}/cmdline")  # empty until its exec has closed the page
        await eventually(lambda: command.read_bytes().startswith(b"sleep"))
        reader.refresh()
        assert len(reader) == 0


def descriptors() -> int:
    """Return how many this process has."""
    return len(os.listdir("/proc/self/fd"))


async def test_garbage_in_a_page() -> None:
    """A page that never holds a heartbeat is given up after some turns, and counted."""
    whole = encode(Message(1, 1.0))
    garbage = [
        b"",
        b"dshb",
        b"\xff" * PAGE,
        encode(Message(1, -1.0)),
        b"\0" * (SLOT // 2) + whole,
        whole[:20] + b"x" + whole[21:],
    ]
    with reading() as reader, contextlib.ExitStack() as stack:
        for data in garbage:
            stack.enter_context(sending(TORCH)).tell(data)
        reader.follow(own_pages())
        senders = [*reader._senders.values()]
        await eventually(lambda: reader.rejected == len(garbage))
        assert {sender.torn for sender in senders} == {8}
        assert len(reader) == 0


async def test_flood() -> None:
    """A sender that writes all the time is read as often as any other, and the heartbeats of others
    arrive as ever.
    """
    code = """
file = page()
memory = mmap.mmap(file, 1024)
while True:
    memory[:] = os.urandom(1024)
"""
    with (
        reading() as reader,
        sending({**TORCH, "RANK": "9"}) as sender,
        sending(TORCH, code),
    ):
        sender.tell(beat(1))
        await until(reader, lambda: shown(reader))
        lags = []
        for step in range(2, 8):
            watch = Stopwatch(os.getpid(), sender.pid)
            sender.tell(beat(step))
            shows = functools.partial(lambda step: max(shown(reader).values()) == step, step)
            await until(reader, shows, 16 * PERIOD)
            lags.append(watch.seconds())
        assert statistics.median(lags) < 2 * PERIOD
        await until(reader, lambda: reader.rejected)


async def test_without_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first processes are read, and stay, when there are too many; a place of one that is not
    among them any more is given away only when it is needed.
    """
    limit = 11  # of open files, of which a quarter is its senders'
    with contextlib.ExitStack() as stack:
        with monkeypatch.context() as patched:
            patched.setattr(resource, "getrlimit", lambda _: (limit, limit))
            reader = stack.enter_context(reading())
        for rank in range(3):
            sender = stack.enter_context(sending({**TORCH, "RANK": str(rank)}))
            sender.tell(beat(1))
        first, second, third = sorted(own_pages(), key=lambda holder: holder.start)
        reader.follow([first, second, third])
        await eventually(lambda: len(shown(reader)) == 2)
        reader.follow([first])
        assert pids(reader) == {first.pid, second.pid}
        reader.follow([third, first])
        await eventually(lambda: pids(reader) == {first.pid, third.pid})


def pids(reader: HeartbeatReader) -> set[int]:
    """Return the processes that are read."""
    return {who.process.pid for who, _ in reader.senders()}


async def test_without_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that cannot be opened is counted, and its process not shown, until it can be."""
    with reading() as reader, sending(TORCH) as sender:
        sender.tell(beat(1))
        holders = own_pages()
        with monkeypatch.context() as patched:
            patched.setattr(reader_module, "open_page", refuse)
            reader.follow(holders)
            await eventually(lambda: reader.unidentified[UnidentifiedSender.UNREADABLE] == 1)
        assert shown(reader) == {}
        await until(reader, lambda: shown(reader))


async def test_a_sender_outlasts_a_lack_of_descriptors() -> None:
    """That nothing can be looked at says nothing about a process: what is known of it stays."""
    with reading() as reader, sending(TORCH) as sender:
        sender.tell(beat(1))
        await until(reader, lambda: shown(reader))
        _, before = only(reader)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            reader.refresh()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert only(reader)[1] is before


async def test_a_training_older_than_the_agent() -> None:
    """One whose heartbeats have another layout is told as that, and looked at once: it keeps its
    layout until it ends.
    """
    body = encode(beat(1))[12:]
    older = struct.pack("<4sBxHI", b"dshb", 4, 12 + len(body), crc32(body)) + body
    with reading() as reader:
        with sending(TORCH) as sender:
            sender.tell(older)

            def told() -> bool:
                return reader.unidentified[UnidentifiedSender.OLDER_LAYOUT] == 1

            await until(reader, told)
            (before,) = reader._senders.values()
            for _ in range(3):
                reader.refresh()
                reader.follow(own_pages())
                await asyncio.sleep(PERIOD)
            assert [*reader._senders.values()] == [before]
            assert told()
            assert reader.rejected == 0
            assert shown(reader) == {}
        await eventually(lambda: not len(reader))


async def test_processes_of_another_namespace(tmp_path: Path) -> None:
    """With a procfs whose pids are not the agent's, no sender could be known; this is said."""
    (tmp_path / "self").symlink_to("1")
    with pytest.raises(SourceError, match="another pid namespace"):
        HeartbeatReader(Host(procfs=tmp_path)).start(asyncio.get_running_loop())


async def test_agent_that_stood_still() -> None:
    """What was told while nobody looked is known afterwards, with the time at which it was told."""
    with reading() as reader, sending(TORCH) as sender:
        sender.tell(beat(1))
        await until(reader, lambda: shown(reader))
        for step in range(2, 51):
            sender.tell(beat(step))
        before = time.time()
        sender.tell(beat(51))
        told = time.time()
        time.sleep(1.0)
        await until(reader, lambda: list(shown(reader).values()) == [51])
        assert before - 0.2 < only(reader)[1].heard < told + 0.2


async def test_stage_of_a_process_that_does_nothing_more() -> None:
    """How far the last step has come, and since when, is known however long ago it was told."""
    with reading() as reader, sending(TORCH) as sender:
        for stage in (StepStage.FORWARD, StepStage.BACKWARD, StepStage.INPUT):
            sender.tell(beat(5)._replace(stage=StepStage.UNKNOWN))
            await until(reader, lambda: shown(reader))
            before = time.time()
            sender.tell(beat(5)._replace(stage=stage))
            told = time.time()
            await asyncio.sleep(4 * PERIOD)
            found = only(reader)[1]
            assert found.message is not None
            assert found.message.stage == stage
            assert before - 0.2 < found.heard < told + 0.2


@pytest.mark.parametrize("offset", [-1e9, -100.0, 100.0, 1e9])
async def test_time_that_is_made_up(offset: float) -> None:
    """A sender cannot say that it sent before it could have, nor in the future."""
    with reading() as reader, sending(TORCH) as sender:
        before = time.time()
        sender.tell(beat(1))
        await until(reader, lambda: shown(reader))
        await asyncio.sleep(0.05)
        sender.tell(beat(2, max(0.0, time.monotonic() + offset)))
        await until(reader, lambda: list(shown(reader).values()) == [2])
        assert before - 0.5 < only(reader)[1].heard <= time.time()
