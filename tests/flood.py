"""A flood of connections that stall, from a few addresses of this machine or from many."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator

PATIENT = 60.0
"""Seconds for what is to succeed, as this machine may have other work; it ends when it is done."""
STARTS = (
    b"",
    b"POST / HTTP/1.1\r\nHost: ",
    b"\0\0\0\x40dshealthd2 ",
    b"\x16\x03\x01\x02\x00\x01",
    os.urandom(200),
)


@contextlib.contextmanager
def flooding(port: int, sources: int) -> Iterator[Callable[[], int]]:
    """Open connections that stall, from so many addresses in all, in four threads, until the end.
    Yield what counts them.
    """
    stop = threading.Event()
    tried = [0] * 4

    def flood(number: int) -> None:
        with contextlib.ExitStack() as held:
            for turn in itertools.count():
                if stop.is_set():
                    return
                tried[number] = turn
                try:
                    source = (f"127.0.{1 + number}.{1 + turn % (sources // 4)}", 0)
                    connection = held.enter_context(
                        socket.create_connection(("127.0.0.1", port), PATIENT, source)
                    )
                    connection.sendall(STARTS[turn % len(STARTS)])
                except OSError:
                    continue
                if turn % 400 == 399:
                    held.close()

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    threads = [threading.Thread(target=flood, args=(number,)) for number in range(4)]
    try:
        for thread in threads:
            thread.start()
        yield lambda: sum(tried)
    finally:
        stop.set()
        for thread in threads:
            thread.join(PATIENT)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
