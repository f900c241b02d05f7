"""The reader of training processes' heartbeats: it opens their pages, and reads them.

A training process writes its heartbeats into a page of memory (`dshealthd.training.page`), which
the collector `heartbeat_pages` finds among the descriptors of the process. Its job and rank come
from `/proc`. The page is read periodically, twice a second. So being read costs a job nothing, and
no job controls when the agent works.

A page is opened in a thread, because that reads the environment of its process, which may hang.
"""

from __future__ import annotations

import functools
import os
import resource
import select
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dshealthd.core.collector import Reason, SourceError
from dshealthd.core.result import os_reason
from dshealthd.core.timing import Periodic
from dshealthd.jobs import ownership
from dshealthd.jobs.heartbeats.blocking_tasks import BlockingTasks
from dshealthd.jobs.heartbeats.identity import Answer, Identity, UnidentifiedSender, identify, same
from dshealthd.jobs.heartbeats.page import (
    MAX_PAGES,
    PageHolder,
    find_page,
    has_page,
    open_page,
)
from dshealthd.jobs.heartbeats.sender import Sender, by_rank
from dshealthd.training.message import PAGE, OlderLayout, newest_message

if TYPE_CHECKING:
    import asyncio

    from dshealthd.core.host import Host

MAX_SENDERS = MAX_PAGES
"""Most senders; a quarter of the limit on open files, if that is less.

A sender takes two descriptors, its process and its page: half of them stay for the rest.
"""
PERIOD = 0.5
"""Seconds between two turns: a quarter of those between two looks at ranks."""
TORN = 8
"""Consecutive turns without a whole message after which a page is rejected."""


