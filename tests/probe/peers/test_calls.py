"""The peer API with a shared key: who is let in, who is not, and that strangers learn nothing."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING

import pytest

from dshealthd.core.options import Errors, decode
from dshealthd.core.schema import SchemaError
from dshealthd.probe.observation import Outcome
from dshealthd.probe.options import PeerOptions
from dshealthd.probe.peers.messages import MAX_PAYLOAD
from dshealthd.probe.peers.nonces import LIFETIME, Nonces
from dshealthd.probe.peers.protocol import (
    ABSENT,
    ANSWER,
    MAX_BODY,
    NONCE,
    PREFIX,
    Refusal,
    RequestClaim,
    parse_answer,
)
from tests.probe.peering import (
    ECHO,
    OTHER_KEY,
    PATIENT,
    PING,
    Node,
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
    request,
    secret,
    signed,
    talking,
    until,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path
    from typing import Any

BODY = json.dumps({"clock": 1.5, "payload": "cGluZw=="}).encode()
BUSY, DEFECT = "busy_gpu", "where it went wrong"
UNAUTHORIZED = (403, b'{"refusal": "unauthorized"}')


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
                body = BODY.replace(b"1.5", b"0.0")
                head, text = await raw.ask(request(signed(await raw.nonce(), body), body))
                assert (head.status, text) == (500, b"Internal Server Error\n")
            await ping(client)
    assert "where it went wrong" in caplog.text
    caplog.clear()


async def test_wrong_key(key: Path, tmp_path: Path) -> None:
    """Another key is refused without a word about it, counted, and unauthorized for the caller."""
    other = keyed(secret(tmp_path, "other", OTHER_KEY))
    async with talking(keyed(key), other) as (node, client):
        await fails(ping(client), Outcome.UNAUTHORIZED, "rejected")
        assert node.refused("key") == 1
        assert metric(client, "calls_total", "echo", "unauthorized") == 1
        async with connected(node) as raw:
            claim = signed(await raw.nonce(), BODY, OTHER_KEY)
            head, text = await raw.ask(request(claim, BODY))
            assert (head.status, text) == UNAUTHORIZED
            assert set(head.headers) <= {
                "content-type",
                "content-length",
                "date",
                "server",
                "connection",
            }
            assert await raw.closed()


async def test_server_that_does_not_know_the_key(key: Path) -> None:
    """What answers without the key is not believed, however good its answer looks."""

    async def impostor(requests: AsyncIterator[bytes], writer: asyncio.StreamWriter) -> None:
        async for _ in requests:
            answer = b'{"clock":1.5,"payload":"cGluZw=="}'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n" % len(answer))
            writer.write(f"{ANSWER}: {'0' * 64} {'1' * 64}\r\n\r\n".encode() + answer)

    async with impersonating(impostor) as port, calling(keyed(key), port) as client:
        await fails(ping(client), Outcome.UNAUTHORIZED, "answer_not_signed")


async def test_answer_of_an_earlier_request_is_not_believed(key: Path) -> None:
    """A recorded answer does not pass as the answer to a later request, although nonce and message
    are the same.
    """
    recorded: list[bytes] = []
    async with listening(keyed(key)) as node:

        async def between(requests: AsyncIterator[bytes], writer: asyncio.StreamWriter) -> None:
            async with connected(node) as onward:
                async for request in requests:
                    if len(recorded) < 2:  # a nonce, then a call
                        recorded.append(await onward.relay(request))
                    writer.write(recorded[-1])

        async with impersonating(between) as port, calling(keyed(key), port) as client:
            await ping(client)
            await fails(
                ping(client),
                Outcome.UNAUTHORIZED,
                "answer_not_signed",
            )


async def test_replayed_request(key: Path) -> None:
    """The same bytes are refused a second time as a stranger's, on any connection."""
    async with (
        listening(keyed(key)) as node,
        connected(node) as first,
        connected(node) as second,
    ):
        bytes_ = request(signed(await first.nonce(), BODY), BODY)
        head, _ = await first.ask(bytes_)
        assert head.status == 200
        for raw in (first, second):
            head, text = await raw.ask(bytes_)
            assert (head.status, text) == UNAUTHORIZED
            assert await raw.closed()
        assert node.refused("replayed") == 2
        assert node.metric("requests_total", "echo", "ok") == 1


