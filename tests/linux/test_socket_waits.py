"""For whose answer a process waits, of genuine processes."""

from __future__ import annotations

import os
import pty
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dshealthd.core.host import Host
from dshealthd.linux import socket_waits
from dshealthd.linux.socket_waits import TERMINAL, peers_awaited, ports_served
from tests.processes import state
from tests.waiting import until

START = """
import os, select, socket, sys, threading, time
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
pipe = os.pipe()
def poll(descriptor):
    polled = select.poll()
    polled.register(descriptor, select.POLLIN)
    polled.poll()
def epoll(descriptor):
    polled = select.epoll()
    polled.register(descriptor, select.EPOLLIN)
    polled.poll()
print(flush=True)
"""
MANY = """
polled = select.poll()
for _ in range(%d):
    polled.register(os.dup(pipe[0]), select.POLLIN)
polled.register(connection, select.POLLIN)
polled.poll()
"""
WAITS = {
    "as requests does": "connection.recv(1)",
    "with a time-out, as httpx does": "connection.settimeout(900); connection.recv(1)",
    "in a loop of events, as aiohttp does": "epoll(connection)",
    "as the last of 64": MANY % 63,
}
OTHERS = {
    "its data loader": "poll(pipe[0])",
    "another thread": "threading.Semaphore(0).acquire()",
    "nobody": "time.sleep(900)",
    "a loop of events without connections": "epoll(pipe[0])",
    "more than are read": MANY % 64,
}


@contextmanager
def waiting(program: str, address: str = "127.0.0.1") -> Iterator[tuple[int, int, socket.socket]]:
    """Yield the pid of a process that waits, its port, and the server's end."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as server:
        port = server.getsockname()[1]
        command = [sys.executable, "-c", START + program, address, str(port)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            connection, _ = server.accept()
            with connection:
                assert process.stdout is not None
                process.stdout.readline()
                until(lambda: state(process.pid) == "S")
                yield process.pid, port, connection
            process.kill()


@pytest.mark.parametrize("program", WAITS.values(), ids=list(WAITS))
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_connection(program: str, address: str) -> None:
    """A process that waits for data over TCP tells from whom, however it waits."""
    with waiting(program, address) as (pid, port, _):
        shown = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        until(
            lambda: (
                {key: str(end) for key, end in peers_awaited(Host(), [pid]).items()} == {pid: shown}
            )
        )


@pytest.mark.parametrize("program", OTHERS.values(), ids=list(OTHERS))
def test_others(program: str) -> None:
    """One that waits for something else has a connection as well."""
    with waiting(program) as (pid, _, _):
        assert peers_awaited(Host(), [pid]) == {}


def test_an_end_that_acknowledges_nothing() -> None:
    """Who waits for a peer that does not take what it is sent waits for no answer."""
    program = "connection.setblocking(False)\ntry:\n while True: connection.send(bytes(65536))\n"
    program += "except BlockingIOError: pass\nconnection.setblocking(True); connection.recv(1)"
    with waiting(program) as (pid, _, connection):
        assert peers_awaited(Host(), [pid]) == {}
        connection.settimeout(0.0)

        def drained() -> bool:
            try:
                while connection.recv(1 << 20):
                    pass
            except BlockingIOError:
                return pid in peers_awaited(Host(), [pid])
            return False

        until(drained)


@pytest.mark.parametrize(("told", "read"), [(3, 3), (1024, 1024), (1025, 1024)])
def test_a_set_of_descriptors(told: int, read: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many are looked at as the call says, up to those that a set can have."""
    monkeypatch.setattr(socket_waits, "read_memory", lambda _place, _at, size: b"\xff" * size)
    call = {"x86_64": "23", "aarch64": "72"}[os.uname().machine]
    found = socket_waits._descriptors("", [call, hex(told), "0x7ffe"])
    assert found == list(range(read))


PROMPTS = {
    "a shell's read": "import sys; sys.stdin.buffer.raw.read(1)",
    "input, as of pdb": "input()",
    "an older C library's select": (
        "import ctypes; ready = ctypes.byref(ctypes.c_ulong(1))\n"
        "ctypes.CDLL(None).syscall(23, 1, ready, None, None, None)"
    ),
    "a loop of events, as of IPython": (
        "import select; loop = select.epoll(); loop.register(0, select.EPOLLIN); loop.poll()"
    ),
}


@pytest.mark.parametrize("program", PROMPTS.values(), ids=list(PROMPTS))
def test_a_prompt(program: str) -> None:
    """A process that waits for what somebody types is known, however it reads."""
    if "syscall" in program and os.uname().machine != "x86_64":
        pytest.skip("the call has this number on x86-64")
    ours, theirs = pty.openpty()
    try:
        command = [sys.executable, "-c", program]
        with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as process:
            until(lambda: peers_awaited(Host(), [process.pid]) == {process.pid: TERMINAL})
            process.kill()
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_port_for_clients() -> None:
    """A port that the program has chosen is one; those that the kernel assigns are not."""
    program = (
        "import socket; servers = [socket.create_server(('127.0.0.9', 0))];import itertools\nfor "
        "port in itertools.count(20000):\n    try: "
        "servers.append(socket.create_server(('127.0.0.9', port)))\n    except OSError: continue\n "
        "   break\nprint(port, flush=True); servers[0].accept()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        assert list(ports_served(Host(), ([process.pid], 1000))) == [(process.pid, port)]
        assert list(ports_served(Host(), ([process.pid], 1))) == []
        process.kill()


def test_what_is_gone_or_denied(tmp_path: Path) -> None:
    """Nothing is known of a process that has ended, that may not be traced, or that runs."""
    (tmp_path / "10").mkdir()
    for text in (None, "running\n", "-1 0x7ffe 0x7f2a\n", "a 1 2\n"):
        if text is not None:
            (tmp_path / "10" / "syscall").write_text(text)
        assert peers_awaited(Host(procfs=tmp_path), [10, 11]) == {}
