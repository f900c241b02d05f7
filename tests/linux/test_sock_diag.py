"""Requests and replies of NETLINK_SOCK_DIAG without a kernel; `test_tcp.py` compares."""

from __future__ import annotations

import errno
import itertools
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any, Self, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dshealthd.linux import sock_diag
from dshealthd.linux.sock_diag import (
    EVERY_STATE,
    Interrupted,
    MalformedReply,
    SocketEnd,
    TcpSocket,
    TcpState,
    dump_request,
    parse,
)

SEQUENCE = 7
DONE, ERROR, OVERRUN, NOOP = 3, 2, 4, 1
INTERRUPTED = 0x10


def message(kind: int, body: bytes, flags: int = 2, sequence: int = SEQUENCE) -> bytes:
    """Return one netlink message, padded as the kernel pads it."""
    return (
        struct.pack("=IHHII", 16 + len(body), kind, flags, sequence, 0)
        + body
        + bytes(-len(body) % 4)
    )


def result(kind: int, code: int) -> bytes:
    """Return the end of a dump or an error."""
    return message(kind, struct.pack("=i", code))


def laid_out(found: TcpSocket) -> bytes:
    """Return a socket as the kernel lays it out: `struct inet_diag_msg`."""
    return (
        struct.pack("=BBBB", socket.AF_INET, found.state, found.timer, 0)
        + struct.pack(">HH", found.port, found.peer_port)
        + bytes(44 + 12)
        + struct.pack("=II", found.uid, found.inode)
    )


def socket_message(found: TcpSocket, attributes: int = 0) -> bytes:
    """Return a socket with so many bytes of attributes."""
    return message(18, laid_out(found) + b"\xaa" * attributes)


ROW = TcpSocket(TcpState.LISTEN, 0, 29500, 0, 1000, 4711)
rows = st.lists(
    st.builds(
        TcpSocket,
        *(st.sampled_from([int(state) for state in TcpState]), st.integers(0, 4)),
        *(st.integers(0, 65535), st.integers(0, 65535)),
        *(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)),
        moved=st.just(0),
    ),
    max_size=20,
)


def test_request_without_filter_is_the_kernel_s_struct() -> None:
    """It is `nlmsghdr` with a dump flag and `inet_diag_req`, with states in their place."""
    sent = dump_request(EVERY_STATE, None, SEQUENCE)
    assert struct.unpack_from("=IHHII", sent) == (76, 18, 0x301, SEQUENCE, 0)
    assert sent[16:68] == bytes(52)
    assert struct.unpack_from("=II", sent, 68) == (0b1111_0111_1110, 0)


def test_request_with_ports_has_bytecode_that_the_kernel_s_audit_accepts() -> None:
    """Two comparisons that jump to an operation or the end; refusal lands 4 bytes beyond."""
    sent = dump_request(TcpState.TIME_WAIT.mask, (29500, 29600), SEQUENCE)
    assert struct.unpack_from("=HH", sent, 76) == (20, 1)
    assert list(struct.iter_unpack("=BBH", sent[80:])) == [
        (2, 8, 20),
        (0, 0, 29500),
        (3, 8, 12),
        (0, 0, 29600),
    ]
    assert struct.unpack_from("=I", sent) == (len(sent),)


@given(rows, st.lists(st.integers(0, 60), min_size=1, max_size=3))
def test_whole_and_mixed_datagrams_are_read_alike(
    sockets: list[TcpSocket], lengths: Sequence[int]
) -> None:
    """Sockets with attributes of any length, equal or not, are read as they were written."""
    datagram = b"".join(
        socket_message(row, length)
        for row, length in zip(sockets, itertools.cycle(lengths), strict=False)
    )
    assert parse(datagram, SEQUENCE) == (sockets, False)


def test_a_refusal_is_the_oserror_it_carries() -> None:
    """NLMSG_ERROR, and an end of dump with an error, raise OSError with its number."""
    for kind in (ERROR, DONE):
        with pytest.raises(OSError, match="netlink") as caught:
            parse(result(kind, -errno.ENOENT), SEQUENCE)
        assert caught.value.errno == errno.ENOENT


def test_lost_or_interrupted_replies_are_said() -> None:
    """NLMSG_OVERRUN and NLM_F_DUMP_INTR, on any message of a datagram, raise Interrupted."""
    for datagram in (
        message(OVERRUN, b""),
        message(18, laid_out(ROW), flags=2 | INTERRUPTED),
        socket_message(ROW) + message(DONE, bytes(4), flags=2 | INTERRUPTED),
    ):
        with pytest.raises(Interrupted):
            parse(datagram, SEQUENCE)


@pytest.mark.parametrize("datagram", [
    b"\0" * 8,
    struct.pack("=IHHII", 0, 18, 2, SEQUENCE, 0),
    struct.pack("=IHHII", 4096, 18, 2, SEQUENCE, 0),
    message(18, bytes(40)),
    message(99, bytes(72)),
    message(18, laid_out(ROW), sequence=SEQUENCE + 1),
    message(DONE, b""),
    result(ERROR, 0),
    socket_message(ROW) + b"\1",
], ids=["short", "length 0", "too long", "short socket", "type", "sequence", "empty end",
        "acknowledgment", "tail"])  # fmt: skip
def test_nonsense_is_malformed(datagram: bytes) -> None:
    """What is no reply to this dump is refused, and not read as fewer sockets."""
    with pytest.raises(MalformedReply):
        parse(datagram, SEQUENCE)


