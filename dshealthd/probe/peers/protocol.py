"""The protocol of the peer API: options, claims, refusals, and what is signed."""

from __future__ import annotations

import enum
import hashlib
import hmac
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dshealthd.probe.members.hostlist import is_name
from dshealthd.probe.observation import Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX = "/peer/v1/"
NONCE = "nonce"
"""The method that gives anyone a nonce; `messages` declares all others."""
MAX_BODY = 65536
SCHEME = "dshealthd1"
ANSWER = "Dshealthd-Answer"
ABSENT = "-"
SLUG = re.compile(r"[a-z][a-z0-9_]{0,47}")
_TOKEN = re.compile(r"[0-9a-f]{32,64}|-")
_FIELDS = 6
UNAUTHORIZED = "unauthorized"
TIMED_OUT = "timed_out"


class Rejection(enum.StrEnum):
    """Why a request was refused: the values of the label `reason`. A reason marked "not disclosed"
    is hidden from the caller: the answer says "unauthorized".
    """

    NO_CREDENTIALS = "no_credentials"  # not disclosed
    CERTIFICATE = "certificate"  # not disclosed: the certificate is not the sender's
    KEY = "key"  # not disclosed: signed with another key, or tampered with
    REPLAYED = "replayed"  # not disclosed
    STALE = "stale_nonce"
    """The nonce is too old or from an earlier run; the answer has a new one."""
    RECEIVER = "wrong_receiver"
    SENDER = "not_a_member"
    SELF = "own_name"
    ADDRESS = "wrong_address"
    """The request comes from an address that its sender's name does not resolve to."""
    RATE = "rate_limited"
    OFF = "switched_off"
    METHOD = "unknown_method"
    TOO_LARGE = "too_large"
    MALFORMED = "malformed"
    SLOW = "slow_body"


UNTOLD = {Rejection.NO_CREDENTIALS, Rejection.CERTIFICATE, Rejection.KEY, Rejection.REPLAYED}


class Refusal(Exception):
    """A handler declines: the call ends with `reason`, a slug that the caller gets."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        if SLUG.fullmatch(reason) is None:
            message = f"{reason!r} is not a slug"
            raise ValueError(message)
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
        """Change what a timeout from here on means."""
        self.outcome, self.reason = outcome, reason


@dataclass(frozen=True, slots=True)
class RequestClaim:
    """What a request claims about itself, before any of it is verified."""

    sender: str
    receiver: str
    nonce: str = ABSENT
    challenge: str = ABSENT
    mac: str = ABSENT

    @classmethod
    def parse(cls, header: str) -> RequestClaim | None:
        """Return the claim in a peer's `Authorization` header, or None if it has none."""
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
    """Return a certificate's names (DNS and URI), which are compared without wildcards."""
    return {name for kind, name in certificate.get("subjectAltName", ()) if kind in {"DNS", "URI"}}


def parse_answer(header: str) -> tuple[str, str] | None:
    """Return the nonce and the MAC of a peer's `Dshealthd-Answer` header, or None if malformed."""
    fields = header.split(" ")
    if len(fields) != 2 or not all(map(_TOKEN.fullmatch, fields)):  # noqa: PLR2004 - a pair
        return None
    return fields[0], fields[1]


def request_mac(key: bytes, path: str, body: bytes, claim: RequestClaim) -> str:
    """Return the MAC of a request to a peer; `claim.mac` is ignored."""
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
        # Length prefixes, so that no two lists of fields give the same message.
        parts += (
            len(encoded).to_bytes(4, "big"),
            encoded,
        )
    return hmac.digest(key, b"".join(parts), "sha256").hex()
