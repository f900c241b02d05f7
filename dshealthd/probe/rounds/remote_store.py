"""The remote rendezvous store of a round that another node leads.

Every operation is a call to that node's agent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dshealthd.probe.observation import Outcome
from dshealthd.probe.peers.messages import MAX_WAIT
from dshealthd.probe.peers.protocol import PeerError, Refusal
from dshealthd.probe.workers.store import LocalStore, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dshealthd.probe.peers.client import PeerClient

MARGIN = 2.0
"""Seconds that a call may take beyond its wait."""
TIMED_OUT = "timeout"
NOT_DONE = "store"


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
                    message = f"the agent of {self._root}: {error}"
                    raise StoreError(message) from error
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
