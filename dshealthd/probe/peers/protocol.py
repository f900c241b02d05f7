"""The protocol between two agents: signed frames on one connection, one request at a time.

    caller → scheme, its name, the name of the agent it means, a random challenge
    caller ← a random challenge
    caller → MAC, method, version, message        caller ← MAC, `ok` or a reason, message
    caller → …

A frame is four bytes of length, big-endian, and so many bytes. The MACs are HMAC-SHA256 with the
key of the session, which both derive from the key that all nodes share, both names and both
challenges; they cover the direction, the number of the exchange and the content. So nothing that
was sent once counts again, elsewhere, or as anything else, and neither side keeps anything when the
connection ends. Whoever has not proved to have the key gets an empty frame and no reason. Nothing
is encrypted.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import re
import secrets
import struct
from typing import NamedTuple

from dshealthd.probe.members.hostlist import is_name
from dshealthd.probe.observation import Outcome
from dshealthd.probe.peers.fields import SLUG

SCHEME = "dshealthd2"
MAX_MESSAGE = 65536
"""Bytes of a request or an answer, without its MAC."""
OK = "ok"
TIMED_OUT = "timed_out"
DEFECT = "peer_error"
_LENGTH = struct.Struct(">I")
_MAC = hashlib.sha256().digest_size
_CHALLENGE = re.compile(r"[0-9a-f]{32}")


class Rejection(enum.StrEnum):
    """Why a request was refused: the values of the label `reason`. A reason marked "not disclosed"
    is hidden from the caller.
    """

    NO_CREDENTIALS = "no_credentials"  # not disclosed: it does not begin as a call does
    KEY = "key"  # not disclosed: signed with another key, recorded, or tampered with
    RECEIVER = "wrong_receiver"
    SENDER = "not_a_member"
    SELF = "own_name"
    ADDRESS = "wrong_address"
    """The request comes from an address that its sender's name does not resolve to."""
    RATE = "rate_limited"
    OFF = "switched_off"
    VERSION = "version_differs"
    """The request's method, or its messages, are not those of this version."""
    MALFORMED = "malformed"


class Refusal(Exception):
    """A handler declines: the call ends with `reason`, a slug that the caller gets."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        if SLUG.fullmatch(reason) is None:
            raise ValueError(f"{reason!r} is not a slug")
        self.reason = reason


class PeerError(Exception):
    """A call without an answer: the kind of failure, and a slug, the peer's if it declined."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(f"{outcome}: {reason}")
        self.outcome = outcome
        self.reason = reason


class TimeoutMeaning:
    """What it would mean if a call timed out now; changes as the call goes on."""

    def __init__(self) -> None:
        self.becomes(Outcome.FAILED, "too_many_calls")

    def becomes(self, outcome: Outcome, reason: str) -> None:
        """Change what a timeout of a call between agents means from here on."""
        self.outcome, self.reason = outcome, reason


class FrameError(Exception):
    """The data received is none of this protocol."""


class Frames:
    """The frames in the data that arrives on a connection."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, data: bytes) -> bytes | None:
        """Return the frame that is complete with this data; None if it is not yet. Raises
        FrameError if more has arrived than that: each side waits for the other's answer.
        """
        self._data += data
        if len(self._data) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._data)
        end = _LENGTH.size + length
        if length > _MAC + MAX_MESSAGE or len(self._data) > end:
            raise FrameError
        if len(self._data) < end:
            return None
        frame = bytes(self._data[_LENGTH.size :])
        self._data.clear()
        return frame


def to_frame(content: bytes) -> bytes:
    """Return a frame of the protocol between agents: the content after its length."""
    return _LENGTH.pack(len(content)) + content


class Hello(NamedTuple):
    """The beginning of a connection: what a caller claims, before any of it is proved."""

    sender: str
    receiver: str
    challenge: str

    @classmethod
    def parse(cls, frame: bytes) -> Hello | None:
        """Return what the first frame of a connection claims; None if it is malformed."""
        fields = frame.decode("ascii", "replace").split(" ")
        if len(fields) != 1 + len(cls._fields) or fields[0] != SCHEME:
            return None
        if not all(map(is_name, fields[1:3])) or _CHALLENGE.fullmatch(fields[3]) is None:
            return None
        return cls(*fields[1:])

    def __bytes__(self) -> bytes:
        """Return the content of a connection's first frame, in the protocol between agents."""
        return " ".join((SCHEME, *self)).encode()


def new_challenge() -> str:
    """Return a random challenge, which one side of the protocol sends the other."""
    return secrets.token_hex(16)


def parse_challenge(frame: bytes) -> str | None:
    """Return the listener's challenge; None if the frame holds anything else."""
    text = frame.decode("ascii", "replace")
    return text if _CHALLENGE.fullmatch(text) else None


class PeerSession:
    """What both ends of a connection sign with."""

    def __init__(self, key: bytes, hello: Hello, challenge: str) -> None:
        """`key` is the one that all nodes share, `challenge` the listener's."""
        self.key = key
        self._secret = _digest(key, *(field.encode() for field in (SCHEME, *hello, challenge)))
        self._number = 0

    def sign(self, direction: str, content: bytes) -> bytes:
        """Return a frame with this exchange's `request` or `answer`; an answer ends it."""
        frame = to_frame(self._mac(direction, content) + content)
        self._number += direction == "answer"
        return frame

    def verified(self, direction: str, frame: bytes) -> bytes | None:
        """Return what a frame says if it is this exchange's `request` or `answer`, else None."""
        mac, content = frame[:_MAC], frame[_MAC:]
        if not hmac.compare_digest(mac, self._mac(direction, content)):
            return None
        self._number += direction == "answer"
        return content

    def _mac(self, direction: str, content: bytes) -> bytes:
        number = self._number.to_bytes(8, "big")
        return _digest(self._secret, direction.encode(), number, content)


def _digest(key: bytes, *fields: bytes) -> bytes:
    # Length prefixes, so that no two lists of fields give the same message.
    return hmac.digest(key, b"".join(_LENGTH.pack(len(one)) + one for one in fields), "sha256")