async def test_tampered_request(key: Path) -> None:
    """A change of body, path, sender, receiver, nonce or challenge makes the signature void."""
    async with listening(keyed(key), handlers={"echo": echo, "summary": echo}) as node:
        for change in ("body", "path", "sender", "receiver", "nonce", "challenge", "mac"):
            async with connected(node) as raw:
                claim = signed(await raw.nonce(), BODY)
                values = {
                    "sender": "c",
                    "receiver": "c",
                    "nonce": await raw.nonce(),
                    "challenge": "d" * 32,
                    "mac": "0" * 64,
                }
                fields = {name: getattr(claim, name) for name in RequestClaim.__slots__}
                if change in values:
                    fields[change] = values[change]
                tampered = RequestClaim(**fields)
                body = BODY.replace(b"1.5", b"1.6") if change == "body" else BODY
                head, text = await raw.ask(
                    request(tampered, body, "/peer/v1/summary" if change == "path" else ECHO)
                )
                assert (head.status, text) == UNAUTHORIZED, change
        assert node.refused("key") == 7


async def test_request_without_a_challenge(key: Path) -> None:
    """A request is refused whose answer its sender could not tell from a recorded one, though it is
    signed with the key.
    """
    async with listening(keyed(key)) as node, connected(node) as raw:
        claim = signed(await raw.nonce(), BODY, challenge=ABSENT)
        head, text = await raw.ask(request(claim, BODY))
        assert (head.status, text) == UNAUTHORIZED
        assert node.refused("key") == 1
        assert node.metric("requests_total", "echo", "ok") == 0


async def test_request_for_a_nonce_has_no_body(key: Path) -> None:
    """What costs this node a nonce, which anybody may request, costs it nothing else."""
    async with listening(keyed(key)) as node, connected(node) as raw:
        head, _ = await raw.ask(request(RequestClaim("a", "b"), BODY, PREFIX + NONCE))
        assert head.status != 200
        assert node.refused("malformed") == 1


def test_spent_nonces_are_bounded() -> None:
    """A sender with the key cannot make this node remember more nonces than its rate allows,
    whatever it is refused for afterwards; those of others are spent as before.
    """
    clock = Time()
    nonces = Nonces(rate=2.0, burst=5, monotonic=clock)
    most = 5 + 2 * LIFETIME * 2.0
    spent = [nonces.spend(nonces.issue("a"), "a") for _ in range(200)]
    assert most <= spent.count(True) <= most + 1
    assert spent[:40] == [True] * 40
    assert nonces.spend(nonces.issue("b"), "b")
    clock.now += LIFETIME + 0.1
    assert nonces.spend(nonces.issue("a"), "a")


def test_a_nonce_lives_for_ten_seconds() -> None:
    """To the end of its life it is fresh, and not a moment longer."""
    clock = Time()
    nonces = Nonces(rate=2.0, burst=5, monotonic=clock)
    nonce = nonces.issue("a")
    clock.now += LIFETIME
    assert nonces.fresh(nonce, "a")
    clock.now += 0.001
    assert not nonces.fresh(nonce, "a")


