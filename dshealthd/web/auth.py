"""Basic authentication of web clients against bcrypt hashes, as in the exporter-toolkit.

A verification takes as long as the hash's cost demands, 50 ms or more. Verifications run in a
thread, one at a time. Results are cached, so that the cost is paid per client and not per scrape.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import logging
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping
from http import HTTPStatus

from dshealthd.core import background
from dshealthd.core.child import StartError

log = logging.getLogger(__name__)

HASH = re.compile(r"\$2[abxy]\$(\d\d)\$[./A-Za-z0-9]{53}")
MIN_COST, MAX_COST = 4, 16
"""bcrypt's own minimum; above the maximum, a single login takes more than about four seconds."""
MAX_PASSWORD = 72
"""Bytes of a password that bcrypt uses."""
REMEMBERED = 128
"""Cached verifications of each kind.

Failures have a cache of their own, so that guesses do not evict valid logins.
"""
WAITING = 16
"""Clients that may wait for a verification; how many each waits for, its connections limit."""
_PAUSE_RATIO = 3
"""Pause after a failed verification, as a multiple of its duration: guesses get a quarter of a
core."""
_MAX_PAUSE = 1.0
"""The longest such pause, in seconds, so that others do not wait for long. From cost 13 on, guesses
therefore get more than a quarter of a core.
"""


def problem(hash: str) -> str | None:
    """Return what is wrong with a user's bcrypt hash, or None."""
    match = HASH.fullmatch(hash)
    if match is None:
        return "is not a bcrypt hash"
    cost = int(match[1])
    if not MIN_COST <= cost <= MAX_COST:
        return f"is a bcrypt hash of cost {cost}; {MIN_COST} to {MAX_COST} are supported"
    return None


class _Client:
    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        """Held by the one verification of this client that queues with those of other clients."""
        self.pending = 0


class Authenticator:
    """Verifies the credentials of requests.

    Clients take turns, so one that guesses delays another by a single verification.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes()
        self._passed: OrderedDict[bytes, None] = OrderedDict()
        self._failed: OrderedDict[bytes, None] = OrderedDict()
        self._one = asyncio.Lock()  # bcrypt takes a core: one verification at a time
        self._clients: dict[str, _Client] = {}

    async def refusal(
        self, users: Mapping[str, str], authorization: str | None, client: str
    ) -> HTTPStatus | None:
        """Return None if an `Authorization` header has the name and password of one of `users`.

        `users` maps names to hashes; `client` is who asks, as the connection limiter counts it.
        Otherwise return "Unauthorized", or "Service Unavailable" if too many clients are waiting.
        An unknown name takes as long as a wrong password.
        """
        credentials = _credentials(authorization or "")
        if credentials is None:
            return HTTPStatus.UNAUTHORIZED
        name, password = credentials
        known = name in users
        expected = users[name] if known else _nobody(users)
        # A keyed hash of the credentials, so that no password stays in memory.
        entry = hashlib.blake2b(
            repr((name, known, expected, password)).encode(), key=self._key
        ).digest()
        if entry in self._passed:
            self._passed.move_to_end(entry)
            return None
        if entry in self._failed:
            return HTTPStatus.UNAUTHORIZED
        if client not in self._clients and len(self._clients) >= WAITING:
            return HTTPStatus.SERVICE_UNAVAILABLE
        own = self._clients.setdefault(client, _Client())
        own.pending += 1
        try:
            async with own.turn, self._one:
                if entry not in self._passed and entry not in self._failed:
                    await self._verify(entry, password, expected, known=known)
        except StartError as error:
            log.warning("%s", error)
            return HTTPStatus.SERVICE_UNAVAILABLE
        finally:
            own.pending -= 1
            if not own.pending:
                del self._clients[client]
        return None if entry in self._passed else HTTPStatus.UNAUTHORIZED

    async def _verify(self, entry: bytes, password: bytes, expected: str, *, known: bool) -> None:
        """Remember whether a password matches, and pause if it does not."""
        started = time.monotonic()
        matches = await background.call(lambda: _matches(password, expected), "bcrypt", None)
        passed = matches and known
        remembered = self._passed if passed else self._failed
        remembered[entry] = None
        if len(remembered) > REMEMBERED:
            remembered.popitem(last=False)
        if not passed:
            # Guessing must not take a core away from a training job.
            await asyncio.sleep(min(_PAUSE_RATIO * (time.monotonic() - started), _MAX_PAUSE))


def _matches(password: bytes, expected: str) -> bool:
    """Run bcrypt on a password; call it in a thread."""
    import bcrypt

    try:
        return bcrypt.checkpw(password[:MAX_PASSWORD], expected.encode())
    except (ValueError, ArithmeticError):  # older bcrypt versions refuse a NUL in a password
        return False


def _credentials(authorization: str) -> tuple[str, bytes] | None:
    scheme, _, encoded = authorization.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        name, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
        return (name.decode(), password) if colon else None
    except (binascii.Error, ValueError, ArithmeticError):
        return None


def _nobody(users: Mapping[str, str]) -> str:
    """Return a bcrypt hash for unknown names, as costly as the costliest known one.

    No password is known to match it.
    """
    cost = max((hash[4:6] for hash in users.values()), default="10")
    return f"$2b${cost}$" + "." * 53
