"""A timed connection of the agent to itself over 127.0.0.1; if it fails, launchers fail too."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
from collections import Counter
from collections.abc import Iterator

from dshealthd.core.collector import (
    Collector,
    CollectorOptions,
    Context,
    Fault,
    Reason,
    Sample,
    SourceError,
    counter,
    every,
    gauge,
)
from dshealthd.core.sockets import reset_on_close

UP = gauge(
    "dshealthd_loopback_up",
    "1 if the agent could connect to its own listener on 127.0.0.1 and accept the connection, 0 if "
    "not.",
)
DURATION = gauge(
    "dshealthd_loopback_connect_seconds",
    "Duration of that connection, from connect(2) to accept(2); absent if it failed.",
)
CONNECTIONS = counter(
    "dshealthd_loopback_connections_total",
    "Attempts since the agent started, by outcome; no_port means that no local port was free.",
    "outcome",
)

ADDRESS = "127.0.0.1"
OUTCOMES = {
    errno.ECONNREFUSED: "refused",
    errno.ECONNABORTED: "aborted",
    errno.ECONNRESET: "reset",
    errno.ETIMEDOUT: "timed_out",
    errno.ENETUNREACH: "unreachable",
    errno.EHOSTUNREACH: "unreachable",
    errno.ENETDOWN: "unreachable",
    errno.EADDRNOTAVAIL: "no_port",
    errno.EADDRINUSE: "no_port",
    errno.EACCES: "denied",
    errno.EPERM: "denied",
    errno.ENOMEM: "no_memory",
    errno.ENOBUFS: "no_memory",
}
_OTHER, _OK = "other", "ok"
_LABELS = frozenset((*OUTCOMES.values(), _OTHER, _OK))
_OWN_LIMITS = (errno.EMFILE, errno.ENFILE)


class Loopback(Collector):
    """Opens a listener, connects, accepts, and closes all three sockets without TIME_WAIT."""

    # A connection usually takes 50 µs, and the agent blocks on it.
    Options = every("5s", within="100ms")

    def __init__(self, options: CollectorOptions, context: Context) -> None:
        super().__init__(options, context)
        self._outcomes: Counter[str] = Counter()

    def collect(self) -> Iterator[Sample | Fault]:
        """Connect once over the loopback; a failure is a sample. SourceError: no descriptors."""
        try:
            duration = self._connect()
        except OSError as error:
            if error.errno in _OWN_LIMITS:
                raise SourceError(Reason.IO_ERROR, str(error)) from error
            self._outcomes[OUTCOMES.get(error.errno or 0, _OTHER)] += 1
            yield UP(0)
        else:
            self._outcomes[_OK] += 1
            yield UP(1)
            yield DURATION(duration)
        for label in _LABELS:
            yield CONNECTIONS(self._outcomes[label], label)

    def _connect(self) -> float:
        """Return the seconds from connect to accept. OSError; TimeoutError past the deadline."""
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(_socket())
            _bind(listener)
            listener.listen(8)
            client = stack.enter_context(_socket())
            started = self.context.monotonic()
            end = started + self.options.deadline
            code = client.connect_ex(listener.getsockname())
            if code == errno.EINPROGRESS:
                self._wait(client, select.POLLOUT, end)
                code = client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            while True:
                self._wait(listener, select.POLLIN, end)
                accepted, address = listener.accept()
                reset_on_close(stack.enter_context(accepted))
                # No other process knows this port, but any may try it.
                if address == client.getsockname():
                    return self.context.monotonic() - started

    def _wait(self, waiting: socket.socket, event: int, end: float) -> None:
        poll = select.poll()
        poll.register(waiting, event)
        if not poll.poll(max(0.0, (end - self.context.monotonic()) * 1000)):
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))


def _socket() -> socket.socket:
    made = socket.socket(
        socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    )
    reset_on_close(made)
    return made


def _bind(listener: socket.socket) -> None:
    try:
        listener.bind((ADDRESS, 0))
    except OSError as error:
        # From bind(2), this error means that the interface has no address.
        if error.errno == errno.EADDRNOTAVAIL:
            raise OSError(errno.ENETDOWN, os.strerror(errno.ENETDOWN)) from error
        raise
