"""The agent's end of the heartbeats.

Whose they are, and what strangers, garbage and floods can do.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dshealthd.core.collector import Context
from dshealthd.core.host import Host
from dshealthd.jobs.heartbeats import receiver as receiver_module
from dshealthd.jobs.heartbeats.identity import Identity, UnidentifiedSender
from dshealthd.jobs.heartbeats.page import RejectReason
from dshealthd.jobs.heartbeats.receiver import Receiver
from dshealthd.jobs.heartbeats.sender import Sender
from dshealthd.jobs.processes import ProcessTable
from dshealthd.training.message import HELLO, PAGE, SLOT, Message, StepStage, encode
from tests.jobs.heartbeats.senders import STRANGER, sending
from tests.jobs.machines import TORCH
from tests.stopwatch import Stopwatch

CONNECTIONS = 32
IDLE = 900.0
MAX_CLOSING = 512
MAX_SENDERS = 256
MAX_SENDERS_PER_USER = 64
PERIOD = 0.5
TORN = 8

as_root = pytest.mark.skipif(os.getuid() != 0, reason="processes of other users take root")


@pytest.fixture
def path() -> Iterator[Path]:
    """Where the receiver listens: in a directory that every user can reach."""
    directory = Path(tempfile.mkdtemp(dir="/tmp"))
    directory.chmod(0o755)
    yield directory / "heartbeat.sock"
    shutil.rmtree(directory)


@contextlib.contextmanager
def receiving(path: Path) -> Iterator[Receiver]:
    """Run a receiver in the running loop."""
    receiver = Receiver(str(path), Host())
    receiver.open(asyncio.get_running_loop())
    try:
        yield receiver
    finally:
        receiver.close()


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until the condition holds, for so many seconds in which this process had a CPU."""
    watch = Stopwatch(os.getpid())
    while not condition():
        assert watch.seconds() < seconds, "not in time"
        await asyncio.sleep(0.01)


def shown(receiver: Receiver) -> dict[tuple[str, int], int]:
    """Return the step of each job and rank."""
    return {
        (who.process.job, who.process.launch.rank): sender.message.step
        for who, sender in receiver.senders()
        if sender.message is not None
    }


def only(receiver: Receiver) -> tuple[Identity, Sender]:
    """Return the one sender."""
    (found,) = receiver.senders()
    return found


def beat(step: int, sent: float | None = None) -> Message:
    """Return a heartbeat of now."""
    return Message(step=step, sent=time.monotonic() if sent is None else sent)


async def test_sender_is_who_proc_says(path: Path) -> None:
    """Job and rank come from the sender's environment, and are those that every other metric of the
    job has.
    """
    with receiving(path) as receiver:
        with sending(path, TORCH) as sender:
            sender.tell(beat(7))
            await until(lambda: shown(receiver))
            context = Context(host=Host(), monotonic=time.monotonic, wall=time.time)
            (process,) = (
                found for found in ProcessTable(context).refresh() if found.pid == sender.pid
            )
            assert shown(receiver) == {(process.job, 3): 7}
            assert only(receiver)[0].process == process
            sender.tell(beat(8))
            await until(lambda: shown(receiver)[process.job, 3] == 8)
        await until(lambda: not shown(receiver))


