"""The receiver of training processes' heartbeats: accepts their connections, and reads their pages.

Every user may connect to its socket, and none can use it to harm others.

A sender hands over a memory page (`dshealthd.training.page`) once. The kernel says which process
did, which must be the one that connected; its job and rank come from `/proc`. From then on the page
is read periodically, twice a second. So being read costs a job nothing, and no sender
controls when the agent works; without one, it sleeps until the first connects.

No connection is received from or closed in the agent's loop, because another user's descriptors may
be in it (`take_page`). Connections and threads are limited, per user and in total.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import resource
import select
import socket
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from dshealthd.core.timing import next_due
from dshealthd.jobs import ownership
from dshealthd.jobs.heartbeats.blocking_tasks import BlockingTasks
from dshealthd.jobs.heartbeats.closer import Closer
from dshealthd.jobs.heartbeats.identity import Identity, UnidentifiedSender, identify, same
from dshealthd.jobs.heartbeats.listener import listen, place
from dshealthd.jobs.heartbeats.page import CREDENTIALS, RejectReason, find_page, take_page
from dshealthd.jobs.heartbeats.sender import Sender
from dshealthd.training.message import PAGE, newest

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator, Mapping

    from dshealthd.core.host import Host
    from dshealthd.jobs.heartbeats.identity import Answer

log = logging.getLogger(__name__)

MAX_SENDERS = 256
"""Most senders; a quarter of the limit on open files, if that is less.

A sender takes two descriptors, its connection and its page: half of them stay for the rest.
"""
MAX_SENDERS_PER_USER = 64
MAX_CLOSING = 512
"""Most descriptors that wait to be closed while no thread starts; at this limit no connection is
accepted.
"""
SILENT = 10.0
"""Seconds after which a connection without a page is dropped; a rank hands it over at once."""
IDLE = 900.0
"""Seconds without a heartbeat after which a rank gives way to another one of its user.