class HeartbeatReader:
    """The senders and their pages, in the agent's own loop."""

    def __init__(
        self,
        host: Host,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Prepare; `monotonic` is the same clock as the senders'."""
        self._host = host
        self._monotonic = monotonic
        self._wall = wall
        self._senders: dict[tuple[int, int], Sender] = {}
        """Senders by pid and start."""
        self._poll = select.poll()
        self._places = MAX_SENDERS
        self._turns: Periodic | None = None
        """None without senders."""
        self._opened = 0.0
        """Monotonic time since which it reads."""
        self._blocking_tasks: BlockingTasks | None = None
        self._owners: dict[str, int | None] = {}
        """The owner of each job that senders claim."""
        self.rejected = 0
        """Pages without heartbeats so far."""

    def __len__(self) -> int:
        """Return the number of senders."""
        return len(self._senders)

    @property
    def is_open(self) -> bool:
        """Whether heartbeat pages are read."""
        return self._blocking_tasks is not None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read pages from now on, in `loop`.

        SourceError if `/proc` is not that of the agent's pid namespace.
        """
        self.close()
        try:
            agent = os.readlink(self._host.proc("self"))
        except OSError as error:
            raise SourceError(os_reason(error), str(error)) from error
        if agent != str(os.getpid()):
            raise SourceError(
                Reason.NOT_FOUND,
                f"{self._host.procfs} shows another pid namespace than the agent's, so senders "
                "cannot be identified",
            )
        self._places = min(MAX_SENDERS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._blocking_tasks = BlockingTasks(loop)
        self._opened = self._monotonic()

    def close(self) -> None:
        """Stop reading heartbeats, and drop all senders."""
        for sender in list(self._senders.values()):
            self._drop(sender)
        if self._blocking_tasks is not None:
            self._blocking_tasks.close()
            self._blocking_tasks = None
        self._rest()

    def follow(self, holders: Sequence[PageHolder]) -> None:
        """Read the pages of these processes too, the first ones if there are too many.

        Who is left out of them goes on being read while there is a place: what says whose pages
        there are may not know of a process for a while.
        """
        wanted = {(holder.pid, holder.start): holder for holder in holders[: self._places]}
        for key, holder in wanted.items():
            sender = self._senders.get(key)
            if sender is not None and holder.inode in {sender.holder.inode, 0}:
                continue
            if sender is not None:
                self._drop(sender)  # it has made another page
            elif len(self._senders) >= self._places:
                spare = (one for known, one in self._senders.items() if known not in wanted)
                if (outranked := next(spare, None)) is None:
                    return
                self._drop(outranked)
            self._add(key, holder)

    def refresh(self) -> None:
        """Drop senders that have ended, run another program, or have closed their page."""
        for sender in list(self._senders.values()):
            if isinstance(sender.who, Identity):
                if not (same(self._host, sender.who) and self._holds(sender)):
                    self._finish(sender)
            elif sender.who is UnidentifiedSender.UNREADABLE or (
                # Without a descriptor nothing else would show its end.
                sender.process < 0 and sender.who is not UnidentifiedSender.PENDING
            ):
                self._drop(sender)  # it is added again

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

    def ranks(self) -> dict[tuple[str, int], list[tuple[Identity, Sender]]]:
        """Return the processes that send heartbeats, by job and rank, as `by_rank` orders them."""
        return by_rank(self.senders())

    @property
    def unidentified(self) -> Mapping[UnidentifiedSender, int]:
        """Number of senders whose heartbeats are not shown, by reason."""
        counts = Counter(
            sender.who
            for sender in self._senders.values()
            if isinstance(sender.who, UnidentifiedSender)
        )
        return {reason: counts[reason] for reason in UnidentifiedSender}

    def _add(self, key: tuple[int, int], holder: PageHolder) -> None:
        if self._blocking_tasks is None:
            return
        try:
            process = os.pidfd_open(holder.pid)
        except ProcessLookupError:
            return
        except OSError:  # before Linux 5.3, or without a descriptor
            process = -1
        sender = self._senders[key] = Sender(holder, process)
        if process >= 0:
            self._poll.register(process, select.POLLIN)
        self._blocking_tasks.run(
            sender,
            holder.user,
            functools.partial(_open, self._host, holder),
            functools.partial(self._begin, sender),
        )
        if self._turns is None:
            self._turns = Periodic(self._turn, PERIOD)

    def _begin(self, sender: Sender, opened: tuple[tuple[int, int] | None, Answer]) -> None:
        """Start reading a sender's page, if it has one."""
        page, who = opened
        if not self._has(sender):  # it was dropped meanwhile
            if page is not None:
                os.close(page[0])
            return
        if who is UnidentifiedSender.GONE:
            self._drop(sender)
            return
        sender.who = who
        if page is not None:
            sender.page, sender.number = page
        if isinstance(who, Identity):
            age = time.clock_gettime(time.CLOCK_BOOTTIME) - who.process.started
            now = self._monotonic()
            sender.goodput.begin(age, now, seen=age < now - self._opened)
        self._settle()

    def _turn(self) -> None:
        if not self._senders:
            self._rest()
        ended = {process for process, _ in self._poll.poll(0)}
        for sender in list(self._senders.values()):
            if sender.process in ended:
                self._finish(sender)
            elif sender.page is not None:
                self._read(sender, sender.page)

    def _rest(self) -> None:
        if self._turns is not None:
            self._turns.close()
            self._turns = None

    def _read(self, sender: Sender, page: int) -> None:
        now = self._monotonic()
        try:
            data = os.pread(page, PAGE, 0)
        except OSError:  # the memory has failed
            self._reject(sender)
            return
        if changed := data != sender.data:
            try:
                message = newest_message(data)
            except OlderLayout:
                # Kept until its process ends: the layout does not change, and nobody else says why
                # a training that runs has no heartbeats.
                sender.who, sender.page = UnidentifiedSender.OLDER_LAYOUT, None
                os.close(page)
                self._settle()
                return
            except (ValueError, ArithmeticError):
                sender.torn += 1
                if sender.torn >= TORN:
                    self._reject(sender)
                return
            before = sender.message
            if before is None or (before.sent, before.step) != (message.sent, message.step):
                # It was written after the previous read of the page, whatever it claims.
                age = min(max(now - message.sent, 0.0), now - sender.looked)
                sender.heard = self._wall() - age
            sender.data, sender.message = data, message
            sender.course.add(message, now)
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

    def _holds(self, sender: Sender) -> bool:
        try:
            return has_page(self._host, sender.holder.pid, sender.number)
        except OSError:  # it has ended, which `same` sees as well, or memory is short
            return True

    def _has(self, sender: Sender) -> bool:
        """Return whether a sender is followed, and was not dropped."""
        return self._senders.get((sender.holder.pid, sender.holder.start)) is sender

    def _reject(self, sender: Sender) -> None:
        self.rejected += 1
        self._drop(sender)

    def _finish(self, sender: Sender) -> None:
        """Drop a sender that has ended, after reading what it has told since the last read."""
        if sender.page is not None:
            self._read(sender, sender.page)
        if self._has(sender):  # it was not rejected
            self._drop(sender)

    def _drop(self, sender: Sender) -> None:
        """Drop a sender; if it is still alive, it may be followed again."""
        del self._senders[sender.holder.pid, sender.holder.start]
        if self._blocking_tasks is not None:
            self._blocking_tasks.drop(sender)
        if sender.process >= 0:
            self._poll.unregister(sender.process)
            os.close(sender.process)
        if sender.page is not None:
            os.close(sender.page)
            sender.page = None
        self._settle()


def _open(host: Host, holder: PageHolder) -> tuple[tuple[int, int] | None, Answer]:
    """Return the page of a process with its descriptor there, and who the process is. Blocks."""
    who = identify(host, holder.pid, holder.user)
    if not isinstance(who, Identity):
        return None, who
    if who.process.start != holder.start:
        return None, UnidentifiedSender.GONE
    try:
        page = _page(host, holder)
    except (FileNotFoundError, ProcessLookupError):
        return None, UnidentifiedSender.GONE
    except PermissionError:
        return None, UnidentifiedSender.PERMISSION_DENIED
    except OSError:
        return None, UnidentifiedSender.UNREADABLE
    return page, UnidentifiedSender.GONE if page is None else who


def _page(host: Host, holder: PageHolder) -> tuple[int, int] | None:
    if holder.descriptor < 0:
        return find_page(host, holder.pid)
    page = open_page(host, holder.pid, holder.descriptor)
    if page is None:
        return None
    if os.fstat(page).st_ino != holder.inode:
        os.close(page)
        return None
    return page, holder.descriptor
