"""The peer API with a shared key: who is let in, who is not, and that strangers learn nothing."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from dshealthd.core.schema import SchemaError, dumps
from dshealthd.core.timing import time_limit
from dshealthd.probe.observation import Outcome
from dshealthd.probe.peers import client as module
from dshealthd.probe.peers import server
from dshealthd.probe.peers.messages import METHODS, VERSIONS
from dshealthd.probe.peers.protocol import Refusal, to_frame
from tests.probe.peering import (
    OTHER_KEY,
    PATIENT,
    PING,
    Time,
    calling,
    connected,
    echo,
    fails,
    impersonating,
    keyed,
    listening,
    metric,
    ping,
    secret,
    talking,
)
from tests.waiting import eventually

COUNTED = 5.0
MAX_MESSAGE = 65_536
MAX_PAYLOAD = 48_000

BODY = json.dumps({"clock": 1.5, "payload": "cGluZw=="}).encode()
BUSY, DEFECT = "busy_gpu", "where it went wrong"
ECHO = f"echo {VERSIONS['echo']} ".encode()
REQUEST = ECHO + BODY
ANSWERED = b"ok {"


@pytest.mark.parametrize("size", [0, 4, MAX_PAYLOAD])
async def test_call_and_answer(key: Path, size: int) -> None:
    """A call brings the handler's answer, bytes as bytes, over one connection that is kept."""
    async with talking(keyed(key)) as (node, client):
        for _ in range(5):
            answer = await client.call(
                "b", "echo", {"clock": 1.5, "payload": b"\xff" * size}, PATIENT
            )
            assert answer["payload"] == b"\xff" * size
        assert metric(client, "client_connections_opened_total") == 1
        assert metric(client, "calls_total", "echo", "ok") == 5
        assert node.metric("requests_total", "echo", "ok") == 5


async def test_handler_gets_sender_and_values(key: Path) -> None:
    """A handler is given the name that was proved and values of the declared types."""
    seen = []

    async def handler(sender: str, body: dict[str, Any]) -> dict[str, Any]:
        seen.append((sender, body))
        return {"number": 7}

    async with talking(keyed(key), handlers={"store": handler}) as (_, client):
        message = {"round": "r1", "op": "add", "key": "k", "amount": 7, "timeout": 1.0}
        assert await client.call("b", "store", message, PATIENT) == {"number": 7}
    assert seen == [("a", message)]


async def test_refusal_of_a_handler_is_told(key: Path) -> None:
    """A handler's refusal is a decline with its reason, and counted on both sides."""

    async def handler(_sender: str, _body: dict[str, Any]) -> dict[str, Any]:
        raise Refusal(BUSY)

    async with talking(keyed(key), handlers={"echo": handler}) as (node, client):
        await fails(ping(client), Outcome.DECLINED, "busy_gpu")
        await fails(ping(client), Outcome.DECLINED, "busy_gpu")
        assert metric(client, "client_connections_opened_total") == 1
        assert metric(client, "calls_total", "echo", "declined") == 2
        assert node.metric("requests_total", "echo", "declined") == 2


