"""The protocol of the peer API: options, claims, refusals, what is signed, and types of fields."""

from __future__ import annotations

import base64
import binascii
import enum
import hashlib
import hmac
import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from dshealthd.core.schema import MAX_EXACT, Plain, Record, SchemaError, misfit
from dshealthd.probe.members.hostlist import is_name
from dshealthd.probe.observation import Outcome, known

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
UNAUTHORIZED = "unauthorized"
TIMED_OUT = "timed_out"


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


@dataclass(frozen=True, slots=True)
class NodeName(Plain):
    """A node's name, which is only compared with those of the membership."""

    def read(self, value: object, place: str) -> str:
        """Return the node's name that the schema allows."""
        if not isinstance(value, str) or not is_name(value):
            misfit(place, "is not a valid node name")
        return value


@dataclass(frozen=True, slots=True)
class KnownReason(Plain):
    """A slug that this release knows as a reason, or nothing; any other slug becomes `other`."""

    def read(self, value: object, place: str) -> str:
        """Return the reason that the schema allows."""
        if not isinstance(value, str) or (value and SLUG.fullmatch(value) is None):
            misfit(place, "is not a slug")
        return known(value)


@dataclass(frozen=True, slots=True)
class Text(Plain):
    """Printable ASCII of a bounded length."""

    maximum: int

    def read(self, value: object, place: str) -> str:
        """Return the text that the schema allows."""
        if (
            not isinstance(value, str)
            or len(value) > self.maximum
            or not value.isascii()
            or not (value.isprintable())
        ):
            misfit(place, f"is not printable ASCII text of at most {self.maximum} characters")
        return value


@dataclass(frozen=True, slots=True)
class Data:
    """Bytes; base64 in JSON."""

    maximum: int

    def read(self, value: object, place: str) -> bytes:
        """Return the bytes that the schema allows."""
        try:
            data = base64.b64decode(value, validate=True) if isinstance(value, str) else None
        except (binascii.Error, ValueError):
            data = None
        if data is None or len(data) > self.maximum:
            misfit(place, f"is not base64 of at most {self.maximum} bytes")
        return data

    def write(self, value: Any, place: str) -> str:
        """Return the base64 text of bytes that the schema allows."""
        if not isinstance(value, bytes) or len(value) > self.maximum:
            misfit(place, f"is not bytes, at most {self.maximum} of them")
        return base64.b64encode(value).decode()


def loads(body: bytes, schema: Record) -> dict[str, Any]:
    """Return a message; SchemaError if it is not unambiguous JSON that fits `schema`."""
    try:
        value = json.loads(
            body.decode(),
            object_pairs_hook=_unique,
            parse_constant=_constant,
            parse_int=_integer,
            parse_float=_finite,
        )
    except SchemaError:
        raise
    except (ValueError, RecursionError) as error:
        message = "body is not JSON"
        raise SchemaError(message) from error
    return schema.read(value)


def dumps(value: Mapping[str, Any], schema: Record) -> bytes:
    """Return the JSON of a message. Raises SchemaError if it does not fit `schema`."""
    return json.dumps(schema.write(value), separators=(",", ":"), allow_nan=False).encode()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        misfit("body", "has a field twice")
    return value


def _constant(_name: str) -> NoReturn:
    misfit("body", "has NaN or Infinity for a number")


def _integer(digits: str) -> int:
    if len(digits) > len(str(-MAX_EXACT)):
        misfit("body", "has an integer that is too large")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        misfit("body", "has a number that is too large")
    return value