async def test_nonce_is_of_one_sender_and_ages(key: Path) -> None:
    """A nonce that was given to another sender, is older than 10 s, or comes from an earlier run is
    stale; a new one is with the answer.
    """
    clock = Time()
    async with listening(keyed(key), monotonic=clock) as node, listening(keyed(key)) as earlier:
        async with connected(earlier) as raw:
            strange = await raw.nonce()
        for sender, age, nonce in (("c", 0.0, ""), ("a", 10.1, ""), ("a", 0.0, strange)):
            async with connected(node) as raw:
                given = nonce or await raw.nonce("a")
                clock.now += age
                head, text = await raw.ask(request(signed(given, BODY, sender=sender), BODY))
                assert (head.status, text) == (401, b'{"refusal": "stale_nonce"}')
                parsed = parse_answer(head.headers[ANSWER.lower()])
                assert parsed is not None
                head, _ = await raw.ask(request(signed(parsed[0], BODY, sender=sender), BODY))
                assert head.status == 200
        assert node.refused("stale_nonce") == 3


async def test_client_gets_over_a_stale_nonce(key: Path) -> None:
    """A client whose nonce has become too old for the receiver uses the new one that it is told,
    within the same call.
    """
    clock = Time()
    async with talking(keyed(key), monotonic=clock) as (node, client):
        await ping(client)
        clock.now += 60
        await ping(client)
        assert node.refused("stale_nonce") == 1
        assert metric(client, "client_connections_opened_total") == 1


@pytest.mark.parametrize(
    ("sender", "receiver", "outcome", "reason"),
    [
        ("a", "c", Outcome.UNAUTHORIZED, "wrong_receiver"),
        ("stranger", "b", Outcome.DECLINED, "not_a_member"),
        ("b", "b", Outcome.UNAUTHORIZED, "own_name"),
    ],
)
async def test_wrong_names(
    key: Path, sender: str, receiver: str, outcome: Outcome, reason: str
) -> None:
    """A node with the key that calls another one than it means, is no member, or has the receiver's
    own name is told so.
    """
    async with (
        listening(keyed(key)) as node,
        calling(keyed(key), node.port, me=sender) as client,
    ):
        await fails(client.call(receiver, "echo", PING, PATIENT), outcome, reason)
        assert node.refused(reason) == 1


async def test_membership_is_asked_each_time(key: Path) -> None:
    """A node that is no member any more is refused on the connection that it has."""
    members = [("a", "b")]
    async with talking(keyed(key), members=lambda: members[0]) as (_, client):
        await ping(client)
        members[0] = ("b", "c")
        await fails(ping(client), Outcome.DECLINED, "not_a_member")


HEAD = f"POST {ECHO} HTTP/1.1\r\nHost: b\r\n"
SMUGGLED = {
    "two lengths": "Content-Length: 4\r\nContent-Length: 5\r\n",
    "length list": "Content-Length: 4, 4\r\n",
    "signed length": "Content-Length: +4\r\n",
    "chunked": "Transfer-Encoding: chunked\r\n",
    "both": "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
    "obscured": "Transfer-Encoding : chunked\r\nContent-Length: 4\r\n",
    "folded": "X: a\r\n b\r\nContent-Length: 4\r\n",
    "bare CR": "X: a\rContent-Length: 4\r\n",
    "no length": "Content-Type: application/json\r\n",
    "zipped": "Content-Encoding: gzip\r\nContent-Length: 4\r\n",
    "upgrade": "Connection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 4\r\n",
    "expect": "Expect: 100-continue\r\nContent-Length: 4\r\n",
}


@pytest.mark.parametrize("extra", SMUGGLED.values(), ids=SMUGGLED)
async def test_smuggled_requests(key: Path, extra: str) -> None:
    """A request whose body could be read in two ways, or has to be unpacked, gets one refusal, and
    what follows it is no request.
    """
    async with listening(keyed(key)) as node:
        smuggled = request(RequestClaim("a", "b"), b"", "/peer/v1/nonce")
        claim = signed("0" * 64, b"abcd")
        answer = await node.raw(
            f"{HEAD}Authorization: {claim}\r\n{extra}\r\nabcd".encode() + smuggled
        )
        assert answer.startswith((b"HTTP/1.0 400 ", b"HTTP/1.1 400 "))
        assert answer.count(b"HTTP/1.") == 1
        assert node.refused("malformed") == 1
        assert node.metric("connections") == 0