By then its hang has been reported and its evidence taken.
"""
PERIOD = 0.5
"""Seconds between two turns: a quarter of those between two looks at ranks."""
CONNECTIONS = 32
"""Most new connections accepted in one turn."""
TORN = 8
"""Consecutive turns without a whole message after which a page is rejected."""


class Receiver:
    """The socket and its senders, in the agent's own loop."""

    def __init__(
        self,
        path: str,
        host: Host,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Prepare to listen on `path`; `monotonic` is the same clock as the senders'."""
        self.path = path
        self._host = host
        self._monotonic = monotonic
        self._wall = wall
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: socket.socket | None = None
        self._place: tuple[int, int] | None = None
        self._senders: dict[int, Sender] = {}
        """Senders by the descriptor of their connection."""
        self._poll = select.poll()
        self._users: Counter[int] = Counter()
        self._places = MAX_SENDERS
        self._timer: asyncio.TimerHandle | None = None
        """The next turn; None while the listener's first connection is awaited."""
        self._opened = 0.0
        """Monotonic time since which it listens."""
        self._blocking_tasks: BlockingTasks | None = None
        self._closer = Closer()
        self._owners: dict[str, int | None] = {}
        """The owner of each job that senders claim."""
        self.received = 0
        """Messages read so far."""
        self.rejected: Counter[RejectReason] = Counter()

    @property
    def is_open(self) -> bool:
        """Whether the receiver listens, and its path still leads to its socket."""
        return self._listener is not None and self._place == place(self.path)

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Listen for heartbeats, and process them in `loop`.

        OSError if that fails: EADDRINUSE if another agent listens there.
        """
        self.close()
        self._places = min(MAX_SENDERS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        listener = listen(self.path)
        self._listener, self._loop, self._place = listener, loop, place(self.path)
        self._blocking_tasks = BlockingTasks(loop)
        self._opened = self._monotonic()
        self._turn()

    def close(self) -> None:
        """Close the socket and all senders, which will reconnect to the next receiver."""
        senders = list(self._senders.values())
        for sender in senders:
            self._forget(sender)
        if self._blocking_tasks is not None:
            self._blocking_tasks.close()
            self._blocking_tasks = None
        for sender in senders:
            self._closer.put(sender.connection.detach())
        if self._loop is not None:
            self._closer.finish(self._loop)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        listener, self._listener = self._listener, None
        if listener is None:
            return
        if self._loop is not None:
            self._loop.remove_reader(listener)
        if self._place == place(self.path):
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        listener.close()

    def refresh(self) -> None:
        """Drop senders that have ended or run another program."""
        for sender in list(self._senders.values()):
            if isinstance(sender.who, Identity) and not same(self._host, sender.who):
                self._finish(sender)

    def adopt(self, pid: int, start: int, user: int) -> None:
        """Take the heartbeat page of a process that reported to an earlier agent, or cannot reach
        the socket.

        This has no effect if the process is gone, if it has connected by itself, or if the agent is
        out of descriptors.
        """
        known = any(sender.pid == pid for sender in self._senders.values())
        if self._blocking_tasks is None or known or not self._has_place(user):
            return
        try:
            connection, kept = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            log.warning(
                "process %d: no heartbeats are read until it reconnects: %s", pid, error.strerror
            )
            return
        connection.settimeout(0.0)
        # Its last message is older than this agent: no earlier read bounds its age.
        now = self._monotonic()
        sender = Sender(connection, pid, user, 0.0, now, now, UnidentifiedSender.PENDING)
        sender.kept = kept
        self._users[user] += 1
        self._senders[connection.fileno()] = sender
        self._wake()
        self._blocking_tasks.run(
            user,
            functools.partial(_adopt, self._host, sender, start),
            functools.partial(self._met, sender),
        )

    def senders(self) -> Iterator[tuple[Identity, Sender]]:
        """Yield the senders whose job and rank are known, with their identities.

        A sender that claims another user's job gets a job of its own.
        """
        for sender in self._senders.values():
            if isinstance(who := sender.who, Identity):
                job = ownership.name(who.process, self._owners)
                if job != who.process.job:
                    who = replace(who, process=replace(who.process, job=job))
                yield who, sender

    @property
    def connections(self) -> int:
        """Number of connected senders."""
        return len(self._senders)

    @property
    def unidentified(self) -> Mapping[UnidentifiedSender, int]:
        """Number of senders whose heartbeats are not shown, by reason."""
        counts = Counter(
            sender.who
            for sender in self._senders.values()
            if isinstance(sender.who, UnidentifiedSender)
        )
        return {reason: counts[reason] for reason in UnidentifiedSender}

    def _turn(self) -> None:
        if self._listener is None or self._loop is None or self._blocking_tasks is None:
            return
        # First, so that a defect in one turn does not end the heartbeats of all jobs.
        self._timer = self._loop.call_at(next_due(self._loop.time(), PERIOD), self._turn)
        for connection, events in self._poll.poll(0):
            self._attend(self._blocking_tasks, self._senders[connection], events)
        self._end_silent()
        all_accepted = self._accept(self._listener)  # after ended connections have made room
        self._closer.turn()
        for sender in list(self._senders.values()):
            if sender.page is not None:
                self._read(sender, sender.page)
        if all_accepted and not (self._senders or self._closer or self._blocking_tasks):
            self._timer.cancel()
            self._timer = None
            self._loop.add_reader(self._listener, self._wake)

    def _wake(self) -> None:
        """Turn from now on, if nothing was left to do."""
        if self._timer is None and self._loop is not None and self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._timer = self._loop.call_later(0.0, self._turn)

    def _accept(self, listener: socket.socket) -> bool:
        """Accept connections that wait; return whether none is left."""
        for _ in range(CONNECTIONS):
            if len(self._closer) >= MAX_CLOSING:
                return False
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return True
            except OSError:  # there is no descriptor for it, and it keeps waiting
                return False
            connection.settimeout(0.0)
            # A connected socket can be passed on: the kernel must say who sends the page as well.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            pid, user, _ = CREDENTIALS.unpack(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
            )
            if pid <= 0 or not self._has_place(user):
                self.rejected[RejectReason.SENDERS if pid > 0 else RejectReason.FORGED] += 1
                self._closer.put(connection.detach())
                continue
            self._users[user] += 1
            now = self._monotonic()
            self._senders[connection.fileno()] = Sender(connection, pid, user, now, now, now)
            self._poll.register(connection, select.POLLIN)
        return False

    def _has_place(self, user: int) -> bool:
        """Return whether a user may have one more connection; make room if another user has more.

        If all places are taken, the user who has most loses the youngest connection, one without a
        page first, so that no number of users with full shares shuts another one out. If all of a
        user's own places are taken, the user's longest idle connection gives way.
        """
        if self._users[user] >= MAX_SENDERS_PER_USER:
            own = (sender for sender in self._senders.values() if sender.user == user)
            idlest = min(own, key=lambda sender: sender.moved)
            if self._monotonic() - idlest.moved < IDLE:
                return False
            self._reject(idlest, RejectReason.SENDERS)
        if len(self._senders) < self._places:
            return True
        greediest, count = self._users.most_common(1)[0]
        # Taking from a user who would then have fewer only moves the shortage: both would take from
        # each other in turn.
        if count <= self._users[user] + 1:
            return False
        theirs = [sender for sender in self._senders.values() if sender.user == greediest]
        self._reject(
            max(theirs, key=lambda sender: (sender.page is None, sender.since)),
            RejectReason.SENDERS,
        )
        return True

    def _end_silent(self) -> None:
        oldest = self._monotonic() - SILENT
        for sender in list(self._senders.values()):
            if sender.who is None and sender.since < oldest:
                self._reject(sender, RejectReason.SILENT)

    def _attend(self, blocking_tasks: BlockingTasks, sender: Sender, events: int) -> None:
        """Handle events of a sender's connection: it has ended, or its page has arrived."""
        if events & (select.POLLHUP | select.POLLERR | select.POLLNVAL):
            self._finish(sender)
        elif sender.who is None:
            sender.who = UnidentifiedSender.PENDING
            self._poll.unregister(sender.connection)  # until the page has been taken
            blocking_tasks.run(
                sender.user,
                functools.partial(_meet, self._host, sender, self._closer),
                functools.partial(self._met, sender),
            )
        else:
            self._reject(sender, RejectReason.MALFORMED)  # nothing may follow the page

    def _met(self, sender: Sender, met: tuple[int | RejectReason | None, Answer]) -> None:
        """Start reading a sender's page, if it has one."""
        page, who = met
        if self._senders.get(sender.connection.fileno()) is not sender:  # it was dropped meanwhile
            if isinstance(page, int):
                os.close(page)
            return
        sender.who = who
        if isinstance(page, RejectReason):
            self._reject(sender, page)
            return
        sender.page = page
        if who is UnidentifiedSender.GONE:
            self._drop(sender)
            return
        self._poll.register(sender.connection, select.POLLIN)
        if isinstance(who, Identity):
            age = time.clock_gettime(time.CLOCK_BOOTTIME) - who.process.started
            now = self._monotonic()
            sender.goodput.begin(age, now, seen=age < now - self._opened)
        for other in [one for one in self._senders.values() if one.pid == sender.pid]:
            # Adopted while it was connecting by itself: its own connection is better, because it
            # ends with the process.
            if other is not sender and (other.kept is not None or sender.kept is not None):
                self._drop(other if other.kept is not None else sender)
        self._settle()

    def _read(self, sender: Sender, page: int) -> None:
        now = self._monotonic()
        try:
            data = os.pread(page, PAGE, 0)
        except OSError:  # the memory has failed
            self._reject(sender, RejectReason.MALFORMED)
            return
        if changed := data != sender.data:
            try:
                message = newest(data)
            except (ValueError, ArithmeticError):
                sender.torn += 1
                if sender.torn >= TORN:
                    self._reject(sender, RejectReason.MALFORMED)
                return
            before = sender.message
            if before is None or (before.sent, before.step) != (message.sent, message.step):
                # It was written after the previous read of the page, whatever it claims.
                age = min(max(now - message.sent, 0.0), now - sender.looked)
                sender.heard = self._wall() - age
            sender.data, sender.message, sender.moved = data, message, now
            sender.course.add(message, now)
            self.received += 1
        if sender.message is not None:
            sender.goodput.add(sender.message, now, changed=changed)
        sender.torn, sender.looked = 0, now

    def _settle(self) -> None:
        """Determine the owner of each job that senders claim."""
        self._owners = ownership.owners(
            sender.who.process
            for sender in self._senders.values()
            if isinstance(sender.who, Identity)
        )

    def _reject(self, sender: Sender, why: RejectReason) -> None:
        self.rejected[why] += 1
        self._drop(sender)

    def _finish(self, sender: Sender) -> None:
        """Drop a sender that has ended, after reading what it has told since the last read."""
        if sender.page is not None:
            self._read(sender, sender.page)
        if self._senders.get(sender.connection.fileno()) is sender:  # it was not rejected
            self._drop(sender)

    def _drop(self, sender: Sender) -> None:
        """Drop a sender; if it is still alive, it may connect again."""
        self._forget(sender)
        self._closer.put(sender.connection.detach())
        self._wake()

    def _forget(self, sender: Sender) -> None:
        del self._senders[sender.connection.fileno()]
        with contextlib.suppress(KeyError):  # not registered while its page is being taken
            self._poll.unregister(sender.connection)
        if sender.page is not None:
            os.close(sender.page)
            sender.page = None
        if sender.kept is not None:
            sender.kept.close()
            sender.kept = None
        self._users[sender.user] -= 1
        if not self._users[sender.user]:
            del self._users[sender.user]
        self._settle()


def _meet(host: Host, sender: Sender, closer: Closer) -> tuple[int | RejectReason | None, Answer]:
    """Return a sender's heartbeat page, or why it has none, and its identity. Blocks."""
    try:
        page = take_page(sender.connection, sender.pid, sender.user, closer.put)
    except OSError:
        return None, UnidentifiedSender.GONE
    return page, UnidentifiedSender.GONE if isinstance(page, RejectReason) else identify(
        host, sender.pid, sender.user
    )


def _adopt(host: Host, sender: Sender, start: int) -> tuple[int | None, Answer]:
    """Return the heartbeat page of a process that has not connected, and its identity. Blocks."""
    who = identify(host, sender.pid, sender.user)
    if not isinstance(who, Identity) or who.process.start != start:
        return None, UnidentifiedSender.GONE
    try:
        page = find_page(host, sender.pid)
    except OSError:
        page = None
    return page, UnidentifiedSender.GONE if page is None else who
