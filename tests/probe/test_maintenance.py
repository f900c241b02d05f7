"""Members in maintenance: rounds leave them out, and nobody accuses them."""

from __future__ import annotations

from pathlib import Path

from tests.probe.services import NAMES, PERIOD, Agent, agents, set_maintenance, snapshot
from tests.waiting import eventually


def met(agent: Agent, name: str, since: float) -> bool:
    """Return whether a node has had a round with another one that started after a time."""
    return any(
        name in entry["members"] and entry["outcome"] == "ok" and entry["time"] > since + PERIOD
        for entry in agent.rounds
    )


def absent(agent: Agent) -> list[str]:
    """Return the members that a node knows to be in maintenance."""
    return [name for name in NAMES if agent.service._state.absences.absent(name)]


async def test_a_member_in_maintenance_is_left_out(tmp_path: Path) -> None:
    """Nobody meets or accuses it, even when its agent ends; the others continue in pairs."""
    shot = snapshot()
    async with agents(tmp_path, 4, shots={NAMES[3]: shot}) as members:
        *others, last = members
        await eventually(lambda: all(agent.rounds for agent in members))
        set_maintenance(shot, members[0].wall() + 600)
        await eventually(lambda: all(absent(agent) == [last.name] for agent in others))
        await eventually(lambda: last.value("probe_skips_total", "maintenance") >= 1)
        await last.service.close()  # the node reboots
        ended = others[0].wall()
        await eventually(
            lambda: all(
                len([one for one in agent.rounds if one["time"] > ended and one["outcome"]]) >= 6
                for agent in others[:2]
            )
        )
        for agent in others:
            assert agent.suspects == []
            assert not met(agent, last.name, ended)
            assert not [
                one
                for one in agent.rounds
                if one["time"] > ended + PERIOD and one["outcome"] in {"refused", "unreachable"}
            ]