async def test_it_sleeps_without_a_sender(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is polled before the first sender and after the last, and the next one is heard."""
    turns: list[float] = []
    turn = Receiver._turn

    def counted(self: Receiver) -> None:
        turns.append(time.monotonic())
        turn(self)

    monkeypatch.setattr(Receiver, "_turn", counted)

    async def asleep() -> bool:
        before = len(turns)
        await asyncio.sleep(2 * PERIOD)
        return len(turns) == before

    with receiving(path) as receiver:
        for step in (7, 8):
            assert await asleep()
            with sending(path, TORCH) as sender:
                sender.tell(beat(step))
                await until(lambda step=step: step in shown(receiver).values())  # type: ignore[misc]
                assert not await asleep()
            await until(lambda: not receiver.connections)
            while receiver._timer is not None:  # until what it left is closed
                await asyncio.sleep(PERIOD)


async def test_it_waits_for_a_descriptor(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that cannot be accepted yet is retried, without keeping the loop busy."""
    failures: list[float] = []

    def accept(self: socket.socket) -> tuple[socket.socket, object]:
        if len(failures) < TORN and self.type == socket.SOCK_SEQPACKET:
            failures.append(time.monotonic())
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(self)

    real = socket.socket.accept
    monkeypatch.setattr(socket.socket, "accept", accept)
    with receiving(path) as receiver, sending(path, TORCH) as sender:
        sender.tell(beat(7))
        await until(lambda: shown(receiver))
        assert failures[-1] - failures[0] >= (TORN - 1) * PERIOD * 0.9


async def test_sender_without_a_job(path: Path) -> None:
    """A process that no launcher has started is counted, and not shown."""
    with receiving(path) as receiver, sending(path, {"HOME": "/"}) as sender:
        sender.tell(beat(1))
        await until(lambda: receiver.unidentified[UnidentifiedSender.NO_LAUNCHER] == 1)
        assert shown(receiver) == {}


@as_root
async def test_forgery_by_another_user(path: Path) -> None:
    """Another user's process that claims a job is of another job, whatever it says."""
    with receiving(path) as receiver, sending(path, TORCH) as sender:
        sender.tell(beat(7))
        await until(lambda: shown(receiver))
        job = only(receiver)[0].process.job
        time.sleep(0.05)  # processes' ages are told apart by hundredths of a second
        with sending(path, TORCH, user=STRANGER) as stranger:
            stranger.tell(beat(1_000_000))
            other = f"{job}-uid{STRANGER}"
            await until(lambda: shown(receiver) == {(job, 3): 7, (other, 3): 1_000_000})
            stranger.tell(beat(2_000_000))
            sender.tell(beat(8))
            await until(lambda: shown(receiver) == {(job, 3): 8, (other, 3): 2_000_000})


async def test_connection_handed_on(path: Path) -> None:
    """A process that hands over a page by the connection of another, a child of fork say, is a
    forger: its page is not read.
    """
    code = (
        f"if os.fork() == 0:\n    hand(s, page({encode(beat(5))!r}))\n    "
        "os._exit(0)\ntime.sleep(60)"
    )
    with receiving(path) as receiver, sending(path, TORCH, code):
        await until(lambda: receiver.rejected[RejectReason.FORGED] == 1)
        assert receiver.received == 0
        assert receiver.connections == 0


@as_root
async def test_credentials_cannot_be_made_up(path: Path) -> None:
    """The kernel does not let a user name another process; what it lets root name is dropped."""
    code = f"""
def send(pid, uid):
    try:
        claimed = struct.pack("iII", pid, uid, 0)
        more = [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, claimed)]
        hand(s, page({encode(beat(5))!r}), more=more)
        return "sent"
    except PermissionError:
        return "refused"
print(send(int(os.environ["VICTIM"]), os.getuid()), send(os.getpid(), 0), flush=True)
time.sleep(60)
"""
    with receiving(path) as receiver:
        variables = {**TORCH, "VICTIM": str(os.getpid())}
        with sending(path, variables, code, user=STRANGER) as stranger:
            assert stranger.popen.stdout is not None
            assert stranger.popen.stdout.readline() == "refused refused\n"
        with sending(path, variables, code) as root:
            assert root.popen.stdout is not None
            assert root.popen.stdout.readline().startswith("sent")
            await until(lambda: receiver.rejected[RejectReason.FORGED] == 1)
        assert receiver.received == 0


BAD_PAGES = {
    "nothing": "s.send(b'')",
    "no page": f"s.send({HELLO!r})",
    "garbage": "s.send(b'x' * 65536)",
    "another hello": "hand(s, page(), hello=b'dshb')",
    "size": "hand(s, page(size=1 << 20))",
    "not sealed": "hand(s, page(seals=0))",
    "may shrink": "hand(s, page(seals=fcntl.F_SEAL_GROW))",
    "two pages": "hand(s, page(), page())",
    "many": "hand(s, *[page() for _ in range(200)])",
    "a pipe": "hand(s, os.pipe()[0])",
    "a terminal": "hand(s, os.open('/dev/null', os.O_RDONLY))",
    "a file": "hand(s, os.open('/proc/version', os.O_RDONLY))",
    "a socket": "hand(s, s.fileno())",
    "a page to write": "hand(s, os.open('/proc/self/fd/%d' % page(), os.O_WRONLY))",
    "a name": "hand(s, os.open('/', os.O_PATH))",
    "more than a page": (
        f"hand(s, page({encode(Message(1, 1.0))!r})); time.sleep({2 * PERIOD}); s.send(b'x')"
    ),
    "twice": f"hand(s, page({encode(Message(1, 1.0))!r})); hand(s, page())",
}


@pytest.mark.parametrize("code", BAD_PAGES.values(), ids=BAD_PAGES)
async def test_bad_pages(path: Path, code: str) -> None:
    """What is no page is counted, its sender let go, and no descriptor of it kept."""
    with receiving(path) as receiver, sending(path, TORCH) as sender:
        sender.tell(beat(7))
        await until(lambda: shown(receiver))
        before = descriptors()
        with sending(path, TORCH, f"{code}\ntime.sleep(60)") as vandal:
            await until(lambda: receiver.rejected[RejectReason.MALFORMED] == 1)
            vandal.end()
        await until(lambda: descriptors() == before)
        sender.tell(beat(8))
        await until(lambda: list(shown(receiver).values()) == [8])


def descriptors() -> int:
    """Return how many this process has."""
    return len(os.listdir("/proc/self/fd"))


async def test_garbage_in_a_page(path: Path) -> None:
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
    with receiving(path) as receiver, contextlib.ExitStack() as stack:
        for data in garbage:
            stack.enter_context(sending(path, TORCH)).tell(data)
        await until(lambda: receiver.rejected[RejectReason.MALFORMED] == len(garbage), 60)
        assert receiver.received == receiver.connections == 0


LINGER = """
listener = socket.create_server(("127.0.0.1", 0))
def give(s, seconds):
    tcp = socket.create_connection(listener.getsockname())
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, seconds))
    tcp.settimeout(0.2)
    try:
        while True:
            tcp.send(bytes(1 << 20))  # until nothing more can be, as nobody takes it
    except TimeoutError:
        hand(s, tcp.fileno())
        tcp.close()
"""
"""Hands over connections that do not close for so long, and leaves them to the agent to close."""


async def test_descriptor_that_lingers(path: Path) -> None:
    """A connection that does not close for a minute, left to the agent to close, keeps neither it
    nor the ranks of others waiting.
    """
    code = f"""{LINGER}
for _ in range(6):
    give(s, 60)
    s = connect()
print("handed", flush=True)
time.sleep(60)
"""
    with receiving(path) as receiver:
        lags, end, before = [], time.monotonic() + 1.5, descriptors()
        with (
            sending(path, TORCH, user=STRANGER if os.getuid() == 0 else None) as sender,
            sending(path, TORCH, code) as vandal,
        ):
            assert vandal.popen.stdout is not None
            assert await asyncio.to_thread(vandal.popen.stdout.readline) == "handed\n"
            sender.tell(beat(1))
            while (now := time.monotonic()) < end or not shown(receiver):
                watch = Stopwatch()
                await asyncio.sleep(0.01)
                lags.append(watch.seconds())
                assert now < end + 60.0
            assert max(lags) < 1.0
        await until(lambda: descriptors() == before)  # with the vandal its connections have ended


async def test_process_that_ends_while_a_child_holds_its_connection(path: Path) -> None:
    """A rank that is gone is not shown, although a data loader that it left behind keeps its
    connection open.
    """
    code = (
        f"hand(s, page({encode(beat(5))!r}))\nif os.fork() == 0:\n    time.sleep(1.5)\n    "
        "os._exit(0)\ntime.sleep(60)"
    )
    with receiving(path) as receiver, sending(path, TORCH, code) as sender:
        await until(lambda: shown(receiver))
        sender.end()
        receiver.refresh()
        assert shown(receiver) == {}


async def test_lingering_descriptors_and_many_connections(path: Path) -> None:
    """Descriptors that linger, and 700 connections at once, do not shut out another user."""
    code = f"""{LINGER}
for connection in (s, connect()):
    give(connection, 600)
print("handed", flush=True)
kept = [connect() for _ in range(700)]
time.sleep(60)
"""
    with receiving(path) as receiver, sending(path, TORCH, code) as vandal:
        assert vandal.popen.stdout is not None
        assert await asyncio.to_thread(vandal.popen.stdout.readline) == "handed\n"
        await until(lambda: receiver.rejected[RejectReason.SENDERS] > 500)
        user = STRANGER if os.getuid() == 0 else None
        with sending(path, TORCH, user=user) as sender:
            await asyncio.to_thread(sender.tell, beat(1))
            await until(lambda: list(shown(receiver).values()) == [1])
        assert len(receiver._closer) < MAX_CLOSING


@as_root
async def test_silent_connections_of_many_users(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four users fill all places: a fifth has one at once, and those that stay silent lose
    theirs.
    """
    code = "kept = [connect() for _ in range(63)]\nprint('full', flush=True)\ntime.sleep(60)"
    monkeypatch.setattr(receiver_module, "SILENT", 600.0)
    with receiving(path) as receiver, contextlib.ExitStack() as vandals:
        for user in range(STRANGER + 1, STRANGER + 5):
            vandals.enter_context(sending(path, TORCH, code, user=user))
        await until(lambda: receiver.connections == MAX_SENDERS)
        with sending(path, TORCH, user=STRANGER) as sender:
            await asyncio.to_thread(sender.tell, beat(1))
            await until(lambda: list(shown(receiver).values()) == [1])
            assert receiver.connections == MAX_SENDERS
            monkeypatch.setattr(receiver_module, "SILENT", 0.1)
            await until(lambda: receiver.connections == 1)
            assert receiver.rejected[RejectReason.SILENT] == MAX_SENDERS - 1
            assert list(shown(receiver).values()) == [1]


async def test_flood(path: Path) -> None:
    """A sender that writes all the time is read as often as any other, and the heartbeats of others
    arrive as ever.
    """
    code = """
file = page()
memory = mmap.mmap(file, 1024)
hand(s, file)
while True:
    memory[:] = os.urandom(1024)
"""
    with (
        receiving(path) as receiver,
        sending(path, {**TORCH, "RANK": "9"}) as sender,
        sending(path, TORCH, code),
    ):
        sender.tell(beat(1))
        await until(lambda: shown(receiver))
        lags = []
        for step in range(2, 8):
            watch = Stopwatch(os.getpid(), sender.pid)
            sender.tell(beat(step))
            # bound now
            await until(lambda step=step: max(shown(receiver).values()) == step, 16 * PERIOD)  # type: ignore[misc]
            lags.append(watch.seconds())
        assert statistics.median(lags) < 2 * PERIOD
        assert receiver.received <= 7
        await until(lambda: receiver.rejected[RejectReason.MALFORMED] == 1)


async def test_too_many_connections(path: Path) -> None:
    """A user has a bounded number of connections."""
    code = "more = [connect() for _ in range(100)]\nprint(len(more), flush=True)\ntime.sleep(60)"
    with receiving(path) as receiver:
        with sending(path, TORCH, code):
            await until(
                lambda: receiver.rejected[RejectReason.SENDERS] == 101 - MAX_SENDERS_PER_USER
            )
        with sending(path, TORCH) as sender:
            await asyncio.sleep(0.2)
            sender.tell(beat(3))
            await until(lambda: list(shown(receiver).values()) == [3])


async def test_idle_ranks_give_way_to_their_users_next_job(path: Path) -> None:
    """When a user's places are all held by ranks that have been silent for IDLE, one gives way."""
    code = f"""
data = bytes.fromhex("{encode(beat(1)).hex()}")
kept = [s]
hand(s, page(data))
for _ in range({MAX_SENDERS_PER_USER - 1}):
    kept.append(connect())
    hand(kept[-1], page(data))
time.sleep(60)
"""
    passed = 0.0
    receiver = Receiver(str(path), Host(), monotonic=lambda: time.monotonic() + passed)
    receiver.open(asyncio.get_running_loop())
    try:
        with sending(path, {**TORCH, "RANK": "9"}, code):
            await until(lambda: receiver.received == MAX_SENDERS_PER_USER)
            with sending(path, TORCH):
                await until(lambda: receiver.rejected[RejectReason.SENDERS] == 1)
                assert receiver.connections == MAX_SENDERS_PER_USER
            passed = IDLE
            with sending(path, TORCH) as sender:
                await until(lambda: receiver.rejected[RejectReason.SENDERS] == 2)
                sender.tell(beat(3))
                await until(lambda: 3 in shown(receiver).values())
                assert receiver.connections == MAX_SENDERS_PER_USER
    finally:
        receiver.close()


async def test_connections_that_come_and_go(path: Path) -> None:
    """Of a program that connects as fast as it can a bounded number is taken in each turn."""
    code = "while True:\n    s.close()\n    s = connect()"
    with receiving(path) as receiver, sending(path, {**TORCH, "RANK": "9"}) as sender:
        sender.tell(beat(1))
        await until(lambda: shown(receiver))
        with sending(path, TORCH, code):
            for step in range(2, 6):
                sender.tell(beat(step))
                # bound now
                await until(lambda step=step: step in shown(receiver).values(), 16 * PERIOD)  # type: ignore[misc]
                assert len(list(receiver.senders())) == 1
                assert receiver.connections <= CONNECTIONS + 1


async def test_agent_that_stood_still(path: Path) -> None:
    """What was told while nobody looked is known afterwards, with the time at which it was told."""
    with receiving(path) as receiver, sending(path, TORCH) as sender:
        sender.tell(beat(1))
        await until(lambda: shown(receiver))
        for step in range(2, 51):
            sender.tell(beat(step))
        before = time.time()
        sender.tell(beat(51))
        told = time.time()
        time.sleep(1.0)
        await until(lambda: list(shown(receiver).values()) == [51])
        assert before - 0.2 < only(receiver)[1].heard < told + 0.2


async def test_stage_of_a_process_that_does_nothing_more(path: Path) -> None:
    """How far the last step has come, and since when, is known however long ago it was told."""
    with receiving(path) as receiver, sending(path, TORCH) as sender:
        for stage in (StepStage.FORWARD, StepStage.BACKWARD, StepStage.INPUT):
            sender.tell(beat(5)._replace(stage=StepStage.UNKNOWN))
            await until(lambda: shown(receiver))
            before = time.time()
            sender.tell(beat(5)._replace(stage=stage))
            told = time.time()
            await asyncio.sleep(4 * PERIOD)
            found = only(receiver)[1]
            assert found.message is not None
            assert found.message.stage == stage
            assert before - 0.2 < found.heard < told + 0.2


@pytest.mark.parametrize("offset", [-1e9, -100.0, 100.0, 1e9])
async def test_time_that_is_made_up(path: Path, offset: float) -> None:
    """A sender cannot say that it sent before it could have, nor in the future."""
    with receiving(path) as receiver, sending(path, TORCH) as sender:
        before = time.time()
        sender.tell(beat(1))
        await until(lambda: shown(receiver))
        await asyncio.sleep(0.05)
        sender.tell(beat(2, max(0.0, time.monotonic() + offset)))
        await until(lambda: list(shown(receiver).values()) == [2])
        assert before - 0.5 < only(receiver)[1].heard <= time.time()


async def test_second_agent(path: Path) -> None:
    """A second agent does not take the socket from one that lives; it says who has it."""
    with receiving(path) as receiver:
        with pytest.raises(OSError, match="another agent listens there"):
            Receiver(str(path), Host()).open(asyncio.get_running_loop())
        assert receiver.is_open


async def test_socket_left_behind(path: Path) -> None:
    """The socket of an agent that was killed is taken over; what is no socket is left alone."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(path))
    with receiving(path) as receiver:
        assert receiver.is_open
    assert not path.exists()
    path.write_text("precious")
    with pytest.raises(FileExistsError, match="not a socket"), receiving(path):
        pass
    assert path.read_text() == "precious"


async def test_socket_that_is_removed(path: Path) -> None:
    """A socket that somebody removed is noticed, and one that somebody else put in its place is not
    removed at the end.
    """
    with receiving(path) as receiver:
        path.unlink()
        assert not receiver.is_open
        path.write_text("other")
    assert path.read_text() == "other"
