"""What the network and the other side do to a call.

Each is told from the others, and none takes longer than its deadline.
"""

from __future__ import annotations

import asyncio
import glob
import os
import shutil
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from dshealthd.probe.observation import Outcome
from dshealthd.probe.peers.protocol import PeerError
from dshealthd.probe.peers.resolver import Resolver
from tests.netns import network_namespace
from tests.probe.peering import (
    PATIENT,
    PING,
    calling,
    fails,
    keyed,
    listener_process,
    listening,
    metric,
    ping,
    talking,
)
from tests.stopwatch import Stopwatch
from tests.waiting import eventually

NO_ANSWER = {"not_acknowledged", "connect_timeout"}
"""What is known at a call's deadline alone."""


async def test_listener_that_restarts(key: Path) -> None:
    """A kept connection whose listener has ended is not used again."""
    async with listening(keyed(key)) as node:
        port = node.port
        async with calling(keyed(key), port) as client:
            await ping(client)
            await node.server.close()
            await fails(ping(client), Outcome.REFUSED, "refused")


async def test_silent_name_server(key: Path) -> None:
    """A name server that is silent, within the deadline, or that fails says nothing of the node,
    nor does one that does not know its name yet.
    """
    released = threading.Event()

    def never(*_arguments: object, **_named: object) -> list[object]:
        released.wait(PATIENT)
        return []

    def unknown(*_arguments: object, **_named: object) -> list[object]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    def failing(*_arguments: object, **_named: object) -> list[object]:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    cases = (
        (never, 0.2, Outcome.INCONCLUSIVE, "name_timeout"),
        (unknown, PATIENT, Outcome.INCONCLUSIVE, "name_unknown"),
        (failing, PATIENT, Outcome.INCONCLUSIVE, "name_server"),
    )
    for look_up, deadline, outcome, reason in cases:
        async with calling(keyed(key), 1, host="node-b", resolver=Resolver(look_up)) as client:
            watch = Stopwatch()
            await fails(ping(client, deadline), outcome, reason)
            assert watch.seconds() < 0.8
    assert not released.is_set()
    released.set()


@pytest.mark.parametrize(("wrong", "reached"), [(0, True), (3, True), (4, False)])
async def test_name_with_several_addresses(key: Path, wrong: int, *, reached: bool) -> None:
    """One after the other is tried, four at most."""
    found = [f"127.0.0.{90 + number}" for number in range(wrong)] + ["127.0.0.1", "127.0.0.99"]

    def look_up(*_arguments: object, **_named: object) -> list[object]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (place, 0)) for place in found]

    async with (
        listening(keyed(key)) as node,
        calling(keyed(key), node.port, host="node-b", resolver=Resolver(look_up)) as client,
    ):
        if reached:
            await ping(client)
        else:
            await fails(ping(client), Outcome.REFUSED, "refused")


async def test_stopped_listener_hangs(key: Path) -> None:
    """A stopped agent is a hang and not an unreachable node; afterwards it goes on."""
    with listener_process({"key_file": str(key)}) as (port, pid, _):
        async with calling(keyed(key), port) as client:
            await ping(client)
            os.kill(pid, signal.SIGSTOP)
            try:
                await fails(ping(client, 1.5), Outcome.HUNG, "no_answer")  # on a kept connection
                watch = Stopwatch()
                on_a_new_one = client.call("b", "echo", PING)
                await fails(on_a_new_one, Outcome.HUNG, "no_answer")
                assert 1.5 < watch.seconds() < 4
            finally:
                os.kill(pid, signal.SIGCONT)
            await ping(client)


@pytest.mark.skipif(shutil.which("nft") is None, reason="nft is not installed")
@pytest.mark.parametrize(("rule", "kept", "new"), [
    (
        "tcp dport {port} drop", (Outcome.UNREACHABLE, "not_acknowledged"),
        (Outcome.UNREACHABLE, "connect_timeout"),
    ),
    (
        "tcp sport {port} drop", (Outcome.UNREACHABLE, "not_acknowledged"),
        (Outcome.UNREACHABLE, "connect_timeout"),
    ),
    (
        "tcp dport {port} reject with tcp reset", (Outcome.REFUSED, "reset"),
        (Outcome.REFUSED, "refused"),
    ),
    (
        "tcp dport {port} reject with icmp type host-unreachable",
        (Outcome.UNREACHABLE, "not_acknowledged"), (Outcome.UNREACHABLE, "no_route"),
    ),
], ids=["dropped there", "dropped back", "reset", "no route"])  # fmt: skip
async def test_firewalls(
    key: Path, rule: str, kept: tuple[Outcome, str], new: tuple[Outcome, str]
) -> None:
    """Dropped packets make a node unreachable, a reset refuses; both end with the firewall."""
    with network_namespace():
        table = (
            "add table inet test; add chain inet test in { type filter hook input priority 0; }; "
        )

        async def nft(*commands: str) -> None:
            done = await asyncio.create_subprocess_exec("nft", "".join(commands))
            assert await done.wait() == 0

        async with talking(keyed(key)) as (node, client):
            await ping(client)
            await nft(table, f"add rule inet test in {rule.format(port=node.port)}")
            watch = Stopwatch()
            for outcome, reason in (kept, new):
                deadline = 1.0 if reason in NO_ANSWER else PATIENT
                with pytest.raises(PeerError) as caught:
                    await ping(client, deadline)
                assert caught.value.outcome is outcome
                # A late acknowledgment of the call before ends a kept connection by itself.
                told = {reason, "refused"} if reason == "reset" else {reason}
                assert caught.value.reason in told
            assert watch.seconds() < 3.0
            await nft("delete table inet test")
            await ping(client)


async def test_calls_come_from_the_listen_address(key: Path) -> None:
    """A node calls from the address that it listens on, which is the one that others know it by;
    its port is chosen when it connects (`IP_BIND_ADDRESS_NO_PORT`), and need not be free elsewhere.
    """
    async with talking(
        keyed(key), type(keyed(key))(listen_address="127.0.0.9:0", key_file=key)
    ) as (node, client):
        await ping(client)
        assert set(node.server._gate._open) == {"127.0.0.9"}
        (link,) = client._pool._idle
        assert link._socket.getsockopt(socket.SOL_IP, 24) == 1


async def test_clocks_that_differ(key: Path) -> None:
    """Clocks do not matter: nothing that is signed has a time."""
    found = glob.glob("/usr/lib/*/faketime/libfaketime.so.1")
    if not found:
        pytest.skip("libfaketime is not installed")
    fake = {
        **os.environ,
        "LD_PRELOAD": found[0],
        "FAKETIME": "+10y",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
    with listener_process({"key_file": str(key)}, fake) as (port, _, _metrics):
        async with calling(keyed(key), port) as client:
            answer = await ping(client)
            assert abs(answer["clock"] - time.time()) > 250
            await ping(client)


async def test_cancelled_call(key: Path) -> None:
    """A call that is given up leaves no connection with an answer to come."""
    asked = asyncio.Event()

    async def never(_sender: str, _body: dict[str, object]) -> dict[str, object]:
        asked.set()
        await asyncio.Event().wait()
        return {}

    async with talking(keyed(key), handlers={"echo": never}) as (node, client):
        call = asyncio.create_task(ping(client))
        await asked.wait()
        assert node.metric("connections") == 1
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await eventually(lambda: node.metric("connections") == 0)
        assert metric(client, "client_connections") == 0
