"""Frames are cut in the one way in which a peer sends them, and each counts in one place alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshealthd.probe.observation import Outcome
from dshealthd.probe.peers.protocol import (
    FrameError,
    Frames,
    Hello,
    PeerSession,
    parse_challenge,
    to_frame,
)
from tests.probe.peering import CHALLENGE, KEY, calling, fails, impersonating, keyed, ping, secret

MAX_MESSAGE = 65_536

HELLO = Hello("a", "b", CHALLENGE)


@given(st.lists(st.binary(max_size=200), max_size=5), st.integers(1, 50))
def test_frames_arrive_as_they_were_sent(contents: list[bytes], piece: int) -> None:
    """In pieces of any size, one frame after the other."""
    frames = Frames()
    found = []
    for content in contents:
        data = to_frame(content)
        found += [frames.add(data[at : at + piece]) for at in range(0, len(data), piece)]
    assert [frame for frame in found if frame is not None] == contents


@pytest.mark.parametrize(("data", "bad"), [
    ((MAX_MESSAGE + 32).to_bytes(4), False),
    ((MAX_MESSAGE + 33).to_bytes(4), True),
    (b"POST / HTTP/1.1", True),
    (to_frame(b"a") + b"b", True),
])  # fmt: skip
def test_data_that_is_no_frame(data: bytes, *, bad: bool) -> None:
    """What is too long for a message, or follows before an answer, ends the connection; nothing is
    kept of it.
    """
    frames = Frames()
    if bad:
        with pytest.raises(FrameError):
            frames.add(data)
    else:
        assert frames.add(data) is None


@given(
    st.binary(max_size=80)
    | st.lists(
        st.sampled_from(["dshealthd2", "a", "b", "-", "0" * 32, "F" * 32, ""]), max_size=5
    ).map(lambda words: " ".join(words).encode())
)
def test_any_bytes_are_a_claim_or_none(frame: bytes) -> None:
    """A claim and a challenge are read in one form only: writing it gives the same bytes."""
    hello = Hello.parse(frame)
    assert hello is None or bytes(hello) == frame
    challenge = parse_challenge(frame)
    assert challenge is None or challenge.encode() == frame


@pytest.mark.parametrize(
    "other",
    [
        PeerSession(KEY[::-1].encode(), HELLO, "0" * 32),
        PeerSession(KEY.encode(), HELLO, "1" * 32),
        *(
            PeerSession(KEY.encode(), HELLO._replace(**{field: value}), "0" * 32)
            for field, value in (("sender", "c"), ("receiver", "c"), ("challenge", "d" * 32))
        ),
        # The fields tell each other apart that look the same side by side.
        PeerSession(KEY.encode(), Hello("a b", "", CHALLENGE), "0" * 32),
    ],
)
def test_a_signature_counts_in_its_session_alone(other: PeerSession) -> None:
    """Another key, name or challenge makes another session."""
    frame = PeerSession(KEY.encode(), HELLO, "0" * 32).sign("request", b"echo {}")[4:]
    assert PeerSession(KEY.encode(), HELLO, "0" * 32).verified("request", frame) == b"echo {}"
    assert other.verified("request", frame) is None


def test_a_signature_counts_once() -> None:
    """Neither a request again, nor an answer again, nor one as the other, nor another content."""
    here, there = (PeerSession(KEY.encode(), HELLO, "0" * 32) for _ in range(2))
    request = here.sign("request", b"echo")[4:]
    assert there.verified("answer", request) is None
    assert there.verified("request", request[:-1] + b"p") is None
    assert there.verified("request", b"") is None
    assert there.verified("request", request) == b"echo"
    answer = there.sign("answer", b"ok")[4:]
    assert there.verified("request", request) is None
    assert here.verified("answer", answer) == b"ok"
    assert here.verified("answer", answer) is None


@pytest.mark.parametrize("answer", [
    b"HTTP/1.1 200 OK\r\n\r\n",
    to_frame(b"0" * 31),
    to_frame(b"Z" * 32),
    to_frame(b"0" * 32) + b"more",
    b"\xff" * 5000,
], ids=["HTTP", "short", "no challenge", "more", "endless"])  # fmt: skip
async def test_servers_that_are_no_peers(tmp_path: Path, answer: bytes) -> None:
    """Whatever a server sends, the call ends at once as failed, and its connection with it."""

    async def other(frames: AsyncIterator[bytes], writer: asyncio.StreamWriter) -> None:
        async for _ in frames:
            writer.write(answer)

    async with (
        impersonating(other) as port,
        calling(keyed(secret(tmp_path, "key", KEY)), port) as client,
    ):
        await fails(ping(client), Outcome.FAILED, "bad_answer")
        assert len(client._pool) == 0
