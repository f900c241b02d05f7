"""The contract of the peer API's two sides: options, claims, refusals, and what is signed.

A call is `POST /peer/v1/METHOD` with a JSON body. Who calls whom stands in one header, and with a
shared key that header is the proof too:

    Authorization: dshealthd1 SENDER RECEIVER NONCE CHALLENGE MAC
    Dshealthd-Answer: NEXT_NONCE MAC

NONCE was issued by the receiver and is used once; CHALLENGE is the sender's own and makes the
answer fresh for it; the MAC of an answer covers the MAC of its request, and so all that stands
there. With TLS alone the last three are "-".
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dshealthd.probe.members.hostlist import is_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dshealthd.probe.observation import Outcome

PREFIX = "/peer/v1/"
NONCE = "nonce"
"""The method that gives a nonce to whoever asks; all others are those of `messages`."""
MAX_BODY = 65536
SCHEME = "dshealthd1"
ANSWER = "Dshealthd-Answer"
ABSENT = "-"
SLUG = re.compile(r"[a-z][a-z0-9_]{0,47}")
_TOKEN = re.compile(r"[0-9a-f]{32,64}|-")
_FIELDS = 6


class Rejection(enum.StrEnum):
    """Why a request was refused: the values of the label `reason`.

    What is marked so is told to nobody: the answer says "unauthorized".
    """

    NO_CREDENTIALS = "no_credentials"  # not told
    CERTIFICATE = "certificate"  # not told: the certificate is not that of the sender
    KEY = "key"  # not told: signed with another key, or tampered with
    REPLAYED = "replayed"  # not told
    STALE = "stale_nonce"
    """The nonce is too old or of an earlier run; the answer has a new one."""
    RECEIVER = "wrong_receiver"
    SENDER = "not_a_member"
    SELF = "own_name"
    ADDRESS = "wrong_address"
    """It comes from an address that its sender's name does not have."""
    RATE = "rate_limited"
    OFF = "switched_off"
    METHOD = "unknown_method"
    TOO_LARGE = "too_large"
    MALFORMED = "malformed"
    SLOW = "slow_body"


UNTOLD = {Rejection.NO_CREDENTIALS, Rejection.CERTIFICATE, Rejection.KEY, Rejection.REPLAYED}
UNAUTHORIZED = "unauthorized"
TIMED_OUT = "timed_out"


class Refusal(Exception):
    """A handler takes no part: ends its call with `reason`, a slug that the caller is told."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        if SLUG.fullmatch(reason) is None:
            message = f"{reason!r} is no slug"
            raise ValueError(message)
        self.reason = reason


class PeerError(Exception):
    """A call that brought no answer; `outcome` says of what kind it is, `reason` is a bounded slug
    (a peer's own, where it declined).
    """

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(f"{outcome}: {reason}")
        self.outcome = outcome
        self.reason = reason


@dataclass(frozen=True, slots=True)
class RequestClaim:
    """What a request says of itself, before any of it is proved."""

    sender: str
    receiver: str
    nonce: str = ABSENT
    challenge: str = ABSENT
    mac: str = ABSENT

    @classmethod
    def parse(cls, header: str) -> RequestClaim | None:
        """Return the claim of a peer's `Authorization` header, or None if it makes none."""
        fields = header.split(" ")
        if len(fields) != _FIELDS or fields[0] != SCHEME:
            return None
        if not all(map(is_name, fields[1:3])) or not all(map(_TOKEN.fullmatch, fields[3:])):
            return None
        return cls(*fields[1:])

    def __str__(self) -> str:
        """Write the header."""
        return f"{SCHEME} {self.sender} {self.receiver} {self.nonce} {self.challenge} {self.mac}"


def certificate_names(certificate: Mapping[str, Any]) -> set[str]:
    """Return the names (DNS and URI) of a peer's certificate, as `getpeercert()` gives it.

    They are compared as they are: no wildcards.
    """
    return {name for kind, name in certificate.get("subjectAltName", ()) if kind in {"DNS", "URI"}}


def parse_answer(header: str) -> tuple[str, str] | None:
    """Return nonce and MAC of a peer's `Dshealthd-Answer` header, or None for anything else."""
    fields = header.split(" ")
    if len(fields) != 2 or not all(map(_TOKEN.fullmatch, fields)):  # noqa: PLR2004 - a pair
        return None
    return fields[0], fields[1]


def request_mac(key: bytes, path: str, body: bytes, claim: RequestClaim) -> str:
    """Return the MAC of a request to a peer; `claim.mac` takes no part."""
    digest = hashlib.sha256(body).hexdigest()
    return _mac(
        key,
        "request",
        "POST",
        path,
        digest,
        claim.sender,
        claim.receiver,
        claim.nonce,
        claim.challenge,
    )


def answer_mac(key: bytes, request: str, status: int, body: bytes, next_nonce: str) -> str:
    """Return the MAC of a peer's answer to the request whose MAC is `request`."""
    return _mac(key, "answer", request, str(status), hashlib.sha256(body).hexdigest(), next_nonce)


def _mac(key: bytes, *fields: str) -> str:
    parts = [SCHEME.encode()]
    for field in fields:
        encoded = field.encode()
        # So that no two lists of fields are the same message.
        parts += (
            len(encoded).to_bytes(4, "big"),
            encoded,
        )
    return hmac.digest(key, b"".join(parts), "sha256").hex()
