"""The rendezvous store of one round, kept by its root's agent, and reached by the member's.

It implements the operations that `torch.distributed` needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from dshealthd.core.timing import time_limit
from dshealthd.probe.observation import Outcome
from dshealthd.probe.peers.fields import MAX_KEY, MAX_VALUE, MAX_WAIT
from dshealthd.probe.peers.protocol import PeerError, Refusal

if TYPE_CHECKING:
    from dshealthd.probe.peers.client import PeerClient

StoreHandler = Callable[[str, str, bytes | int | None, float], Awaitable[bytes | int | bool]]
"""Carries out `set`, `get`, `add`, `check`, `wait` or `delete` (op, key, value, seconds). Raises
TimeoutError or StoreError.
"""

MAX_KEYS = 4096
MARGIN = 2.0
"""Seconds that a call may take beyond its wait."""
TIMED_OUT = "timeout"
NOT_DONE = "store"


class StoreError(Exception):
    """The operation could not be carried out."""


class LocalStore:
    """A store in this process. Values also come from other nodes' workers, so all sizes are bounded
    and values are opaque.
    """

    def __init__(self) -> None:
        """Start empty; a store serves one round."""
        self._values: dict[str, bytes] = {}
        self._changed = asyncio.Condition()

    async def __call__(
        self,
        op: str,
        key: str,
        value: bytes | int | None,
        timeout: float,  # noqa: ASYNC109 - the store's own
    ) -> bytes | int | bool:
        """Carry out one operation of the rendezvous store."""
        if len(key) > MAX_KEY:
            raise StoreError(f"the key has {len(key)} characters, too many")
        match op, value:
            case "set", bytes():
                await self._put(key, value)
                return True
            case "add", int():
                try:
                    total = int(self._values.get(key, b"0")) + value
                except (ValueError, ArithmeticError) as error:
                    raise StoreError(f"{key} does not hold a number") from error
                await self._put(key, str(total).encode())
                return total
            case "get", None:
                await self._wait(key, timeout)
                return self._values[key]
            case "wait", None:
                await self._wait(key, timeout)
                return True
            case "check", None:
                return key in self._values
            case "delete", None:
                return self._values.pop(key, None) is not None
        raise StoreError(f"unknown operation: {op} with {type(value).__name__}")

    async def _put(self, key: str, value: bytes) -> None:
        if len(value) > MAX_VALUE or (len(self._values) >= MAX_KEYS and key not in self._values):
            raise StoreError("the store of this round is full")
        self._values[key] = value
        async with self._changed:
            self._changed.notify_all()

    async def _wait(self, key: str, seconds: float) -> None:
        async with time_limit(seconds), self._changed:
            await self._changed.wait_for(lambda: key in self._values)


class RemoteStore:
    """A store as its members see it; a `StoreHandler`."""

    def __init__(
        self, peers: PeerClient, root: str, round: str, monotonic: Callable[[], float]
    ) -> None:
        """Forward to the agent of `root`."""
        self._peers = peers
        self._root = root
        self._round = round
        self._monotonic = monotonic

    async def __call__(
        self,
        op: str,
        key: str,
        value: bytes | int | None,
        timeout: float,  # noqa: ASYNC109 - the store's own
    ) -> bytes | int | bool:
        """Have the root's store carry out one operation. Raises TimeoutError or StoreError."""
        body: dict[str, Any] = {"round": self._round, "op": op, "key": key}
        if isinstance(value, bytes):
            body["value"] = value
        elif value is not None:
            body["amount"] = value
        end = self._monotonic() + timeout
        while True:
            turn = max(0.0, min(MAX_WAIT, end - self._monotonic()))
            try:
                answer = await self._peers.call(
                    self._root, "store", {**body, "timeout": turn}, turn + MARGIN
                )
            except PeerError as error:
                if error.outcome is not Outcome.DECLINED or error.reason != TIMED_OUT:
                    raise StoreError(f"the agent of {self._root}: {error}") from error
                if self._monotonic() >= end:
                    raise TimeoutError from error
                continue
            found: bytes | int | bool = next(
                (answer[name] for name in ("value", "number", "flag") if name in answer), True
            )
            return found


async def serve(store: LocalStore, body: Mapping[str, Any]) -> dict[str, Any]:
    """Carry out a member's operation on the store and return the answer. Raises Refusal."""
    value = body.get("value", body.get("amount"))
    try:
        found = await store(body["op"], body["key"], value, body["timeout"])
    except TimeoutError as error:
        raise Refusal(TIMED_OUT) from error
    except StoreError as error:
        raise Refusal(NOT_DONE) from error
    return {
        "flag"
        if isinstance(found, bool)
        else "number"
        if isinstance(found, int)
        else "value": found
    }
