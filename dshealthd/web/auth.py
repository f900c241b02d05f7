"""Basic authentication of web clients against bcrypt hashes, as the exporter-toolkit does it.

A verification costs as much as the hash was made to cost, some 50 ms and more. It runs in a thread,
one at a time; what it found is remembered, so that it is paid once a client and not once a scrape.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import functools
import hashlib
import logging
import re
import secrets
import string
from collections import OrderedDict
from http import HTTPStatus
from typing import TYPE_CHECKING

from dshealthd.core import background
from dshealthd.core.child import StartError

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger(__name__)

HASH = re.compile(r"\$2[abxy]\$(\d\d)\$[./A-Za-z0-9]{53}")
MIN_COST, MAX_COST = 4, 16
"""bcrypt's own least cost; above the greatest one a single login takes more than some four seconds.
"""
MAX_PASSWORD = 72
"""bcrypt looks at so many bytes of a password."""
REMEMBERED = 128
"""Verifications remembered of each kind.

Failures have a list of their own: a guesser does not push out those who are let in.
"""
WAITING = 16
"""Verifications that may wait for their turn."""


def problem(hash: str) -> str | None:
    """Say what is wrong with a user's bcrypt hash, or None."""
    match = HASH.fullmatch(hash)
    if match is None:
        return "is no bcrypt hash"
    cost = int(match[1])
    if not MIN_COST <= cost <= MAX_COST:
        return f"is a bcrypt hash of cost {cost}; {MIN_COST} to {MAX_COST} are supported"
    return None


class Authenticator:
    """Verifies the credentials of requests."""

    def __init__(self) -> None:
        """Start with nothing remembered."""
        self._key = secrets.token_bytes(32)
        self._passed: OrderedDict[bytes, None] = OrderedDict()
        self._failed: OrderedDict[bytes, None] = OrderedDict()
        self._one = asyncio.Lock()  # bcrypt takes a core: one verification at a time
        self._waiting = 0

    async def refusal(
        self, users: Mapping[str, str], authorization: str | None
    ) -> HTTPStatus | None:
        """Return None if an `Authorization` header has the name and password of one of `users`, a
        mapping of names to hashes.

        Otherwise it is "Unauthorized", or "Service Unavailable" when too many verifications wait
        already. Takes as long for a name that is unknown as for a wrong password.
        """
        credentials = _credentials(authorization or "")
        if credentials is None:
            return HTTPStatus.UNAUTHORIZED
        name, password = credentials
        known = name in users
        expected = users[name] if known else _nobody(users)
        # A keyed hash instead of what it is made of: no password stays in memory.
        entry = hashlib.blake2b(
            repr((name, known, expected, password)).encode(), key=self._key, digest_size=32
        ).digest()
        if entry in self._passed:
            self._passed.move_to_end(entry)
            return None
        if entry in self._failed:
            return HTTPStatus.UNAUTHORIZED
        if self._waiting >= WAITING:
            return HTTPStatus.SERVICE_UNAVAILABLE
        try:
            passed = await self._verify(password, expected) and known
        except StartError as error:
            log.warning("%s", error)
            return HTTPStatus.SERVICE_UNAVAILABLE
        remembered = self._passed if passed else self._failed
        remembered[entry] = None
        if len(remembered) > REMEMBERED:
            remembered.popitem(last=False)
        return None if passed else HTTPStatus.UNAUTHORIZED

    async def _verify(self, password: bytes, expected: str) -> bool:
        self._waiting += 1
        try:
            async with self._one:
                return await background.call(lambda: _matches(password, expected), "bcrypt", None)
        finally:
            self._waiting -= 1


def _matches(password: bytes, expected: str) -> bool:
    """Run bcrypt on a password; in a thread."""
    import bcrypt

    try:
        return bcrypt.checkpw(password[:MAX_PASSWORD], expected.encode())
    except ValueError:  # older versions refuse a NUL in a password
        return False


def _credentials(authorization: str) -> tuple[str, bytes] | None:
    scheme, _, encoded = authorization.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        name, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
        return (name.decode(), password) if colon else None
    except (binascii.Error, ValueError):
        return None


def _nobody(users: Mapping[str, str]) -> str:
    """Return a bcrypt hash for unknown names, as costly as the costliest of the known ones.

    No password is known to fit.
    """
    return _unmatched(max((hash[4:6] for hash in users.values()), default="10"))


@functools.cache
def _unmatched(cost: str) -> str:
    """Return a bcrypt hash of random digits, of a cost in two digits."""
    return (
        f"$2b${cost}$" + "." * 22 + "".join(secrets.choice(string.ascii_letters) for _ in range(31))
    )
