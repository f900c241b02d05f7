"""The rendezvous store of one round, kept by its root's agent.

It implements the operations that `torch.distributed` needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from dshealthd.core.timing import time_limit

StoreHandler = Callable[[str, str, bytes | int | None, float], Awaitable[bytes | int | bool]]
"""Carries out `set`, `get`, `add`, `check`, `wait` or `delete` (op, key, value, seconds). Raises
TimeoutError or StoreError.
"""

MAX_KEYS = 4096
MAX_KEY = 256
MAX_VALUE = 45000
"""Bytes: in base64 and with the other fields a value fits into the largest body between agents."""


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
            message = f"the key has {len(key)} characters, too many"
            raise StoreError(message)
        match op, value:
            case "set", bytes():
                await self._put(key, value)
                return True
            case "add", int():
                try:
                    total = int(self._values.get(key, b"0")) + value
                except (ValueError, ArithmeticError) as error:
                    message = f"{key} does not hold a number"
                    raise StoreError(message) from error
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
        message = f"unknown operation: {op} with {type(value).__name__}"
        raise StoreError(message)

    async def _put(self, key: str, value: bytes) -> None:
        if len(value) > MAX_VALUE or (len(self._values) >= MAX_KEYS and key not in self._values):
            message = "the store of this round is full"
            raise StoreError(message)
        self._values[key] = value
        async with self._changed:
            self._changed.notify_all()

    async def _wait(self, key: str, seconds: float) -> None:
        async with time_limit(seconds), self._changed:
            await self._changed.wait_for(lambda: key in self._values)
