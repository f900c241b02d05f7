"""Takes in the heartbeats of training processes: a socket that every user may write to, and that none can use to harm others.

Each sender has a connection, and with it a queue, of its own (`dshealthd.training.channel` says why). The kernel tells of each message
which process sent it, and that process must be the one that connected; its job and rank come from `/proc`.

Queues are looked at by the clock, a few times a second, and not as messages arrive: so that sending one wakes nobody, which would cost
the training more than all else does, and that no sender decides what the agent does when. What a turn takes in is bounded, in
connections and in messages, of each sender and of all; when a message was sent stands in it.
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
from dshealthd.jobs.heartbeat_sender import Rejected, Sender
from dshealthd.training.message import MAX_SIZE, decode

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from dshealthd.host import Host
    from dshealthd.jobs.heartbeat_identity import Answer

MAX_SENDERS = 256
MAX_SENDERS_PER_USER = 64
PERIOD = 0.25
"""Seconds from one turn to the next."""
MESSAGES_OF_SENDER = 32
"""Messages of one sender that are taken in one turn: a training sends 25 at most. A queue that built up meanwhile is 300."""
MESSAGES = 512
"""Messages that are taken in one turn, some 3 ms; who was left out comes first in the next."""
CONNECTIONS = 32
"""New connections that are taken in one turn."""

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
        self._timer: asyncio.TimerHandle | None = None
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
        self._turn()

    def close(self) -> None:
        """Let go of the socket and of all senders, who will find the next one."""
        for sender in list(self._senders.values()):
            self._drop(sender)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        listener, self._listener = self._listener, None
        if listener is None:
            return
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
    def connections(self) -> int:
        """How many senders are connected."""
        return len(self._senders)

    @property
    def unidentified(self) -> Mapping[Unidentified, int]:
        """How many processes send heartbeats that are not shown, by why."""
        counts = Counter(sender.who for sender in self._senders.values() if isinstance(sender.who, Unidentified))
        counts[Unidentified.OTHER_USER] = sum(map(self._foreign, self._senders.values()))
        return {reason: counts[reason] for reason in Unidentified}

    def _turn(self) -> None:
        """Take in what has come since the last turn."""
        if self._listener is None or self._loop is None:
            return
        self._timer = self._loop.call_later(PERIOD, self._turn)
        left = MESSAGES
        for sender in list(self._senders.values()):
            if left <= 0:
                break
            self._senders[sender.connection] = self._senders.pop(sender.connection)  # to the end
            left -= self._receive(sender)
        self._accept(self._listener)  # last, so that those who have gone have made room

    def _accept(self, listener: socket.socket) -> None:
        """Take new connections."""
        for _ in range(CONNECTIONS):
            try:
                connection, _ = listener.accept()
            except OSError:  # none waits, or there is no descriptor for it, and it goes on waiting
                return
            connection.settimeout(0.0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            pid, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
            if pid <= 0 or len(self._senders) >= MAX_SENDERS or self._users[user] >= MAX_SENDERS_PER_USER:
                self.rejected[Rejected.SENDERS if pid > 0 else Rejected.FORGED] += 1
                connection.close()
                continue
            self._users[user] += 1
            self._senders[connection] = Sender(connection, pid, user, self._monotonic())

    def _receive(self, sender: Sender) -> int:
        """Take messages of one sender, and return how many."""
        for number in range(MESSAGES_OF_SENDER):
            now = self._monotonic()
            try:
                data, ancillary, flags, _ = sender.connection.recvmsg(MAX_SIZE, _ANCILLARY)
            except BlockingIOError:
                sender.drained = now
                return number
            except OSError:  # it was reset
                self._drop(sender)
                return number
            if not data:
                self._drop(sender)
                return number
            rejected = self._take(sender, data, ancillary, flags, now)
            if rejected is None:
                self.received += 1
                continue
            self.rejected[rejected] += 1
            if rejected is not Rejected.OTHER_USER:
                self._drop(sender)
                return number + 1
        self.rejected[Rejected.RATE] += 1
        return MESSAGES_OF_SENDER

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

    def _drop(self, sender: Sender) -> None:
        """Let go of a sender; one that still lives may connect again."""
        if self._senders.pop(sender.connection, None) is None:
            return
        sender.connection.close()
        self._users[sender.user] -= 1
        if not self._users[sender.user]:
            del self._users[sender.user]
        self._settle()
