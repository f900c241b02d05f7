"""The service manager, systemd: notifications (sd_notify(3)), and the status line."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, MutableMapping
from typing import TYPE_CHECKING

from dshealthd.core import timing
from dshealthd.core.result import CollectionOutcome
from dshealthd.core.text import plural

if TYPE_CHECKING:
    from dshealthd.core.snapshot import Snapshot

log = logging.getLogger(__name__)

PERIOD = 5.0
"""Most seconds between two messages to the manager."""
MAX_STATUS = 800
"""Most characters of a status line; `systemctl status` folds longer ones."""
MAX_WAITING = 16
"""Most messages that wait while the socket is full; the oldest is dropped first."""
SHOWN = 3
"""Most problems that are spelled out; nobody reads a line that wraps."""
MAX_PROBLEM = 200
"""Most characters of one problem."""


class ServiceManager:
    """systemd, or another service manager that started the agent and listens."""

    def __init__(self, address: str = "", watchdog: float | None = None) -> None:
        """`address` is a path, or an abstract name after "@"; `watchdog` is in seconds."""
        self.watchdog = watchdog
        """The manager's watchdog timeout in seconds; None without a watchdog."""
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._waiting: deque[bytes] = deque(maxlen=MAX_WAITING)
        self._status = ""
        self._socket: socket.socket | None = None
        if address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)  # noqa: FBT003 - positional only

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str]) -> ServiceManager:
        """Return the service manager that the environment names.

        Its variables are removed from the environment, so that no child can speak for the agent. A
        watchdog meant for another process is ignored.
        """
        address = environment.pop("NOTIFY_SOCKET", "")
        microseconds = environment.pop("WATCHDOG_USEC", "")
        pid = environment.pop("WATCHDOG_PID", str(os.getpid()))
        ours = microseconds.isdecimal() and int(microseconds) > 0 and pid == str(os.getpid())
        return cls(address, int(microseconds) / 1e6 if ours else None)

    def ready(self, status: str) -> None:
        """Notify the service manager that the service is up, or that a reload is complete."""
        self._send("READY=1", status)

    def reloading(self) -> None:
        """Notify the service manager of a reload, which `ready` ends."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """Notify the service manager that the service is stopping."""
        self._send("STOPPING=1", "stopping")

    def set_status(self, status: str) -> None:
        """Set the status line in `systemctl status`."""
        if _line(status) != self._status:
            self._send("", status)

    async def feed_watchdog(self) -> None:
        """Feed the watchdog and send waiting messages, forever.

        This runs in the event loop on purpose: a stuck loop must not feed the watchdog.
        """
        while True:
            if self.watchdog is not None:
                self._send("WATCHDOG=1")
            self._flush()
            await timing.sleep_until_due(self._period)

    async def keep_status(self, status: Callable[[], str]) -> None:
        """Keep the status line up to date, forever."""
        while True:
            if self._socket is not None:
                self.set_status(status())
            await timing.sleep_until_due(self._period)

    @property
    def _period(self) -> float:
        """Return a third of the watchdog timeout, so that two beats may be late."""
        return PERIOD if self.watchdog is None else min(PERIOD, self.watchdog / 3)

    def close(self) -> None:
        """Close the service manager's socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, state: str, status: str = "") -> None:
        if status:
            self._status = _line(status)
            state = f"{state}\nSTATUS={self._status}".lstrip("\n")
        self._waiting.append(state.encode())
        self._flush()

    def _flush(self) -> None:
        while self._waiting and self._socket is not None:
            try:
                self._socket.sendto(self._waiting[0], self._address)
            except BlockingIOError:  # the manager lags; retried with the next message
                return
            except OSError as error:
                log.warning("cannot notify the service manager of %r: %s", self._waiting[0], error)
            self._waiting.popleft()


def _line(status: str) -> str:
    return " ".join(status.split())[:MAX_STATUS]


def status_line(snapshot: Snapshot, problems: Iterable[str], url: str, now: float) -> str:
    """Return the status line; `problems` are the agent's own, `now` is on the snapshot's clock.

    While the agent starts, it says so: "0 collectors ok" reads as broken. Without NVML or GPUs it
    includes the reason, which matters most on a GPU node.
    """
    told = list(problems)
    ok = absent = pending = 0
    note = ""
    for latest in snapshot:
        if latest.sampled is None:
            pending += 1
        elif latest.result.outcome is CollectionOutcome.NOT_AVAILABLE:
            absent += 1
            if latest.name == "gpu":
                note = f"; no GPUs: {latest.result.detail}"
        elif latest.result.outcome is CollectionOutcome.ERROR:
            told.append(f"{latest.name} {latest.result.reason}: {latest.result.detail}")
        elif latest.expired(now):
            told.append(f"{latest.name}: no sample for {now - latest.sampled:.0f} s")
        else:
            ok += 1
    shown = [problem[:MAX_PROBLEM] for problem in told[:SHOWN]]
    if len(told) > SHOWN:
        shown.append(f"{len(told) - SHOWN} more")
    collectors = sum(1 for _ in snapshot)
    if not collectors:
        counts = "starting"
    elif pending:
        counts = (
            f"starting: {collectors - pending} of {plural(collectors, 'collector')} have a result"
        )
    else:
        counts = f"{plural(ok, 'collector')} ok, {absent} not available"
    return "; ".join([*shown, f"{counts}{note}", url])
