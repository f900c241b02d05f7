"""What a node does at the request of another one, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dshealthd.probe.observation import ON_DEMAND, RoundKind
from dshealthd.probe.peers.protocol import Refusal
from dshealthd.probe.requests import PeerRequests

ME, OTHER, THIRD = "a", "b", "c"


def requests(end: float = 0.0, report: object = None) -> tuple[PeerRequests, list[Any]]:
    """Return those of a node whose maintenance ends then, and what it does at them."""
    done: list[Any] = []

    async def invited(sender: str, body: dict[str, Any]) -> dict[str, Any]:
        done.append((sender, body["plan"].epoch))
        return {}

    async def lead(*given: Any) -> Any:
        done.append(given)
        return report

    state: Any = SimpleNamespace(
        absences=SimpleNamespace(
            own_end=lambda: end, record=lambda *said: done.append(said), answer=None
        ),
        local_membership=SimpleNamespace(me=ME, membership=SimpleNamespace(names=(ME, THIRD))),
    )
    rounds: Any = SimpleNamespace(handlers=lambda: {"invite": invited})
    return PeerRequests(state, rounds, lead), done


@pytest.mark.parametrize(
    ("end", "epoch", "done"),
    [
        (0.0, 7, [(OTHER, 0.0), (OTHER, 7)]),
        (1.0, 7, [(OTHER, 0.0)]),
        (1.0, ON_DEMAND, [(OTHER, ON_DEMAND)]),
    ],
)
async def test_an_invitation(end: float, epoch: int, done: list[Any]) -> None:
    """In maintenance only one on demand is accepted. Who leads a round of the schedule is not in
    maintenance itself.
    """
    asked, found = requests(end)
    answer = asked.handlers()["invite"](OTHER, {"plan": SimpleNamespace(epoch=epoch)})
    if done[-1] == (OTHER, epoch):
        assert await answer == {}
    else:
        with pytest.raises(Refusal, match="maintenance"):
            await answer
    assert found == done


@pytest.mark.parametrize(
    ("members", "kind", "refused"),
    [
        ((ME, THIRD), RoundKind.PAIR, ""),
        ((OTHER, THIRD), RoundKind.PAIR, "malformed"),
        ((ME, ME), RoundKind.PAIR, "malformed"),
        ((ME, THIRD), RoundKind.LOCAL, "malformed"),
        ((ME, "elsewhere"), RoundKind.PAIR, "members_differ"),
    ],
)
async def test_a_round_on_demand(members: tuple[str, str], kind: RoundKind, refused: str) -> None:
    """One that this node can lead, with a member; it says so while it is in another one."""
    body = {"members": members, "kind": kind, "steps": ((8, 1),)}
    asked, found = requests(report=SimpleNamespace(observation="seen"))
    busy, _ = requests()
    if refused:
        with pytest.raises(Refusal, match=refused):
            await asked.handlers()["lead"](OTHER, body)
        assert found == []
        return
    assert await asked.handlers()["lead"](OTHER, body) == {"observation": "seen"}
    assert found == [(members, kind, ((8, 1),))]
    with pytest.raises(Refusal, match="already_testing"):
        await busy.handlers()["lead"](OTHER, body)
