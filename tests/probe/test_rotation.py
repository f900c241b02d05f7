"""The key is replaced while agents probe each other, and no round fails because of it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

from dshealthd.cli import main as cli
from tests.probe.services import NAMES, Agent, agents
from tests.waiting import eventually

PAIR = 2


def put(source: Path, target: Path) -> None:
    """Replace a file atomically, like tools that distribute files."""
    new = target.with_name(f"{target.name}.new")
    shutil.copyfile(source, new)
    new.chmod(0o600)
    new.replace(target)


def good(agent: Agent) -> float:
    """Return the number of an agent's successful rounds."""
    return agent.value("probe_rounds_total", "light", "ok")


def keys_of(agent: Agent) -> tuple[bytes, ...]:
    """Return the keys that an agent uses."""
    running = agent.service._running
    assert running is not None
    return running.credentials.keys


@contextlib.asynccontextmanager
async def changing(members: list[Agent], agent: Agent) -> AsyncIterator[None]:
    """Let an agent notice changed files, and require that all have good rounds afterwards."""
    old = keys_of(agent)
    yield
    await eventually(lambda: keys_of(agent) is not old)
    before = [good(agent) for agent in members]
    await eventually(
        lambda: all(good(agent) > had for agent, had in zip(members, before, strict=True))
    )


def failures(members: list[Agent]) -> list[dict[tuple[str, ...], float]]:
    """Return each agent's rounds that failed, by their labels."""
    return [
        {
            sample.labels: sample.value
            for sample in agent.all("probe_rounds_total")
            if sample.value and "ok" not in sample.labels
        }
        for agent in members
    ]


def require_no_failure(members: list[Agent], at_first: list[dict[tuple[str, ...], float]]) -> None:
    """Require that every round since succeeded, no call was refused, and every file was good.

    `at_first` are the rounds that failed while the other agent had not started to listen.
    """
    assert failures(members) == at_first
    for agent in members:
        for reason in ("key", "no_credentials"):
            assert agent.value("probe_peer_requests_refused_total", reason) == 0
        assert agent.value("probe_peer_credentials_last_reload_successful") == 1


async def test_key(tmp_path: Path) -> None:
    """`keys rotate` three times, with each file on one node seconds before the other: no round
    fails. After that nobody accepts the first key.
    """
    keys = [tmp_path / name / "key" for name in NAMES[:PAIR]]
    async with agents(tmp_path, PAIR) as members:
        first = keys[0].read_bytes()
        rotate = ["keys", "rotate", "--file", str(keys[0])]
        await eventually(lambda: all(good(agent) for agent in members))
        at_first = failures(members)
        for _ in range(3):
            async with changing(members, members[0]):
                assert await asyncio.to_thread(cli.main, rotate) == 0
            async with changing(members, members[1]):
                put(keys[0], keys[1])
        require_no_failure(members, at_first)
        assert keys[0].read_bytes() == keys[1].read_bytes()
        assert first.strip() not in keys[0].read_bytes()