@pytest.mark.parametrize("length", [MAX_BODY + 1, 10**7, 10**30])
async def test_oversized_body(key: Path, length: int) -> None:
    """A body beyond 64 KiB is refused by its announced length; nobody waits for it."""
    async with listening(keyed(key)) as node:
        claim = signed("0" * 64, b"")
        answer = await node.raw(request(claim, b"x" * 100, extra=f"Content-Length: {length}\r\n"))
        assert answer.startswith((b"HTTP/1.1 413 ", b"HTTP/1.0 400 "))
        assert node.refused("too_large") + node.refused("malformed") == 1


async def test_oversized_message_is_not_sent(key: Path) -> None:
    """A message that is larger than its declaration is an error of the caller, not of the peer."""
    async with talking(keyed(key)) as (_, client):
        with pytest.raises(SchemaError):
            await client.call(
                "b", "echo", {"clock": 1.5, "payload": b"x" * (MAX_PAYLOAD + 1)}, PATIENT
            )
        assert metric(client, "client_connections_opened_total") == 0


MALFORMED = {
    "no JSON": b"{",
    "not UTF-8": b'{"clock":1,"payload":"\xff"}',
    "list": b"[]",
    "deep": b"[" * 60_000,
    "unknown field": b'{"clock":1,"payload":"","path":"/etc/passwd"}',
    "missing field": b'{"clock":1}',
    "field twice": b'{"clock":1,"clock":2,"payload":""}',
    "NaN": b'{"clock":NaN,"payload":""}',
    "infinity": b'{"clock":1e999,"payload":""}',
    "huge integer": b'{"clock":' + b"9" * 60_000 + b',"payload":""}',
    "beyond bounds": b'{"clock":-1,"payload":""}',
    "true for a number": b'{"clock":true,"payload":""}',
    "no base64": b'{"clock":1,"payload":"%%%="}',
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
async def test_malformed_message(key: Path, body: bytes) -> None:
    """A signed message that is not what its method takes never reaches the handler. Its sender is
    told, and may go on.
    """
    async with listening(keyed(key)) as node, connected(node) as raw:
        head, text = await raw.ask(request(signed(await raw.nonce(), body), body))
        assert (head.status, text) == (400, b'{"refusal": "malformed"}')
        parsed = parse_answer(head.headers[ANSWER.lower()])
        assert parsed is not None
        head, _ = await raw.ask(request(signed(parsed[0], BODY), BODY))
        assert head.status == 200
        assert node.refused("malformed") == 1


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", ECHO),
        ("PUT", ECHO),
        ("POST", "/"),
        ("POST", "/metrics"),
        ("POST", f"{ECHO}/../status"),
        ("POST", f"{ECHO}?a"),
        ("POST", f"{PREFIX}document"),
    ],
)
async def test_unknown_methods_and_paths(key: Path, method: str, path: str) -> None:
    """Only the methods that are served have a path; members of older releases call `document`."""
    async with listening(keyed(key)) as node, connected(node) as raw:
        head, text = await raw.ask(
            request(signed(await raw.nonce(), BODY, path=path), BODY, path, method)
        )
        assert (head.status, text) == (404, b'{"refusal": "unknown_method"}')
        assert node.refused("unknown_method") == 1


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Basic YTpi",
        "dshealthd1 a b - -",
        "dshealthd1 a b - - - -",
        "dshealthd1 a/b b - - -",
        "dshealthd1 a b - - XYZ",
    ],
)
async def test_no_credentials(key: Path, header: str) -> None:
    """A request without a claim that can be read is refused before its body."""
    async with listening(keyed(key)) as node:
        extra = f"Authorization: {header}\r\nContent-Length: 60000\r\n"
        answer = await node.raw(request(None, b"", extra=extra))
        assert answer.startswith(b"HTTP/1.1 403 ")
        assert answer.endswith(UNAUTHORIZED[1])
        assert node.refused("no_credentials") == 1


