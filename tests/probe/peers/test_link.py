"""Answers are read in the one form that a peer sends.

What else a server may send is refused, whoever it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshealthd.probe.observation import Outcome
from dshealthd.probe.peers.link import BadAnswer, parse_head
from dshealthd.probe.peers.protocol import RequestClaim, parse_answer, request_mac
from tests.probe.peering import KEY, calling, fails, impersonating, keyed, ping, secret

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator
    from pathlib import Path

GOOD = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX: a b"


def test_head() -> None:
    """Status, length and headers, names in lower case, are read; a server that closes says so."""
    head = parse_head(GOOD)
    assert (head.status, head.length, head.headers, head.last) == (
        200,
        2,
        {"content-length": "2", "x": "a b"},
        False,
    )
    assert parse_head(GOOD + b"\r\nConnection: Close").last


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"HTTP/1.1 200 OK",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2",
        b"HTTP/1.1 0200 OK\r\nContent-Length: 2",
        b"HTTP/1.1 200 OK\nContent-Length: 2",
        GOOD + b"\r\nContent-Length: 2",
        GOOD + b"\r\nx: again",
        GOOD + b"\r\nTransfer-Encoding: chunked",
        GOOD + b"\r\nContent-Encoding: gzip",
        GOOD + b"\r\n folded",
        GOOD + b"\r\nbad name: a",
        GOOD + b"\r\nY: \x00",
        GOOD + b"\r\nY: \xff",
        GOOD + b"\nY: a",
        GOOD.replace(b": 2", b": -2"),
        GOOD.replace(b": 2", b": 2, 2"),
        GOOD.replace(b": 2", b": 0x2"),
        GOOD.replace(b": 2", b": 65537"),
        GOOD.replace(b": 2", b": 999999999"),
    ],
)
def test_heads_that_are_none(head: bytes) -> None:
    """What could be read in two ways, or asks for more than a peer's answer has, is no answer."""
    with pytest.raises(BadAnswer):
        parse_head(head)


@given(
    st.text(max_size=80)
    | st.lists(
        st.sampled_from(["dshealthd1", "a", "b", "-", "0" * 32, "F" * 32, ""]), max_size=7
    ).map(" ".join)
)
def test_any_text_is_a_claim_or_none(header: str) -> None:
    """A claim is read in one form only: writing it gives the same header."""
    claim = RequestClaim.parse(header)
    assert claim is None or str(claim) == header
    parsed = parse_answer(header)
    assert parsed is None or " ".join(parsed) == header


@given(
    st.lists(st.sampled_from(["a", "b", "ab", "a b", ""]), min_size=4, max_size=4),
    st.lists(st.sampled_from(["a", "b", "ab"]), min_size=4, max_size=4),
)
def test_no_two_claims_have_one_mac(one: list[str], other: list[str]) -> None:
    """The MAC tells fields apart that look the same side by side."""
    first, second = (request_mac(b"k", "p", b"", RequestClaim(*fields)) for fields in (one, other))
    assert (first == second) == (one == other)


@pytest.mark.parametrize(
    "answer",
    [
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\n",
        b"x" * 5000,
    ],
    ids=["garbage", "chunked", "more", "endless"],
)
async def test_servers_that_are_no_peers(tmp_path: Path, answer: bytes) -> None:
    """Whatever a server sends, the call ends at once as failed, and its connection with it."""

    async def other(requests: AsyncIterator[bytes], writer: asyncio.StreamWriter) -> None:
        async for _ in requests:
            writer.write(answer)

    async with (
        impersonating(other) as port,
        calling(keyed(secret(tmp_path, "key", KEY)), port) as client,
    ):
        await fails(ping(client), Outcome.FAILED, "bad_answer")
        assert len(client._pool) == 0