async def test_defect_of_a_handler_is_not_told(key: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An exception in a handler is in this node's log, not in its answer; all goes on."""
    with caplog.at_level(logging.ERROR):

        async def handler(_sender: str, body: dict[str, Any]) -> dict[str, Any]:
            if body["clock"] == 0:
                raise KeyError(DEFECT)
            return await echo("a", body)

        async with talking(keyed(key), handlers={"echo": handler}) as (node, client):
            await fails(
                client.call("b", "echo", {**PING, "clock": 0.0}, PATIENT),
                Outcome.FAILED,
                "peer_error",
            )
            async with connected(node) as raw:
                request = REQUEST.replace(b"1.5", b"0.0")
                assert await raw.call(await raw.begin(), request) == b"peer_error"
            await ping(client)
    assert "where it went wrong" in caplog.text
    caplog.clear()


async def test_handler_that_takes_too_long(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its caller is told that before it gives up: the agent answers, and hangs in this call."""

    async def slow(_sender: str, body: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(PATIENT)
        return body

    limits = []

    def soon(seconds: float) -> Any:
        limits.append(seconds)
        return time_limit(0.01)

    monkeypatch.setattr(server, "time_limit", soon)
    async with talking(keyed(key), handlers={"echo": slow}) as (node, client):
        await fails(ping(client), Outcome.HUNG, "timed_out")
        assert node.metric("requests_total", "echo", "timed_out") == 1
    assert limits == [25.0]


async def test_wrong_key(key: Path, tmp_path: Path) -> None:
    """Another key is refused without a word about it, counted, and unauthorized for the caller."""
    other = keyed(secret(tmp_path, "other", OTHER_KEY))
    async with talking(keyed(key), other) as (node, client):
        await fails(ping(client), Outcome.UNAUTHORIZED, "rejected")
        assert node.refused("key") == 1
        assert metric(client, "calls_total", "echo", "unauthorized") == 1
        async with connected(node) as raw:
            session = await raw.begin(OTHER_KEY)
            assert await raw.ask(session.sign("request", REQUEST)) == b""
            assert await raw.closed()


async def test_server_that_does_not_know_the_key(key: Path) -> None:
    """What answers without the key is not believed, however good its answer looks."""

    async def impostor(frames: AsyncIterator[bytes], writer: asyncio.StreamWriter) -> None:
        async for _ in frames:
            writer.write(to_frame(b"0" * 32))  # a challenge, and then a MAC
            async for _ in frames:
                writer.write(to_frame(b"1" * 32 + b'ok {"clock":1.5,"payload":"cGluZw=="}'))

    async with impersonating(impostor) as port, calling(keyed(key), port) as client:
        await fails(ping(client), Outcome.UNAUTHORIZED, "answer_not_signed")


async def test_answer_of_an_earlier_request_is_not_believed(key: Path) -> None:
    """A recorded answer does not pass as the answer to a later request, although the message is the
    same: neither on its connection nor on another one.
    """
    recorded: list[bytes] = []
    async with listening(keyed(key)) as node:

        async def between(frames: AsyncIterator[bytes], writer: asyncio.StreamWriter) -> None:
            at = 0
            async with connected(node) as onward:
                async for frame in frames:
                    if len(recorded) < 2:  # a challenge, then an answer
                        recorded.append(to_frame(await onward.ask(frame)))
                    writer.write(recorded[min(at, 1)])
                    at += 1

        async with impersonating(between) as port, calling(keyed(key), port) as client:
            await ping(client)
            for _ in range(2):
                await fails(ping(client), Outcome.UNAUTHORIZED, "answer_not_signed")


async def test_replayed_request(key: Path) -> None:
    """The same bytes are refused a second time as a stranger's, on any connection."""
    async with listening(keyed(key)) as node, connected(node) as first, connected(node) as second:
        session = await first.begin()
        bytes_ = session.sign("request", REQUEST)
        answer = session.verified("answer", await first.ask(bytes_))
        assert answer is not None
        assert answer.startswith(ANSWERED)
        await second.begin()
        for raw in (first, second):
            assert await raw.ask(bytes_) == b""
            assert await raw.closed()
        assert node.refused("key") == 2
        assert node.metric("requests_total", "echo", "ok") == 1


@pytest.mark.parametrize(("sender", "receiver", "outcome", "reason"), [
    ("a", "c", Outcome.DECLINED, "wrong_receiver"),
    ("stranger", "b", Outcome.DECLINED, "not_a_member"),
    ("b", "b", Outcome.DECLINED, "own_name"),
])  # fmt: skip
async def test_wrong_names(
    key: Path, sender: str, receiver: str, outcome: Outcome, reason: str
) -> None:
    """A node with the key that calls another one than it means, is no member, or has the receiver's
    own name is told so.
    """
    async with listening(keyed(key)) as node, calling(keyed(key), node.port, me=sender) as client:
        await fails(client.call(receiver, "echo", PING, PATIENT), outcome, reason)
        assert node.refused(reason) == 1


async def test_membership_is_asked_each_time(key: Path) -> None:
    """A node that is no member any more is refused on the connection that it has."""
    members = [("a", "b")]
    async with talking(keyed(key), members=lambda: members[0]) as (_, client):
        await ping(client)
        members[0] = ("b", "c")
        await fails(ping(client), Outcome.DECLINED, "not_a_member")


SMUGGLED = {
    "two requests": lambda frame: frame + frame,
    "a request and more": lambda frame: frame + b"\0",
    "HTTP": lambda _: b"POST /peer/v1/echo HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
    "too long": lambda frame: (MAX_MESSAGE + 33).to_bytes(4) + frame[4:],
}


@pytest.mark.parametrize("change", SMUGGLED.values(), ids=SMUGGLED)
async def test_smuggled_requests(key: Path, change: Callable[[bytes], bytes]) -> None:
    """Data that could be read in two ways ends the connection, and none of it is a request."""
    async with listening(keyed(key)) as node, connected(node) as raw:
        session = await raw.begin()
        await raw.call(session, REQUEST)
        raw.writer.write(change(session.sign("request", REQUEST)))
        assert await raw.closed()
        assert node.refused("malformed") == 1
        assert node.metric("requests_total", "echo", "ok") == 1
        assert node.metric("connections") == 0


async def test_request_before_the_answer(key: Path) -> None:
    """A caller that does not wait for its answer gets none."""
    entered, release = asyncio.Event(), asyncio.Event()

    async def slow(_sender: str, body: dict[str, Any]) -> dict[str, Any]:
        entered.set()
        await release.wait()
        return body

    async with listening(keyed(key), handlers={"echo": slow}) as node, connected(node) as raw:
        session = await raw.begin()
        raw.writer.write(session.sign("request", REQUEST))
        await entered.wait()
        raw.writer.write(session.sign("request", REQUEST))
        assert await raw.closed()
        assert node.refused("malformed") == 1


@pytest.mark.parametrize("room", [0, -1])
async def test_oversized_message_is_not_sent(
    key: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """A message that is larger than the largest is an error of the caller, not of the peer."""
    size = len(ECHO + dumps(PING, METHODS["echo"].request))
    monkeypatch.setattr(module, "MAX_MESSAGE", size + room)
    async with talking(keyed(key)) as (_, client):
        with pytest.raises(SchemaError, match="too large") if room < 0 else nullcontext():
            await ping(client)
        assert metric(client, "client_connections_opened_total") == (room == 0)


@pytest.mark.parametrize("body", [b"{", b'{"clock":1,"payload":"","path":"/etc/passwd"}'])
async def test_malformed_message(key: Path, body: bytes) -> None:
    """A signed message that is not what its method takes never reaches the handler. Its sender is
    told, and may go on.
    """
    async with listening(keyed(key)) as node, connected(node) as raw:
        session = await raw.begin()
        assert await raw.call(session, ECHO + body) == b"malformed"
        assert (await raw.call(session, REQUEST)).startswith(ANSWERED)
        assert node.refused("malformed") == 1


@pytest.mark.parametrize("called", [
    b"", b" ", b"echo ", b"echo 00000000 ", b"ECHO" + ECHO[4:], b"echo/../summary" + ECHO[4:],
    b"summary" + ECHO[4:], b"document ",
])  # fmt: skip
@pytest.mark.parametrize("body", [BODY, b"{", b'{"a": "b c"}'])
async def test_calls_of_another_version(key: Path, called: bytes, body: bytes) -> None:
    """A call of another version, or of a method that is not served, is told so, whatever its
    message: members of older releases state no version, and call `document`.
    """
    async with listening(keyed(key)) as node, connected(node) as raw:
        assert await raw.call(await raw.begin(), called + body) == b"version_differs"
        assert node.refused("version_differs") == 1


@pytest.mark.parametrize("claim", [
    b"",
    b"Basic YTpi",
    b"dshealthd2 a b",
    b"dshealthd2 a b " + b"0" * 31,
    b"dshealthd2 a/b b " + b"0" * 32,
    b"dshealthd1 a b " + b"0" * 32,
    b"dshealthd2 a b " + b"\xff" * 32,
])  # fmt: skip
async def test_no_credentials(key: Path, claim: bytes) -> None:
    """A connection that does not begin as a peer's ends, and learns nothing."""
    async with listening(keyed(key)) as node:
        assert await node.raw(to_frame(claim)) == b""
        assert node.refused("no_credentials") == 1


async def test_rate_limit(key: Path) -> None:
    """A sender beyond its rate is declined with the reason for a while; others are not."""
    clock = Time()
    async with (
        listening(keyed(key), monotonic=clock) as node,
        calling(keyed(key), node.port) as client,
        calling(keyed(key), node.port, me="c") as other,
    ):
        node.server._guard._calls["a"] = 997
        for _ in range(3):
            await ping(client)
        await fails(ping(client), Outcome.DECLINED, "rate_limited")
        await ping(other)
        clock.now += 0.9 * COUNTED
        await fails(ping(client), Outcome.DECLINED, "rate_limited")
        clock.now += 0.1 * COUNTED
        await ping(client)
        assert node.refused("rate_limited") == 2


async def test_calls_at_once_are_bounded(key: Path) -> None:
    """Many calls to one peer share a few connections; those without a turn in time say so."""
    release = asyncio.Event()
    held: list[str] = []

    async def slow(sender: str, body: dict[str, Any]) -> dict[str, Any]:
        held.append(sender)
        await release.wait()
        return await echo("a", body)

    async with talking(keyed(key), handlers={"echo": slow}) as (_, client):
        waiting = [asyncio.create_task(ping(client)) for _ in range(4)]
        await eventually(lambda: len(held) == 4)
        await fails(ping(client, 0.1), Outcome.FAILED, "too_many_calls")
        release.set()
        await asyncio.gather(*waiting)
        assert metric(client, "client_connections_opened_total") == 4


async def test_what_is_refused_counts_from_zero(key: Path) -> None:
    """What a listener counts begins at zero, so that its first increase is seen."""
    async with listening(keyed(key)) as node:
        names = {(sample.metric.name, sample.labels) for sample in node.server.samples()}
        assert ("dshealthd_probe_peer_requests_refused_total", ("key",)) in names
        assert ("dshealthd_probe_peer_connections_refused_total", ("replaced",)) in names
