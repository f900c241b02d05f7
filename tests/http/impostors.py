"""Whoever answers on the agent's port: servers in threads and of other users."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

NOBODY = 65534
_SERVER = """
import os, socket, sys
heard = open(sys.argv[1], "ab", 0)
os.setgroups([]); os.setuid(int(sys.argv[2]))  # here: that user may not be able to start Python
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
while True:
    connection, _ = server.accept()
    with connection:
        connection.settimeout(60)
        try:
            data = b""  # all of it: to close with something unread would reset the connection
            while not data.endswith((b"\\r\\n\\r\\n", b"END")) and (more := connection.recv(65536)):
                data += more
            if not data:
                continue
            heard.write(data)
            connection.sendall(sys.argv[3].encode())
        except OSError:
            pass
"""


def answer(body: str | bytes, status: str = "200 OK") -> bytes:
    """Return an HTTP answer."""
    text = body.encode() if isinstance(body, str) else body
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n"
    return head.encode() + text


class Impostor:
    """A process of another user that answers, and what it was sent."""

    def __init__(self, port: int, heard: Path) -> None:
        """It listens on that port of 127.0.0.1, and appends what it reads to a file."""
        self.port = port
        self._heard = heard

    def heard(self) -> bytes:
        """Return all that was sent to it, after a request of this test's own has been written."""
        with socket.create_connection(("127.0.0.1", self.port), 60) as connection:
            connection.sendall(b"END")
            connection.recv(1)
        return self._heard.read_bytes().partition(b"END")[0]


@contextlib.contextmanager
def nobody() -> Iterator[int]:
    """Yield a port that nobody listens on, nor will."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@contextlib.contextmanager
def impostor(directory: Path, document: object, uid: int = NOBODY) -> Iterator[Impostor]:
    """Answer every request with a document, as a user; root starts it."""
    with answering_as(directory, answer(json.dumps(document)).decode(), uid) as found:
        yield found


@contextlib.contextmanager
def answering_as(directory: Path, text: str, uid: int) -> Iterator[Impostor]:
    """Answer every request with this text, as a user; root starts it."""
    heard = directory / "heard"
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _SERVER, str(heard), str(uid), text],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield Impostor(int(process.stdout.readline()), heard)
        finally:
            process.kill()


@contextlib.contextmanager
def serving(
    talk: Callable[[socket.socket, bytes], object], address: str = "127.0.0.1"
) -> Iterator[int]:
    """Answer each connection in a thread of this process with `talk`, which gets its request."""
    server = socket.create_server((address, 0), backlog=100)
    threads: list[threading.Thread] = []

    def one(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(60)
            data = b""
            while b"\r\n\r\n" not in data and (more := connection.recv(65536)):
                data += more
            talk(connection, data)

    def run() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=one, args=(connection,)))
            threads[-1].start()

    threads.append(threading.Thread(target=run))
    threads[0].start()
    try:
        yield server.getsockname()[1]
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()


def saying(body: str | bytes, status: str = "200 OK") -> Callable[[socket.socket, bytes], object]:
    """Return a way to answer each request with this."""
    return lambda connection, _: connection.sendall(answer(body, status))


def path(request: bytes) -> str:
    """Return the path of a request."""
    found = re.match(rb"\w+ (\S+) ", request)
    return "" if found is None else os.fsdecode(found[1])
