"""Names are looked up outside the loop, within bounds, and remembered."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from typing import Any

import pytest

from dshealthd.probe.peers.resolver import Resolver, UnknownName
from tests.probe.peering import PATIENT, Time
from tests.stopwatch import Stopwatch
from tests.waiting import eventually


class Names:
    """A name service that answers, fails, or is silent until it is released."""

    def __init__(self) -> None:
        self.silent = threading.Event()
        self.silent.set()
        self.asked: list[str] = []
        self.address = "192.0.2.1"

    def __call__(self, host: str, _port: None, *, type: int) -> list[Any]:
        """Answer as socket.getaddrinfo."""
        assert type == socket.SOCK_STREAM
        self.asked.append(host)
        self.silent.wait(PATIENT)
        if host == "temporary":
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        if host == "unknown":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        entry = (socket.AF_INET, type, 6, "", (self.address, 0))
        return [entry, entry, (socket.AF_INET6, type, 6, "", ("2001:db8::1", 0, 0, 0))]


async def test_addresses_are_remembered() -> None:
    """A name is looked up once a minute, also when many ask; it has each address once. Callers do
    not wait for a newer one.
    """
    names, clock = Names(), Time()
    resolver = Resolver(names, clock)
    found = await asyncio.gather(*(resolver.addresses("node-1") for _ in range(5)))
    assert found == [((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))] * 5
    clock.now += 59
    await resolver.addresses("node-1")
    assert names.asked == ["node-1"]
    names.address = "192.0.2.2"
    clock.now += 2
    assert (await resolver.addresses("node-1"))[0] == (socket.AF_INET, "192.0.2.1")
    await eventually(lambda: not resolver._pending)
    assert (await resolver.addresses("node-1"))[0] == (socket.AF_INET, "192.0.2.2")


async def test_addresses_are_not_looked_up() -> None:
    """What is an address already needs no name server."""
    names = Names()
    resolver = Resolver(names)
    assert await resolver.addresses("192.0.2.7") == ((socket.AF_INET, "192.0.2.7"),)
    assert await resolver.addresses("2001:db8::7") == ((socket.AF_INET6, "2001:db8::7"),)
    assert names.asked == []


async def test_unknown_name() -> None:
    """A name that does not exist is an error at once, and not asked for again for a few seconds."""
    names, clock = Names(), Time()
    resolver = Resolver(names, clock)
    for _ in range(3):
        with pytest.raises(UnknownName):
            await resolver.addresses("unknown")
    assert names.asked == ["unknown"]
    for seconds, asked in ((4, 1), (2, 2)):
        clock.now += seconds
        with pytest.raises(UnknownName):
            await resolver.addresses("unknown")
        assert names.asked == ["unknown"] * asked
    resolver.forget("unknown")
    assert not resolver._known.keys() | resolver._asked.keys() | resolver._failed.keys()


async def test_silent_name_servers() -> None:
    """While name servers are silent, known names keep their addresses, and threads are few."""
    names, clock = Names(), Time()
    resolver = Resolver(names, clock)
    await resolver.addresses("known")
    clock.now += 100
    names.silent.clear()
    threads = threading.active_count()
    watch = Stopwatch()
    assert (await resolver.addresses("known"))[0] == (socket.AF_INET, "192.0.2.1")
    assert watch.seconds() < 1.0
    for number in range(50):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(resolver.addresses(f"node-{number}"), 0.01)
    assert threading.active_count() - threads <= 4
    names.silent.set()
    assert (await asyncio.wait_for(resolver.addresses("node-49"), PATIENT))[0] == (
        socket.AF_INET,
        "192.0.2.1",
    )
    await eventually(lambda: len(names.asked) == 52)


def test_look_up_that_hangs_does_not_hold_the_process_up() -> None:
    """A process ends although a look-up of it hangs."""
    script = (
        "import asyncio, threading\nfrom dshealthd.probe.peers.resolver import Resolver\nasync def "
        "main():\n    resolver = Resolver(lambda *a, **b: threading.Event().wait())\n    try:\n    "
        "    await asyncio.wait_for(resolver.addresses('x'), 0.1)\n    except TimeoutError:\n      "
        "  print('late')\n    await resolver.close()\nasyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENT, check=True
    )
    assert (done.stdout, done.stderr) == ("late\n", "")