@pytest.mark.parametrize("other", [{"flags": 2 | INTERRUPTED}, {"sequence": SEQUENCE + 1}])
def test_a_datagram_is_of_one_kind_only_if_each_header_is(other: dict[str, int]) -> None:
    """Messages of equal length are read at once, but not past one that says something else."""
    datagram = socket_message(ROW) + message(18, laid_out(ROW), **other) + socket_message(ROW)
    with pytest.raises((Interrupted, MalformedReply)):
        parse(datagram, SEQUENCE)


class Answers:
    """A netlink socket that gives one datagram after another: data, flags, sender's pid."""

    def __init__(self, *given: tuple[bytes, int, int] | OSError) -> None:
        self.given = list(given)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    def sendto(self, _request: bytes, _address: tuple[int, int]) -> None:
        """Take a request."""

    def recvmsg(self, _size: int) -> tuple[bytes, list[Any], int, tuple[int, int]]:
        """Return the next."""
        given = self.given.pop(0)
        if isinstance(given, OSError):
            raise given
        data, flags, sender = given
        return data, [], flags, (sender, 0)


def test_a_datagram_is_whole_and_the_kernel_s() -> None:
    """What is cut off or empty is malformed, and what another process sent is ignored; without a
    buffer in the kernel answers are lost.
    """
    for data, flags in ((b"x", socket.MSG_TRUNC), (b"", 0)):
        with pytest.raises(MalformedReply):
            sock_diag._datagram(cast("socket.socket", Answers((data, flags, 0))))
    for number, expected in ((errno.ENOBUFS, Interrupted), (errno.EIO, OSError)):
        with pytest.raises(expected):
            sock_diag._datagram(cast("socket.socket", Answers(OSError(number, "no answer"))))
    answers = Answers((b"other", 0, 4711), (b"kernel", 0, 0))
    assert sock_diag._datagram(cast("socket.socket", answers)) == b"kernel"


def test_noop_is_skipped() -> None:
    """NLMSG_NOOP counts for nothing."""
    assert parse(message(NOOP, b"") + socket_message(ROW), SEQUENCE) == ([ROW], False)


@settings(max_examples=100)
@given(rows, st.integers(0, 24), st.data())
def test_a_damaged_reply_ends_in_a_known_error(
    sockets: list[TcpSocket], attributes: int, data: st.DataObject
) -> None:
    """A damaged reply gives no more sockets than sent, or one of the three errors."""
    reply = bytearray(
        b"".join(socket_message(row, attributes) for row in sockets) + result(DONE, 0)
    )
    reply[data.draw(st.integers(0, len(reply) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(reply[: data.draw(st.integers(0, len(reply)))])
    try:
        found, _ = parse(cut, SEQUENCE)
    except (OSError, Interrupted, MalformedReply):
        return
    assert len(found) <= len(sockets)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answers]:
    """Return what has dumps answered by these datagrams."""

    def given(*datagrams: bytes) -> Answers:
        made = Answers(*((data, 0, 0) for data in datagrams))
        monkeypatch.setattr(sock_diag, "_diag", lambda: made)
        monkeypatch.setattr(sock_diag, "_sequences", itertools.repeat(SEQUENCE))
        return made

    return given


def test_a_reply_is_read_to_its_end(answers: Callable[..., Answers]) -> None:
    """Datagrams are read until the one that ends the dump, and none after it."""
    made = answers(socket_message(ROW) * 2, socket_message(ROW, 8), result(DONE, 0), b"not read")
    assert sock_diag.dump(EVERY_STATE, None, 1.0) == [ROW] * 3
    assert made.given == [(b"not read", 0, 0)]


def test_a_dump_past_its_budget_ends(answers: Callable[..., Answers]) -> None:
    """A reply without end stops once its budget is spent, with TimeoutError."""
    made = answers(*[socket_message(ROW)] * 20)
    clock = itertools.count()
    with pytest.raises(TimeoutError):
        sock_diag.dump(EVERY_STATE, None, 10.0, lambda: float(next(clock)))
    assert len(made.given) == 10


def test_an_interrupted_dump_is_made_again(answers: Callable[..., Answers]) -> None:
    """Two interruptions are borne; the third is reported, and no part is the whole."""
    lost, whole = socket_message(ROW) + message(OVERRUN, b""), socket_message(ROW) + result(DONE, 0)
    answers(lost, lost, whole)
    assert sock_diag.dump(EVERY_STATE, None, 1.0) == [ROW]
    made = answers(lost, lost, lost, whole)
    with pytest.raises(Interrupted):
        sock_diag.dump(EVERY_STATE, None, 1.0)
    assert len(made.given) == 1


def test_a_lookup_without_a_socket(answers: Callable[..., Answers]) -> None:
    """An answer that ends before one is malformed."""
    answers(result(DONE, 0))
    with pytest.raises(MalformedReply):
        sock_diag.lookup(SocketEnd(bytes(4), 1), SocketEnd(bytes(4), 2))


def test_dumps_leave_no_descriptor_behind() -> None:
    """A hundred dumps of this machine open no more descriptors than one."""
    sock_diag.dump(TcpState.LISTEN.mask, None, 5.0)
    before = os.listdir("/proc/self/fd")
    for _ in range(100):
        sock_diag.dump(TcpState.LISTEN.mask, (1, 65535), 5.0)
    assert len(os.listdir("/proc/self/fd")) == len(before)
