"""Takes in the heartbeats of training processes: a socket that every user may write to, and that none can use to harm others.

Each sender has a connection, and with it a queue, of its own (`dshealthd.training.channel` says why). The kernel tells of each message
which process sent it, and that process must be the one that connected; its job and rank come from `/proc`. All that a sender can make the
agent do is bounded: connections in all and of one user, new connections and messages a second, messages taken in one turn of the loop.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import struct
import time
from collections import Counter
from typing import TYPE_CHECKING

from dshealthd.jobs.heartbeat_identity import Enquiries, Identity, Unidentified, identify, same
from dshealthd.jobs.heartbeat_listener import listen, place
from dshealthd.jobs.heartbeat_sender import Bucket, Rejected, Sender
from dshealthd.training.message import MAX_SIZE, decode

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from dshealthd.host import Host
    from dshealthd.jobs.heartbeat_identity import Answer

MAX_SENDERS = 256
MAX_SENDERS_PER_USER = 64
TURN = 8
"""Messages of one sender, and new connections, that are taken in one turn of the loop."""
MESSAGE_RATE, MESSAGE_BURST = 200.0, 600.0
"""Messages of one sender a second; a training sends half of that at most. A queue that built up while the agent stood still is 300."""
CONNECTION_RATE, CONNECTION_BURST = 100.0, 256.0
"""New connections a second."""
PAUSE = 0.5
"""Seconds for which a sender that is too fast, or new connections, are left waiting."""

_CREDENTIALS = struct.Struct("=iII")
_ANCILLARY = socket.CMSG_SPACE(_CREDENTIALS.size)
"""Room for the credentials and nothing else, so that descriptors that come with a message are not taken in."""


class Receiver:
    """The socket and its senders, in the agent's own loop."""

    def __init__(
        self, path: str, host: Host, *, monotonic: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        """Prepare to listen on `path`; `monotonic` is the clock that senders have too."""
        self.path = path
        self._host = host
        self._monotonic = monotonic
        self._wall = wall
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: socket.socket | None = None
        self._place: tuple[int, int] | None = None
        self._senders: dict[socket.socket, Sender] = {}
        self._users: Counter[int] = Counter()
        self._accepts = Bucket.full(CONNECTION_RATE, CONNECTION_BURST, monotonic())
        self._resume: asyncio.TimerHandle | None = None
        self._enquiries: Enquiries | None = None
        self._owners: dict[str, int] = {}
        """The user of each job: that of its oldest process. A later one cannot make itself older."""
        self.received = 0
        """Messages taken so far."""
        self.rejected: Counter[Rejected] = Counter()

    @property
    def is_open(self) -> bool:
        """Whether it listens, at a path that is still there."""
        return self._listener is not None and self._place == place(self.path)

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Listen, and take in what comes in `loop`. OSError if the path cannot be had: EADDRINUSE if another agent listens there."""
        self.close()
        listener = listen(self.path)
        self._listener, self._loop, self._place = listener, loop, place(self.path)
        self._enquiries = Enquiries(lambda pid, user: identify(self._host, pid, user), loop)
        loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Let go of the socket and of all senders, who will find the next one."""
        for sender in list(self._senders.values()):
            self._drop(sender)
        if self._resume is not None:
            self._resume.cancel()
            self._resume = None
        listener, self._listener = self._listener, None
        if listener is None:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(listener)
        if self._place == place(self.path):
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        listener.close()

    def refresh(self) -> None:
        """Let go of senders that have ended or run another program."""
        for sender in list(self._senders.values()):
            if isinstance(sender.who, Identity) and not same(self._host, sender.who):
                self._drop(sender)

    def senders(self) -> Iterator[tuple[Identity, Sender]]:
        """Yield the senders whose job and rank are known, and who they are."""
        for sender in self._senders.values():
            if isinstance(sender.who, Identity) and not self._foreign(sender):
                yield sender.who, sender

    @property
    def unidentified(self) -> Mapping[Unidentified, int]:
        """How many processes send heartbeats that are not shown, by why."""
        counts = Counter(sender.who for sender in self._senders.values() if isinstance(sender.who, Unidentified))
        counts[Unidentified.OTHER_USER] = sum(map(self._foreign, self._senders.values()))
        return {reason: counts[reason] for reason in Unidentified}

    def _accept(self) -> None:
        """Take new connections, a few at a time."""
        listener, loop = self._listener, self._loop
        if listener is None or loop is None:
            return
        for _ in range(TURN):
            now = self._monotonic()
            if not self._accepts.take(now):
                self.rejected[Rejected.RATE] += 1
                loop.remove_reader(listener)
                self._resume = loop.call_later(PAUSE, self._accept_again)
                return
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError:  # out of descriptors, or it went away meanwhile: what waits is asked for again after a pause
                loop.remove_reader(listener)
                self._resume = loop.call_later(PAUSE, self._accept_again)
                return
            connection.settimeout(0.0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            pid, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
            if pid <= 0 or len(self._senders) >= MAX_SENDERS or self._users[user] >= MAX_SENDERS_PER_USER:
                self.rejected[Rejected.SENDERS if pid > 0 else Rejected.FORGED] += 1
                connection.close()
                continue
            self._users[user] += 1
            sender = Sender(connection, pid, user, Bucket.full(MESSAGE_RATE, MESSAGE_BURST, now), now)
            self._senders[connection] = sender
            loop.add_reader(connection, self._receive, sender)

    def _accept_again(self) -> None:
        if self._listener is not None and self._loop is not None:
            self._loop.add_reader(self._listener, self._accept)

    def _receive(self, sender: Sender) -> None:
        """Take a few messages of one sender."""
        for _ in range(TURN):
            now = self._monotonic()
            if not sender.bucket.take(now):
                self._pause(sender)
                return
            try:
                data, ancillary, flags, _ = sender.connection.recvmsg(MAX_SIZE, _ANCILLARY)
            except BlockingIOError:
                sender.drained = now
                return
            except OSError:  # it was reset
                self._drop(sender)
                return
            if not data:
                self._drop(sender)
                return
            rejected = self._take(sender, data, ancillary, flags, now)
            if rejected is None:
                self.received += 1
                continue
            self.rejected[rejected] += 1
            if rejected is not Rejected.OTHER_USER:
                self._drop(sender)
                return

    def _take(self, sender: Sender, data: bytes, ancillary: Iterable[tuple[int, int, bytes]], flags: int, now: float) -> Rejected | None:
        """Keep a message, or say why not."""
        if not any(
            level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS and _CREDENTIALS.unpack(value)[:2] == (sender.pid, sender.user)
            for level, kind, value in ancillary
        ):
            return Rejected.FORGED
        if flags & socket.MSG_TRUNC:
            return Rejected.MALFORMED
        try:
            message = decode(data)
        except ValueError:
            return Rejected.MALFORMED
        if sender.who is None and self._enquiries is not None:
            sender.who = Unidentified.PENDING
            self._enquiries.ask(sender.pid, sender.user, functools.partial(self._identified, sender))
        if self._foreign(sender):
            return Rejected.OTHER_USER
        # It was sent after its queue was last empty, whatever it says.
        age = min(max(now - message.sent, 0.0), now - sender.drained)
        sender.message, sender.heard = message, self._wall() - age
        return None

    def _identified(self, sender: Sender, answer: Answer) -> None:
        if sender.connection not in self._senders:
            return
        sender.who = answer
        if answer is Unidentified.GONE:
            self._drop(sender)
        self._settle()

    def _foreign(self, sender: Sender) -> bool:
        """Tell whether a sender names a job that is another user's."""
        return isinstance(sender.who, Identity) and self._owners.get(sender.who.process.job, sender.user) != sender.user

    def _settle(self) -> None:
        """Decide whose each job is."""
        oldest: dict[str, tuple[int, int, int]] = {}
        for sender in self._senders.values():
            if isinstance(sender.who, Identity):
                process = sender.who.process
                age = (process.start, process.pid, sender.user)
                oldest[process.job] = min(oldest.get(process.job, age), age)
        self._owners = {job: user for job, (_, _, user) in oldest.items()}

    def _pause(self, sender: Sender) -> None:
        """Leave a sender that is too fast waiting; its queue fills, and it can send no more."""
        self.rejected[Rejected.RATE] += 1
        if self._loop is not None:
            self._loop.remove_reader(sender.connection)
            sender.paused = self._loop.call_later(PAUSE, self._go_on, sender)

    def _go_on(self, sender: Sender) -> None:
        sender.paused = None
        if self._loop is not None and sender.connection in self._senders:
            self._loop.add_reader(sender.connection, self._receive, sender)

    def _drop(self, sender: Sender) -> None:
        """Let go of a sender; one that still lives may connect again."""
        if self._senders.pop(sender.connection, None) is None:
            return
        if sender.paused is not None:
            sender.paused.cancel()
        elif self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(sender.connection)
        sender.connection.close()
        self._users[sender.user] -= 1
        if not self._users[sender.user]:
            del self._users[sender.user]
        self._settle()
