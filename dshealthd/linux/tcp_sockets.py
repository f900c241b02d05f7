"""TCP sockets of the agent's network namespace, read once per round for all collectors.

The source is netlink if `/proc` is the agent's own, or the files `/proc/net/tcp` and `tcp6` if
netlink is refused (seccomp, gVisor, a kernel without `tcp_diag`) or `/proc` belongs to another
machine. Reading the files costs some twenty times as much and is limited.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from dshealthd.core.collector import Context, Reason, SourceError
from dshealthd.core.host import lines_of, read, read_existing
from dshealthd.linux import sock_diag
from dshealthd.linux.sock_diag import EVERY_STATE, TcpSocket, TcpState
from dshealthd.linux.tcp_tables import parse_tcp

log = logging.getLogger(__name__)

T = TypeVar("T")

FEW = 1000
"""Sockets in TIME_WAIT up to which one walk of all costs less than two that leave most out."""
HOLD = 15.0
"""Seconds for which the ports of many sockets in TIME_WAIT, which last 60 s, are cached."""
BUDGET = 0.1
"""Seconds of CPU time that one dump may take; the agent does nothing else meanwhile."""
MAX_FROM_FILES = 20_000
"""Sockets above which the files are not read: some 40 ms."""
RETRY = 600.0
"""Seconds until refused netlink is retried: the kernel may search for a module each time."""
_LINE = 256
"""Upper bound of the bytes in a line of `/proc/net/tcp6`, usually about 170."""

_REFUSALS = frozenset(
    {
        *(errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOSYS, errno.EINVAL, errno.ECONNREFUSED),
        *(errno.EPROTONOSUPPORT, errno.EAFNOSUPPORT, errno.EOPNOTSUPP, errno.ESOCKTNOSUPPORT),
    }
)


class SocketCounts(NamedTuple):
    """Counts of `/proc/net/sockstat` and `sockstat6`, for this network namespace."""

    time_wait: int
    """Stand-ins for closed sockets, of both families: TIME_WAIT, and most of FIN_WAIT2."""
    in_use: int
    """All others, of both families."""


def parse_sockstat(sockstat: str, sockstat6: str = "") -> SocketCounts:
    """Return the counts of `/proc/net/sockstat` and `sockstat6`. ValueError if malformed."""
    time_wait: int | None = None
    in_use = 0
    for line in lines_of(sockstat + sockstat6):
        if line.startswith(("TCP:", "TCP6:")):
            words = line.split()
            fields = dict(zip(words[1::2], words[2::2], strict=True))
            in_use += int(fields.get("inuse", "missing"))
            time_wait = int(fields["tw"]) if "tw" in fields else time_wait
    if time_wait is None:
        raise ValueError("no TCP line with inuse and tw")
    return SocketCounts(time_wait, in_use)


class Sockets:
    """Reads sockets once per round, shared by `context.shared`. OSError and SourceError."""

    def __init__(self, context: Context, cpu_time: Callable[[], float] = time.thread_time) -> None:
        """`cpu_time` is this thread's CPU time in seconds."""
        self._context = context
        self._cpu_time = cpu_time
        self._host = context.host
        self._refused_until = 0.0 if _own(context.host.proc("self/ns/net")) else math.inf
        self._sweep: int | None = None
        self._known: dict[object, object] = {}
        self._held: dict[tuple[int, int], tuple[float, Sequence[int]]] = {}

    def summary(self) -> SocketCounts | None:
        """Return the kernel's own counts of sockets; None if it has none."""
        return self._once("summary", self._read_summary)

    def active(self) -> list[TcpSocket]:
        """Return the sockets in every state except TIME_WAIT; including it if `complete`."""
        return self._once("active", self._read_active)[0]

    def complete(self) -> bool:
        """Return whether `active` includes sockets in TIME_WAIT, as it does if there are few."""
        return self._once("active", self._read_active)[1]

    def time_wait_ports(self, first: int, last: int) -> Sequence[int]:
        """Return the ports of sockets in TIME_WAIT, one for each; of many, up to `HOLD` old."""
        return self._once((first, last), lambda: self._read_time_wait_ports(first, last))

    def _once(self, key: object, read: Callable[[], T]) -> T:
        if self._sweep != self._context.sweep:
            self._sweep = self._context.sweep
            self._known.clear()
        if key not in self._known:
            self._known[key] = read()
        return self._known[key]  # type: ignore[return-value] # made by the same key's reader

    def _read_summary(self) -> SocketCounts | None:
        sockstat = read_existing(self._host.proc("net/sockstat"))
        if sockstat is None:
            return None
        try:
            return parse_sockstat(sockstat, read_existing(self._host.proc("net/sockstat6")) or "")
        except (ValueError, ArithmeticError) as error:
            raise SourceError(
                Reason.MALFORMED, f"{self._host.proc('net/sockstat')} or sockstat6: {error}"
            ) from error

    def _read_active(self) -> tuple[list[TcpSocket], bool]:
        summary = self.summary()
        complete = summary is None or summary.time_wait <= FEW
        walked = self._walk(
            EVERY_STATE if complete else EVERY_STATE & ~TcpState.TIME_WAIT.mask, None
        )
        return (walked, complete) if walked is not None else (self._files(), True)

    def _read_time_wait_ports(self, first: int, last: int) -> Sequence[int]:
        if not self.complete():
            now = self._context.monotonic()
            taken, ports = self._held.get((first, last), (-math.inf, ()))
            if now - taken < HOLD:
                return ports
            walked = self._walk(TcpState.TIME_WAIT.mask, (first, last))
            if walked is not None:
                ports = [found.port for found in walked]
                self._held[first, last] = now, ports
                return ports
        sockets = self.active() if self.complete() else self._files()
        return [
            found.port
            for found in sockets
            if found.state == TcpState.TIME_WAIT and first <= found.port <= last
        ]

    def _walk(self, states: int, ports: tuple[int, int] | None) -> list[TcpSocket] | None:
        """Return the sockets from netlink, None if it is refused."""
        now = self._context.monotonic()
        if now < self._refused_until:
            return None
        try:
            return sock_diag.dump(states, ports, BUDGET, self._cpu_time)
        except TimeoutError as error:
            raise SourceError(Reason.TIMEOUT, str(error)) from error
        except sock_diag.Interrupted as error:
            raise SourceError(Reason.IO_ERROR, f"netlink: {error}") from error
        except sock_diag.MalformedReply as error:
            raise SourceError(Reason.MALFORMED, f"netlink: {error}") from error
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            log.warning(
                "TCP sockets are read from %s, which costs more: %s",
                self._host.proc("net/tcp"),
                error,
            )
            self._refused_until = now + RETRY
            return None

    def _files(self) -> list[TcpSocket]:
        return self._once("files", self._read_files)

    def _read_files(self) -> list[TcpSocket]:
        summary = self.summary()
        if summary is not None and sum(summary) > MAX_FROM_FILES:
            raise SourceError(
                Reason.TIMEOUT,
                f"{sum(summary)} sockets are too many to read from {self._host.proc('net/tcp')}",
            )
        limit = MAX_FROM_FILES * _LINE
        texts = (
            read(self._host.proc("net/tcp"), limit),
            read_existing(self._host.proc("net/tcp6"), limit) or "",  # a kernel without IPv6
        )
        if any(len(text) == limit for text in texts):
            raise SourceError(
                Reason.TIMEOUT,
                f"more than {MAX_FROM_FILES} sockets in {self._host.proc('net/tcp')} or tcp6",
            )
        try:
            return [
                TcpSocket(row.state, row.timer, row.port, row.peer_port, row.uid, row.inode)
                for text in texts
                for row in parse_tcp(text)
            ]
        except (ValueError, ArithmeticError) as error:
            raise SourceError(
                Reason.MALFORMED, f"{self._host.proc('net/tcp')} or tcp6: {error}"
            ) from error


def _own(namespace: str) -> bool:
    """Return whether a `/proc` shows this process's network namespace, as no fixture does."""
    try:
        return os.readlink(namespace) == os.readlink("/proc/self/ns/net")
    except OSError:
        return False