async def test_nonces_are_not_handed_out_for_ever(key: Path) -> None:
    """A connection that asks for nonces and proves nothing ends after a few."""
    async with listening(keyed(key)) as node, connected(node) as raw:
        for _ in range(2):
            await raw.nonce()
        head, _ = await raw.ask(request(RequestClaim("a", "b"), b"", "/peer/v1/nonce"))
        assert head.status == 400
        assert await raw.closed()


async def test_rate_limit(key: Path) -> None:
    """A sender beyond its rate is declined with the reason for a while; others are not."""
    clock = Time()
    options = keyed(key, calls_per_second=2.0, burst=3)
    async with (
        listening(options, monotonic=clock) as node,
        calling(keyed(key), node.port) as client,
        calling(keyed(key), node.port, me="c") as other,
    ):
        for _ in range(3):
            await ping(client)
        await fails(ping(client), Outcome.DECLINED, "rate_limited")
        await ping(other)
        clock.now += 0.5
        await ping(client)
        await fails(ping(client), Outcome.DECLINED, "rate_limited")
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
        await until(lambda: len(held) == 4)
        await fails(ping(client, 0.1), Outcome.FAILED, "too_many_calls")
        release.set()
        await asyncio.gather(*waiting)
        assert metric(client, "client_connections_opened_total") == 4
        assert not client._turns


OFF_BY_DEFAULT = PeerOptions()


async def test_off_until_configured() -> None:
    """Without a listen address nothing is listened on."""
    async with listening(OFF_BY_DEFAULT) as node:
        assert not node.server._listener._sockets


@pytest.mark.parametrize(
    ("table", "error"),
    [
        (
            {"listen_address": ":10062", "key_file": "k"},
            (
                'peer.listen_address: ":10062" names no host; the listener never takes all '
                "addresses by default"
            ),
        ),
        (
            {"listen_address": "b", "key_file": "k"},
            'peer.listen_address: "b" is not "HOST:PORT" or ":PORT" with a port from 0 to 65535',
        ),
        (
            {"listen_address": "b:1"},
            "peer.listen_address: needs key_file, or tls_cert_file, tls_key_file and tls_ca_file",
        ),
        (
            {"tls_cert_file": "c"},
            "peer.tls_cert_file: needs all of tls_cert_file, tls_key_file and tls_ca_file",
        ),
        ({"tls_name": "node"}, "peer.tls_name: must contain {node} once"),
        ({"max_connections": 1}, "peer.max_connections: must be at least 2, not 1"),
    ],
)
def test_options_that_cannot_be(table: dict[str, Any], error: str) -> None:
    """What is wrong with the options is said at its key."""
    errors = Errors()
    decode(PeerOptions, table, "peer", errors)
    assert errors == [error]


async def test_node_type_is_complete() -> None:
    """What a listener counts begins at zero, so that its first increase is seen."""
    async with listening(OFF_BY_DEFAULT) as node:
        assert isinstance(node, Node)
        names = {(sample.metric.name, sample.labels) for sample in node.server.samples()}
        assert ("dshealthd_probe_peer_requests_refused_total", ("key",)) in names
        assert ("dshealthd_probe_peer_connections_refused_total", ("replaced",)) in names


@pytest.mark.parametrize("header", ["", "a", f"{'a' * 32}", f"{'a' * 32} b c", f"{'g' * 32}; -"])
def test_an_answer_s_header_is_two_tokens(header: str) -> None:
    """Nothing else is taken for the nonce and the MAC of an answer."""
    assert parse_answer(header) is None


def test_a_claim_is_of_our_scheme() -> None:
    """Credentials of another scheme are none, however alike their fields are."""
    claim = str(signed("0" * 32, BODY))
    assert RequestClaim.parse(claim) is not None
    assert RequestClaim.parse(f"Basic {claim.partition(' ')[2]}") is None
