"""Nonces of the peer API: what the receiver of calls remembers of each sender.

Each sender has a list of spent nonces and an allowance of calls.

A nonce proves its own origin, so issuing one takes no memory. Only those that come back with a good
MAC are remembered, until they expire. Ages use the monotonic clock of the issuing machine, so
differences between clocks do not matter.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

LIFETIME = 10.0
"""Seconds after which an issued nonce expires."""
MAX_SENDERS = 256
"""Senders remembered before silent ones are forgotten."""
_STAMP, _SALT, _TAG = 8, 8, 16
LENGTH = _STAMP + _SALT + _TAG


@dataclass(slots=True)
class _Sender:
    tokens: float
    refilled: float
    seen: float
    spent: dict[bytes, float] = field(default_factory=dict)


class Nonces:
    """Issues nonces and spends them."""

    def __init__(self, rate: float, burst: int, monotonic: Callable[[], float]) -> None:
        """Allow each sender `rate` calls per second in the long run, and `burst` at once."""
        self._rate = rate
        self._burst = float(burst)
        self._monotonic = monotonic
        self._started = monotonic()
        self._secret = secrets.token_bytes(32)
        self._senders: dict[str, _Sender] = {}

    def issue(self, sender: str) -> str:
        """Return a new nonce for a sender: hexadecimal digits."""
        stamp = round((self._monotonic() - self._started) * 1e6).to_bytes(
            _STAMP, "big"
        ) + secrets.token_bytes(_SALT)
        return (stamp + self._tag(stamp, sender)).hex()

    def fresh(self, nonce: str, sender: str) -> bool:
        """Return whether a nonce was issued here for this sender and is not too old."""
        try:
            raw = bytes.fromhex(nonce)
        except (ValueError, ArithmeticError):
            return False
        stamp, tag = raw[: _STAMP + _SALT], raw[_STAMP + _SALT :]
        if len(raw) != LENGTH or not hmac.compare_digest(tag, self._tag(stamp, sender)):
            return False
        age = self._monotonic() - self._started - int.from_bytes(stamp[:_STAMP], "big") / 1e6
        return age <= LIFETIME

    def spend(self, nonce: str, sender: str) -> bool:
        """Note that a fresh nonce came with a good MAC; return False if it is already spent. Memory
        is bounded by the rate of `admit`: once a sender exceeds what it may spend in that time, all
        its nonces count as spent.
        """
        known = self._sender(sender)
        key, now = bytes.fromhex(nonce), self._monotonic()
        while known.spent:
            oldest = next(iter(known.spent))
            if now - known.spent[oldest] <= LIFETIME:
                break
            del known.spent[oldest]
        if key in known.spent or len(known.spent) > self._burst + 2 * LIFETIME * self._rate:
            return False
        known.spent[key] = now
        return True

    def admit(self, sender: str) -> bool:
        """Take one call from a sender's allowance of nonces; False if there is none left."""
        known, now = self._sender(sender), self._monotonic()
        known.tokens = min(self._burst, known.tokens + (now - known.refilled) * self._rate)
        known.refilled = now
        if known.tokens < 1.0:
            return False
        known.tokens -= 1.0
        return True

    def _sender(self, name: str) -> _Sender:
        now = self._monotonic()
        known = self._senders.get(name)
        if known is None:
            if len(self._senders) >= MAX_SENDERS:
                # After this time a sender's nonces have expired and its allowance is full.
                silent = max(LIFETIME, self._burst / self._rate)
                self._senders = {
                    other: state
                    for other, state in self._senders.items()
                    if now - state.seen <= silent
                }
            known = self._senders[name] = _Sender(self._burst, now, now)
        known.seen = now
        return known

    def _tag(self, stamp: bytes, sender: str) -> bytes:
        return hmac.digest(
            self._secret, stamp + hashlib.sha256(sender.encode()).digest(), "sha256"
        )[:_TAG]
